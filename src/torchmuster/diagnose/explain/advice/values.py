"""Words for the braces of advice that no message has as they are: a sum, a name, a line of the user's own code.

Each value is worked out from an event, and from the case where another line has to be held against it. It is empty where the
log does not show it: then advice that needs it is not given (`rules/rows.py`).
"""

import math
import re
from collections.abc import Callable, Mapping

from torchmuster.diagnose.explain.advice.names import OF_NAMES
from torchmuster.diagnose.explain.advice.said import (
    Value,
    first_of,
    line_with,
    remedy_of,
    text_of,
)
from torchmuster.diagnose.explain.advice.tensors import OF_TENSORS
from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.events import LogEvent
from torchmuster.diagnose.explain.reading.gpu_memory import GpuMemory, in_gib, read_memory

# The memory of GPUs.


def _of_memory(which: Callable[[GpuMemory], float | str | None]) -> Value:
    def value(_case: Case, event: LogEvent) -> str:
        found = which(read_memory(text_of(event)))
        return found if isinstance(found, str) else in_gib(found) if found else ""

    return value


def _steps_before(case: Case, event: LogEvent) -> str:
    """Return the step up to which training went well before an event, if that was many."""
    steps = [
        int(step.get("number"))
        for log in case.record.logs
        if log.path == event.line.path
        for step in log.last_progress.values()
        if step.line.order < event.line.order and step.get("number").isdigit()
    ]
    return str(max(steps)) if steps and max(steps) >= _MANY_STEPS else ""


_MANY_STEPS = 200


# Limits.

_LIMIT = re.compile(r"open files\s+\(-n\)\s+(\d+)|\bulimit -n\W+(\d+)|RLIMIT_NOFILE\W+(\d+)")
_ENOUGH_FILES = 65536


def _open_files(case: Case, _event: LogEvent) -> str:
    found = _LIMIT.search(line_with(case, "open files ") or line_with(case, "ulimit -n"))
    limit = next((word for word in found.groups() if word), "") if found is not None else ""
    return limit if limit and int(limit) < _ENOUGH_FILES else ""


def _pace(case: Case, event: LogEvent) -> str:
    """Return how much of its steps a job had made when its time was up, if the log shows its first steps as well."""
    for log in case.record.logs:
        first = next((found for line in log.header if (found := _STEP_OF.search(line.text))), None)
        for step in log.last_progress.values():
            last = _STEP_OF.search(step.line.text)
            if first is None or last is None or log.path != event.line.path:
                continue
            begun, done, total = int(first["done"]), int(last["done"]), int(last["total"])
            if begun < done < total and first["total"] == last["total"]:
                times = math.ceil(10 * (total - begun) / (done - begun)) / 10
                return f"{done} of {total} steps were done, so all of them need about {times:g} times as long"
    return ""


_STEP_OF = re.compile(r"(?<![\d.])(?P<done>\d+) ?(?:/|of) ?(?P<total>\d{2,})\b")
_SMALL = 1 << 20


def _nccl_bytes(_case: Case, event: LogEvent) -> str:
    """Return the size of an allocation that NCCL did not get, if it is so small that any GPU with room has it."""
    size = first_of(
        re.compile(r"Failed to CUDA (?:host )?[mc]alloc(?: async)? (\d+) bytes"), event.line.text, 1
    )
    return size if size and int(size) < _SMALL else ""


_CACHE_TOKENS = re.compile(r"can be stored in KV cache \((\d+)\)")
_FREE_AT_START = re.compile(
    r"Free memory on device \S* ?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\)"
)
_ONLY_HAS = re.compile(r"your machine only has: \[([\d, ]*)\]")


def _cache_tokens(_case: Case, event: LogEvent) -> str:
    return first_of(_CACHE_TOKENS, text_of(event), 1)


def _free_share(_case: Case, event: LogEvent) -> str:
    """Return which share of a GPU was free when vLLM started, a little less of it than all."""
    found = _FREE_AT_START.search(text_of(event))
    share = math.floor(95 * float(found["free"]) / float(found["total"])) / 100 if found else 0
    return f"{share:g}" if share else ""


_OF_WORKER = re.compile(
    r"memory used=(?P<own>[\d.]+)GB\) was running was [\d.]+GB / (?P<total>[\d.]+)GB"
)


def _ray_share(_case: Case, event: LogEvent) -> str:
    """Return what the worker that Ray ended held of its node, if that was the most of it."""
    found = _OF_WORKER.search(text_of(event))
    if found is None or 2 * float(found["own"]) < float(found["total"]):
        return ""
    return f"{found['own']} of the {found['total']} GB of its node"


def _gpus_here(_case: Case, event: LogEvent) -> str:
    """Return how many GPUs Lightning saw."""
    listed = first_of(_ONLY_HAS, text_of(event), 1)
    return str(len(listed.split(","))) if listed else ""


def _evaluation(_case: Case, event: LogEvent) -> str:
    """Return `evaluation` where the Trainer had gone into it."""
    frames = (event.get("through"), *event.detail)
    return "evaluation" if any(map(_EVALUATES.search, frames)) else ""


_EVALUATES = re.compile(
    r"trainer_pt_utils\.py|in (?:evaluation_loop|prediction_loop|prediction_step)$"
)


def _cpu_build(_case: Case, event: LogEvent) -> str:
    return "CPU build" if re.search(r"not (?:been )?compiled with CUDA", text_of(event)) else ""


VALUES: Mapping[str, Value] = {
    **OF_TENSORS,
    **OF_NAMES,
    "memory_asked": _of_memory(lambda memory: memory.asked),
    "memory_total": _of_memory(lambda memory: memory.total),
    "memory_own": _of_memory(lambda memory: memory.own),
    "other_process": _of_memory(lambda memory: memory.largest_other),
    "steps_before": _steps_before,
    "open_files": _open_files,
    "pace": _pace,
    "cache_tokens": _cache_tokens,
    "free_share": _free_share,
    "gpus_here": _gpus_here,
    "ray_share": _ray_share,
    "evaluation": _evaluation,
    "remedy": lambda _case, event: remedy_of(event),
    "cpu_build": _cpu_build,
    "nccl_bytes": _nccl_bytes,
}
