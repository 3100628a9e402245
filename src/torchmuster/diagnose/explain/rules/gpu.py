"""GPU memory, by the numbers in torch's message; and losses that are not finite."""

import re
from collections.abc import Iterator

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.catalogue.index import RULE_ROWS
from torchmuster.diagnose.explain.events import LogEvent, LogFinding
from torchmuster.diagnose.explain.reading.gpu_memory import GpuMemory, in_gib, read_memory
from torchmuster.diagnose.explain.rules.rows import HIGH, MEDIUM, found_by, words_of

_MUCH = 0.3  # of the GPU
_LEAST_NAN_LINES = 2

# Calls that a program makes before it has anything on a GPU.
_AT_THE_START = re.compile(
    r"in (?:set_device|_lazy_init|_cuda_init|init_process_group|barrier|init_device|get_device_(?:name|properties|capability)|manual_seed(?:_all)?)$"
    # The first load: a context that does not fit fails without the numbers of torch's own
    # allocator.
    r"|torch/(?:nn/modules/module|_utils|storage|serialization)\.py\", line \d+, in (?:_?to|convert|_?apply|_?cuda|<lambda>|\w*deserialize)$"
)


def gpu_memory(case: Case) -> Iterator[LogFinding]:
    """Report a GPU that others fill, or fragmented memory: a smaller batch would help neither."""
    for event in case.of("cuda_oom"):
        memory = read_memory(words_of(event))
        if memory.allowed is not None and memory.free and memory.free > (memory.asked or 0):
            yield found_by(case, RULE_ROWS["gpu.capped"], [event], _names(memory))
            return
        if memory.total is None and _is_at_the_start(case, event):
            yield found_by(case, RULE_ROWS["gpu.full-before-start"], [event])
            return
        if memory.total is None:
            continue
        if memory.others > _MUCH * memory.total:
            yield found_by(case, RULE_ROWS["gpu.taken"], [event], _names(memory))
            return
        if (
            memory.unused
            and memory.asked
            and memory.unused > max(memory.asked, _MUCH * memory.total)
        ):
            yield found_by(case, RULE_ROWS["gpu.fragmented"], [event], _names(memory))
            return


def _is_at_the_start(case: Case, event: LogEvent) -> bool:
    """Return whether a process met a full GPU before it used any: no step, and a set-up call."""
    frames = [text for text in event.detail if _AT_THE_START.search(text)]
    steps = [step for log in case.record.logs for step in log.last_progress.values()]
    return bool(frames) and not any(step.line.order < event.line.order for step in steps)


def not_finite(case: Case) -> Iterator[LogFinding]:
    """Report losses that are NaN or infinite to the end; one skipped step does not count."""
    found = case.of("not_finite")
    if len(found) < _LEAST_NAN_LINES or _was_finite_again(case, found[-1]):
        return
    yield found_by(
        case, RULE_ROWS["gpu.diverged"], found, confidence=HIGH if len(found) > 20 else MEDIUM
    )


def _was_finite_again(case: Case, last: LogEvent) -> bool:
    return any(
        step.line.order > last.line.order and re.search(r"loss\W{0,3}\d", step.line.text)
        for log in case.record.logs
        if log.path == last.line.path
        for step in log.last_progress.values()
    )


def _names(memory: GpuMemory) -> dict[str, str]:
    sizes = {
        "others": memory.others,
        "total": memory.total,
        "own": memory.own,
        "unused": memory.unused,
        "asked": memory.asked,
        "allowed": memory.allowed,
    }
    words = {name: in_gib(size) for name, size in sizes.items() if size is not None}
    return {"gpu": memory.gpu, **words}
