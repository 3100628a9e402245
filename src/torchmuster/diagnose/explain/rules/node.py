"""What a node refuses: error numbers of its kernel, and memory of its GPUs; also losses that are not finite.

An error number says what failed, the path says where; torch's message has the numbers about a GPU's memory.
"""

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import replace

from torchmuster.diagnose.explain.advice import GpuMemory, in_gib, read_memory
from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.catalogue.index import RULE_ROWS, Row, Weight, rule_rows
from torchmuster.diagnose.explain.events import LineRole, LogEvent, LogFinding
from torchmuster.diagnose.explain.reading.patterns import SENTENCES
from torchmuster.diagnose.explain.rules.collective import raised_by
from torchmuster.diagnose.explain.rules.rows import HIGH, LOW, MEDIUM, at, found_by, words_of

_ROWS = {
    getattr(errno, row.name.removeprefix("errno.").upper()): row for row in rule_rows("errno.")
}
_ROWS[errno.EPERM] = _ROWS[errno.EACCES]
_ROWS[errno.ENFILE] = _ROWS[errno.EMFILE]
_ROWS[errno.ESHUTDOWN] = _ROWS[errno.EHOSTDOWN] = _ROWS[errno.ENOTCONN]
_FAILED_TO_READ = re.compile(r"([^\s\"]+): Input/output error")
_IS_EMPTY = re.compile(r"\[Errno 2\] [^:]+: ''$")
_IN_SHM = re.compile(r"/dev/shm|</?torch_\d|shared memory")
_PATH = re.compile(r"'(/[^']+)'")
# For a copy, Python names both files; a lack of space or of rights is about the second.
_COPIED_TO = re.compile(r"\[Errno \d+\] [^:]+: '[^']*' -> '(?P<path>[^']+)'")
_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def system_errors(case: Case) -> Iterator[LogFinding]:
    """Report the first line of each error number; those that ended a process come first."""
    seen: set[int] = set()
    for event in sorted(case.of("errno"), key=lambda event: not event.get("uncaught")):
        number = number_of(event)
        if number and number not in seen and event.role is LineRole.CAUSE:
            seen.add(number)
            yield _finding(case, event, number)


def broken_disk(case: Case) -> Iterator[LogFinding]:
    """Report a node on which several programs can't read or write: other failures follow."""
    found = [e for e in case.of("errno") if number_of(e) == errno.EIO]
    programs = {name for e in found for name in _FAILED_TO_READ.findall(e.line.text)}
    if len(programs) > 1:
        names = {"of_path": f", for {len(programs)} programs"}
        yield found_by(case, _ROWS[errno.EIO], found, names, weight=Weight.SCHEDULER - 1)


def _finding(case: Case, event: LogEvent, number: int) -> LogFinding:
    copied = _COPIED_TO.search(words_of(event)) if number in _OF_WRITING else None
    if copied is not None:
        event = replace(event, fields={**event.fields, "path": copied["path"]})
    path = event.get("path") or next(iter(_PATH.findall(event.line.text)), "")
    row = _ROWS.get(number, RULE_ROWS["system.other"])
    if number == errno.ENOSPC and (_IN_SHM.search(event.line.text) or "torch_" in path):
        row = RULE_ROWS["system.shm-full"]
    if number == errno.ENOENT and _IS_EMPTY.search(words_of(event)):
        row = RULE_ROWS["system.no-name"]
    names = {
        "of_path": f": {path or _own_words(event)}" if path or _own_words(event) else "",
        "folder": os.path.dirname(path) or "PATH",
        "path": path or "PATH",
        "name": errno.errorcode.get(number, str(number)),
        "meaning": os.strerror(number).lower(),
    }
    raised = bool(event.get("type"))
    by = raised_by(case, event, case.of("errno"))
    return found_by(
        case,
        row,
        [event],
        names,
        confidence=row.confidence if raised or row.confidence is HIGH else LOW,
        weight=row.weight if raised or row.weight == Weight.PROVED else Weight.COLLECTIVE - 1,
        at=event.get("where") or at(event),
        because=(*event.detail[-4:], *((f"{by} raised it",) if by else ())),
    )


def row_of_number(number: int) -> Row | None:
    """Return the row of an error number; None if it has none."""
    return _ROWS.get(number)


def _own_words(event: LogEvent) -> str:
    """Return an exception's message, if it is more than the kernel's own sentence."""
    message = event.get("message")
    is_bare = not event.get("type") or message.startswith("[Errno")
    return "" if is_bare else message[:200]


def number_of(event: LogEvent) -> int:
    """Return the error number of an event, given as a number or a sentence; 0 if there is none."""
    if event.get("errno").isdigit():
        return int(event.get("errno"))
    return SENTENCES.get(event.get("text").strip().lower(), 0)


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
