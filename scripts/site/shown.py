"""Run the commands that a page shows, and compare what they print with what the page says.

    shown.py PAGE            fails, with the difference, when the page shows something else
    shown.py PAGE --update   writes what they print into the page

A block ```` ```console ```` holds commands after `$ ` and their output; ```` ```python title="FILE" ```` is written to
FILE first. `# a few epochs later` waits. Numbers, ids, times and paths differ from run to run: they are compared as such.
"""

import difflib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_WAIT = "# a few epochs later"
_EPOCHS = re.compile(r"^[2-9] +\d", re.MULTILINE)  # a row of `muster status`
_LIMIT_S = 240.0
_BLOCK = re.compile(r'^```(console|python title="([^"]+)")\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_VARIES = (
    (r"\b\d{8}-\d{6}-", ""),
    (r"-[0-9a-f]{4}\b", "-ID"),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d", "CLOCK"),
    (r"\d+(\.\d+)?(e-?\d+)?", "N"),
    (r"(N (ms|s|min|h|d)\b ?)+", "TIME "),
    (r"[ -]{2,}", "  "),
)


def plain(text: str) -> list[str]:
    """Return the lines of an output without what differs from run to run; equal neighbours are one."""
    found: list[str] = []
    for line in text.strip("\n").split("\n"):
        if re.match(r"(muster: )?step \d", line):
            continue  # how often it is printed depends on the machine
        for pattern, word in _VARIES:
            line = re.sub(pattern, word, line)  # noqa: PLW2901
        if not found or line.rstrip() != found[-1]:
            found.append(line.rstrip())
    return found


def run(commands: list[str], folder: Path) -> str:
    """Run commands, one after the other, in a folder below a home of their own; return the block."""
    program = folder.parent / "bin"
    program.mkdir(exist_ok=True)
    muster = program / "muster"
    muster.write_text(f'#!/bin/sh\nexec {sys.executable} -m torchmuster "$@"\n')
    muster.chmod(0o755)
    env = {
        **{key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")},
        "HOME": str(folder.parent),
        "PATH": f"{program}:{os.environ['PATH']}",
        "MUSTER_ON": "local",
        "OMP_NUM_THREADS": "1",
    }

    def said(command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", f"({command}) 2>&1"],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        return done.stdout.replace(str(folder.parent), "~")

    shown = []
    for command in commands:
        if command == _WAIT:
            deadline = time.monotonic() + _LIMIT_S
            while not _EPOCHS.search(said("muster status")) and time.monotonic() < deadline:
                time.sleep(0.2)
            shown.append(_WAIT)
            continue
        shown.append(f"$ {command}\n{said(command)}".rstrip("\n"))
    return "\n".join(shown) + "\n"


def check(page: Path, *, update: bool) -> str:
    """Run a page; return how what it shows differs from what is printed, and write that if asked to."""
    text, differs = page.read_text(), []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        folder = Path(home) / "project"
        folder.mkdir()
        for kind, name, inside in _BLOCK.findall(text):
            if name:
                (folder / name).write_text(inside)
                continue
            lines = inside.split("\n")
            commands = [line.removeprefix("$ ") for line in lines if re.match(r"\$ |# a few", line)]
            now = run(commands, folder)
            differs += difflib.unified_diff(
                plain(inside), plain(now), "the page", "now", lineterm=""
            )
            if update:
                text = text.replace(f"```{kind}\n{inside}```", f"```{kind}\n{now}```")
    if update:
        page.write_text(text)
    return "\n".join(differs)


if __name__ == "__main__":
    found = check(Path(sys.argv[1]), update="--update" in sys.argv)
    print(found)
    sys.exit(bool(found) and "--update" not in sys.argv)
