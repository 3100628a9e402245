"""Run each check in its own process, end hung ones, and verify that the device is empty again."""

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence

from torchmuster.core import proc
from torchmuster.gpucheck import results
from torchmuster.gpucheck.kit import (
    FailedError,
    GpuMachine,
    ImpossibleError,
    Kit,
    forget,
    in_use,
    look,
)
from torchmuster.gpucheck.results import FAILED, IMPOSSIBLE, PASSED, CheckResult
from torchmuster.gpucheck.table import CHECKS, GpuCheck

_EMPTY_S = 10.0
_LEFT_BYTES = 64 << 20


def conduct(checks: Sequence[GpuCheck], machine: GpuMachine, path: str) -> list[CheckResult]:
    """Run checks one after another; add each result to a file at once."""
    proc.become_subreaper()
    call, ended = results.begin_call(path, results.describe(machine)), []
    for check in checks:
        result = _run(check, machine)
        results.print_line(result)
        results.add(path, result, call)
        ended.append(result)
    return ended


def _run(check: GpuCheck, machine: GpuMachine) -> CheckResult:
    if len(machine.gpus) < check.num_gpus:
        shown = f"{len(machine.gpus)} visible" if machine.gpus else machine.why_none
        why = f"needs {check.num_gpus} GPU{'s' if check.num_gpus > 1 else ''}: {shown}"
        return CheckResult(name=check.name, outcome=IMPOSSIBLE, seconds=0.0, evidence=why)
    scratch = tempfile.mkdtemp(prefix="gpucheck-")
    limit_s = check.limit_s * machine.patience
    begun, before = time.monotonic(), in_use(machine)
    words = ["-m", "torchmuster.gpucheck", "--one", check.name, "--scratch", scratch]
    argv = proc.node_program("dies_with_parent", sys.executable, *words)
    child, status = proc.start(argv, env=proc.own_package_environment(), stderr=2), None
    try:
        status = child.wait(limit_s)
    finally:
        took = time.monotonic() - begun
        if status is None:
            proc.kill_session(child.pid)
            child.wait(_EMPTY_S)
        _end_all()
        hangs = f"it hangs: ended after {limit_s:g} s"
        result = _read(check, scratch, took, f"exit code {status}" if status is not None else hangs)
        shutil.rmtree(scratch, ignore_errors=True)
    left = _what_is_left(machine, before)
    return _failed(check, took, left) if left and result.outcome != FAILED else result


def _failed(check: GpuCheck, took: float, why: str) -> CheckResult:
    return CheckResult(name=check.name, outcome=FAILED, seconds=round(took, 2), evidence=why)


def _end_all() -> None:
    """End what a check has left running, one generation after another."""
    deadline = time.monotonic() + _EMPTY_S
    while proc.end_children() and time.monotonic() < deadline:
        time.sleep(0.2)  # noqa: TID251 - the kernel has no event for the end of all descendants


def _read(check: GpuCheck, scratch: str, took: float, how_ended: str) -> CheckResult:
    try:
        with open(os.path.join(scratch, "result.json")) as file:
            return CheckResult(**json.load(file))
    except (OSError, ValueError, TypeError):
        return _failed(check, took, f"no result: {how_ended}")


def _what_is_left(machine: GpuMachine, before: Sequence[int]) -> str:
    """Wait until the devices are as before; return what is not."""
    deadline = time.monotonic() + _EMPTY_S
    more = 0 if machine.pretended else _LEFT_BYTES
    while True:
        now = in_use(machine)
        left = [n for n, (b, a) in enumerate(zip(before, now, strict=True)) if a > b + more]
        if not left:
            forget(machine)
            return ""
        if time.monotonic() > deadline:
            return (
                f"GPU {left[0]} is not empty afterwards: {before[left[0]]} before, {now[left[0]]}"
            )
        time.sleep(0.2)  # noqa: TID251 - the driver has no event for it


def run_one(name: str, scratch: str) -> None:
    """Run one check in this process and write its result."""
    check = next(check for check in CHECKS if check.name == name)
    seed = int(os.environ.get("GPUCHECK_SEED") or random.SystemRandom().randrange(1 << 30))
    kit = Kit(machine=look(), scratch=scratch, draw=random.Random(seed))
    begun, outcome, evidence = time.monotonic(), PASSED, ""
    try:
        check.run(kit)
    except FailedError as failure:
        outcome, evidence = FAILED, f"{failure}\nseed {seed}"
    except ImpossibleError as reason:
        outcome, evidence = IMPOSSIBLE, str(reason)
    result = {
        "name": name,
        "outcome": outcome,
        "seconds": round(time.monotonic() - begun, 2),
        "evidence": evidence,
        "measures": kit.measures,
    }
    with open(os.path.join(scratch, "result.json"), "w") as file:
        json.dump(result, file)
