"""Whether another attempt can fix a failure, and whether it is the same as the last one: from evidence, never from a clock.

`docs/faults.md` has the table. A program's mistake remains; a failure of its environment may pass. The kind of an error shows which of the two
it is, and if steps of training are known, they show whether there was progress.
"""

import enum
import re
import signal
from dataclasses import dataclass

from torchmuster.model.failure import ECHOES, OVERUSED, EndKind, WorkerEnd


class Prospect(enum.Enum):
    """The prospect of another attempt."""

    NONE = "none"  # the same end
    DOUBTFUL = "doubtful"  # if it ends like this again without progress, it would so for ever
    OPEN = "open"  # its surroundings may be other ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The identity of a failure; ends with an open prospect have none.

    Attributes:
        what: The exception's type, or the exit code.
        words: Its message, or the last lines of a worker that raised nothing, without what differs between ranks and starts.
    """

    kind: EndKind
    what: str
    where: str | None
    words: str


_CANT_BE_MENDED = frozenset({"SyntaxError", "ImportError", "NameError"})
# Errors of the system that a missing or wrong path causes: they stay as long as the path does.
_OF_A_PATH = frozenset(
    {
        "FileNotFoundError",
        "NotADirectoryError",
        "IsADirectoryError",
        "PermissionError",
        "FileExistsError",
    }
)
# A worker has no terminal, and a build lacks what it lacks.
_TOLD_FOR_EVER = re.compile(r"EOF when reading a line|doesn't have \w+ built in")
# A limit that a script runs into at once, or a file that it finds cut off: what follows within a second finds it again.
_TOLD_OF_A_LIMIT = re.compile(
    r"DefaultCPUAllocator|no space left|disk quota|Ran out of input|collective mismatch",
    re.IGNORECASE,
)
_OF_THE_SURROUNDINGS = frozenset({"OSError", "MemoryError", "EOFError"})
_NAMED_FOR_SURROUNDINGS = re.compile(
    r"Timeout|TimedOut|Connect|Network|Socket|HTTP|Unavailable|Throttl|RateLimit|Transient"
    r"|^Dist\w*Error$|OutOfMemory|AcceleratorError|BrokenProcessPool"
)
_TOLD_BY_SURROUNDINGS = re.compile(
    r"""
      CUDA\ (driver\ )?error | CUBLAS | cuDNN\ error | CUDNN_STATUS | \bNCCL | HIP\ error
    | out\ of\ memory | can't\ allocate\ memory | cannot\ allocate\ memory | timed\ out
    | too\ many\ open\ files | input/output\ error | stale\ file\ handle
    | resource\ temporarily\ unavailable | DataLoader\ worker\ .*\ killed
    | gloo | c10d | TCPStore | rendezvous | connection | socket | \bpeer\b
    """,
    re.VERBOSE | re.IGNORECASE,
)
# What differs between two starts, or between ranks, and says nothing of progress.
_DIFFERS = re.compile(
    r"0x[0-9a-f]+|\bpid\(s\) [\d, ]+|\b(?:pid|process|rank|cuda:|thread-)\W?\d+|\b[0-9a-f]{8,}\b|/tmp/\S+",
    re.IGNORECASE,
)
_SAID_WHY = (EndKind.EXCEPTION, EndKind.HANG)
_MAX_WORDS = 2000
_SHELLS_SIGNAL = 128


def prospect(end: WorkerEnd) -> Prospect:
    """Return the prospect of another attempt after this end."""
    said = _said(end)
    if end.is_final or _TOLD_FOR_EVER.search(said):
        return Prospect.NONE
    if _TOLD_OF_A_LIMIT.search(said):
        return Prospect.DOUBTFUL
    if end.kind in (EndKind.EXIT_CODE, EndKind.PREEMPTED):
        by_signal = (end.exit_code or 0) > _SHELLS_SIGNAL  # a shell says so of what it ran
        return Prospect.OPEN if by_signal else Prospect.DOUBTFUL
    if end.kind is EndKind.NODE_LOST and end.detail == OVERUSED:
        return Prospect.DOUBTFUL
    if end.kind not in _SAID_WHY or end.error is None or end.looks_like_echo:
        return Prospect.OPEN
    error = end.error
    if end.kind is EndKind.HANG:
        return Prospect.OPEN if "TimeoutError" in error.bases else Prospect.DOUBTFUL
    if error.blames_node:
        return Prospect.OPEN  # its node gets no ranks again
    names = {error.type_name.rpartition(".")[2], *error.bases}
    if _TOLD_BY_SURROUNDINGS.search(said) or ECHOES.search(said):
        return Prospect.OPEN
    if names & _CANT_BE_MENDED or "ModuleNotFoundError" in names:
        return Prospect.NONE
    if names & _OF_A_PATH:
        return Prospect.DOUBTFUL
    if names & _OF_THE_SURROUNDINGS or any(map(_NAMED_FOR_SURROUNDINGS.search, names)):
        return Prospect.OPEN
    return Prospect.DOUBTFUL


def _said(end: WorkerEnd) -> str:
    """Return the words of an end that tell its prospect; those of a process that was killed don't."""
    if end.error is not None:
        return f"{end.error.type_name}: {end.error.message}"
    return "\n".join(end.tail) if end.signum in (None, signal.SIGABRT) else ""


def mark(end: WorkerEnd, *, after_early_end: bool = False) -> Mark | None:
    """Return the identity of a failure that may recur; None if its prospect is open.

    Args:
        end: Of the worker that failed.
        after_early_end: Other ranks had ended with 0, so an error of the connection to them is no chance.
    """
    if after_early_end and end.looks_like_echo:
        where = end.error.where if end.error is not None else None
        return Mark(kind=end.kind, what="early end", where=where, words="")
    if prospect(end) is Prospect.OPEN:
        return None
    if end.kind is EndKind.HANG and end.error is not None:
        what, words = end.error.type_name, ""  # its message has ranks and seconds
    elif end.kind is EndKind.EXCEPTION and end.error is not None:
        what, words = end.error.type_name, end.error.message
    else:
        what, words = str(end.exit_code), "\n".join(end.tail)
    where = end.error.where if end.error is not None else None
    return Mark(kind=end.kind, what=what, where=where, words=_DIFFERS.sub("", words)[:_MAX_WORDS])
