"""The page made from a file of results, and the summary line for the README."""

import glob
import os
from collections.abc import Mapping
from typing import Any

from torchmuster.gpucheck import results
from torchmuster.gpucheck.device import PRETENDED
from torchmuster.gpucheck.results import FAILED, IMPOSSIBLE, PASSED
from torchmuster.gpucheck.table import CHECKS


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
    found = [results.read(path) for path in glob.glob(os.path.join(folder, "*.json"))]
    found = [whole for whole in found if _on_real_gpus(whole)]
    return max(found, key=lambda whole: whole["calls"][-1]["time"], default=None)
