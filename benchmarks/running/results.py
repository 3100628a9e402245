"""What a table begins with, and where it goes: one line of facts, a file for programs, a file for people."""

import datetime as dt
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from running.stage import REPOSITORY

Facts = dict[str, str | int | float]
FOLDER = REPOSITORY / "benchmarks" / "results"


def machine_facts() -> Facts:
    """Return what a reader must know to compare, and nothing that names the machine.

    The load is that of the last minute, so call this before anything is measured.
    """
    return {
        "commit": commit(),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "load before": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": _version("torch"),
    }


def commit() -> str:
    """Return the commit that is measured; `+` behind it says that files differ from it."""
    head, changes = _git("rev-parse", "--short=9", "HEAD"), _git("status", "--porcelain")
    return f"{head}{'+' if changes else ''}" if head else "unknown"


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True, timeout=30.0
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def headline(machine: Mapping[str, Any], how: str) -> str:
    """Return the line over a table."""
    return f"{', '.join(f'{key} {value}' for key, value in machine.items())}; {how}"


def save(path: Path, document: Mapping[str, Any], text: str) -> None:
    """Print the tables; write them, and all readings beside them."""
    print(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    path.with_suffix(".md").write_text(f"{text}\n")
