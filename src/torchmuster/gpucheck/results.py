"""The results file of the kit, with the newest result of each check, and the page made from it."""

import glob
import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.model.plan import look_for_torch
from torchmuster.errors import UsageError
from torchmuster.gpucheck.kit import PRETENDED, GpuMachine
from torchmuster.gpucheck.table import CHECKS
from torchmuster.launcher.files.code_copy import content_hash, package_files

PASSED, FAILED, IMPOSSIBLE = "passed", "failed", "not possible here"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """How one check has ended.

    Attributes:
        outcome: `passed`, `failed` or `not possible here`.
        evidence: Evidence of a failure, or why the check is not possible.
    """

    name: str
    outcome: str
    seconds: float
    evidence: str = ""
    measures: dict[str, Any] = field(default_factory=dict)


def describe(machine: GpuMachine) -> dict[str, Any]:
    """Return the facts about this machine and the tested version."""
    found = look_for_torch()
    return {
        "gpus": [f"{gpu.name}, {gpu.memory_bytes >> 30} GiB" for gpu in machine.gpus],
        "driver": machine.driver,
        "torch": found.get("torch", "none"),
        "cuda": found.get("cuda", ""),
        "python": platform.python_version(),
        "commit": _commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _commit() -> str:
    """Return the commit of the source, or the checksum of an installed package."""
    folder = os.path.dirname(proc.PACKAGE_FOLDER)
    try:
        said = proc.ask_spared(["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=12"], 10.0)  # fmt: skip
        if said.status == 0:
            return said.stdout.decode().strip()
    except Exception:  # noqa: BLE001 - a machine without git, or no checkout
        pass
    return f"package {content_hash(package_files(proc.PACKAGE_FOLDER))[:12]}"


def read(path: str) -> dict[str, Any]:
    """Return the file of earlier calls; an empty record if there is none.

    Raises:
        UsageError: It is unreadable, or not a results file.
    """
    try:
        with open(path) as file:
            found = json.load(file)
    except FileNotFoundError:
        return {"format": 1, "calls": [], "checks": {}}
    except (OSError, ValueError) as error:
        raise UsageError("the results can't be read", where=path, why=str(error)) from error
    if not isinstance(found, dict) or found.get("format") != 1:
        raise UsageError("this is no file of results", where=path, fix="name another with --out")
    return found


def begin_call(path: str, facts: Mapping[str, Any]) -> int:
    """Add a call with its machine; return its number."""
    whole = read(path)
    whole["calls"].append(dict(facts))
    atomic.write_json(path, whole)
    return len(whole["calls"]) - 1


def add(path: str, result: CheckResult, call: int) -> None:
    """Add one result, replacing an earlier one of the same check."""
    whole = read(path)
    whole["checks"][result.name] = {**asdict(result), "call": call}
    atomic.write_json(path, whole)


def default_name(machine: GpuMachine) -> str:
    """Return the default file name for this machine's GPU."""
    name = machine.gpus[0].name if machine.gpus else "no-gpu"
    return "-".join(w for w in "".join(c if c.isalnum() else " " for c in name.lower()).split())


def print_line(result: CheckResult) -> None:
    """Print the result of a check."""
    print(f"{result.outcome:18} {result.seconds:6.1f} s  {result.name}", flush=True)
    if result.evidence:
        print("".join(f"    {line}\n" for line in result.evidence.splitlines()), end="", flush=True)
    for name, value in result.measures.items():
        print(f"    {name}: {value}", flush=True)


def as_markdown(whole: Mapping[str, Any]) -> str:
    """Return the page: what ran where, and each check with its outcome and numbers."""
    lines = ["# What has run on GPUs", "", f"{summary(whole)}", ""]
    for number, call in enumerate(whole["calls"]):
        measures = "; ".join(f"{name} {_flat(value)}" for name, value in call.items())
        lines.append(f"- call {number}: {measures}")
    lines += ["", "| check | promise | outcome | s | numbers, evidence |", "|---|---|---|---|---|"]
    for check in CHECKS:
        found = whole["checks"].get(check.name)
        if found is None:
            lines.append(f"| {check.name} | {check.promise} | not run | | |")
            continue
        measures = "; ".join(f"{name}: {value}" for name, value in found["measures"].items())
        more = _flat(found["evidence"])[:300]
        text = "; ".join(part for part in (measures, more) if part).replace("|", "\\|")
        row = [check.name, check.promise, found["outcome"], f"{found['seconds']:g}", text]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _flat(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value).replace("\n", " / ")


def summary(whole: Mapping[str, Any] | None) -> str:
    """Return a sentence on what has run on GPUs and what has not."""
    found = _on_real_gpus(whole) if whole else []
    if not whole or not found:
        return "**Not yet run on a GPU**: everything here was measured on CPUs with Gloo; `make gpu` tries it on yours"
    num = {word: sum(c["outcome"] == word for c in found) for word in (PASSED, FAILED, IMPOSSIBLE)}
    call = whole["calls"][max(c["call"] for c in found)]
    where = f"{', '.join(call['gpus'])}, torch {call['torch']}"
    failed = [c["name"] for c in found if c["outcome"] == FAILED]
    parts = [f"**Run on GPUs** ({where}, {call['time'][:10]}): {num[PASSED]} checks passed"]
    parts += [f"{num[FAILED]} failed ({', '.join(failed)})"] if failed else []
    impossible = [c["name"] for c in found if c["outcome"] == IMPOSSIBLE]
    ran = {c["name"] for c in found}
    missing = [check.name for check in CHECKS if check.name not in ran] + impossible
    coverage = f"not run: {', '.join(missing)}" if len(missing) < 7 else f"{len(missing)} not run"
    parts += [coverage] if missing else []
    return "; ".join(parts)


def _on_real_gpus(whole: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    real = {n for n, call in enumerate(whole["calls"]) if call["driver"] not in ("", PRETENDED)}
    return [found for found in whole["checks"].values() if found["call"] in real]


def newest(folder: str) -> dict[str, Any] | None:
    """Return the newest file of GPU results in a folder, or None."""
    found = [read(path) for path in glob.glob(os.path.join(folder, "*.json"))]
    found = [whole for whole in found if _on_real_gpus(whole)]
    return max(found, key=lambda whole: whole["calls"][-1]["time"], default=None)
