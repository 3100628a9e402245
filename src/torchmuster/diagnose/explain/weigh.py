"""What findings weigh, and where they happened: what all rules share."""

import re
from collections.abc import Callable, Iterator

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.events import LineRole, LogEvent, LogFinding
from torchmuster.diagnose.finding import Confidence


class Weight:
    """What comes first when several causes are argued; all in one place, so that they can be compared."""

    SCHEDULER = 100
    START = 90
    PROVED = 85
    SPECIFIC = 80
    LAUNCH = 70
    NETWORK = 65
    PROGRAM = 60
    ABSENCE = 50
    SIGNAL = 40
    COLLECTIVE = 35
    ENVELOPE = 10


# What a line may say only in passing: a library that is tried and not needed, a probe of a job script.
_SAID_IN_PASSING = frozenset(
    {
        *("library", "no_module_main", "module_load", "no_command", "not_permitted"),
        *("no_gpu", "cuda_ordinal", "nccl_lo", "xid", "nccl_plugin", "shm"),
    }
)
_NOTICE = re.compile(r"NCCL INFO|\bWARNING\b|[Ww]arning: |^W | dynamic library ")
# Without one of these nothing starts; any other command may be missing in a script that goes on.
_STARTS_TRAINING = re.compile(r"python|torchrun|accelerate|deepspeed|mpi|srun|pbsdsh|muster|sh$")
_LAUNCHER_SPEAKS = (
    "launch_config",
    "rdzv_timeout",
    "rdzv_connection",
    "rdzv_closed",
    "rdzv_complete",
)
_NEEDS_WHAT_WAS_MISSING = re.compile(r"ImportError|ModuleNotFoundError")
Rule = Callable[[Case], Iterator[LogFinding]]
HIGH, MEDIUM, LOW = Confidence.HIGH, Confidence.MEDIUM, Confidence.LOW


def at(event: LogEvent) -> str:
    """Return where an event was: who wrote it, file and line."""
    who = str(event.who)
    return f"{who}, {event.line.place}" if who else event.line.place


def is_notice(event: LogEvent) -> bool:
    """Say whether a line only warns of what a program may do without."""
    passing = event.kind in _SAID_IN_PASSING and event.kind != "nccl_lo"
    return passing and not event.get("type") and _NOTICE.search(event.line.text) is not None


def was_survived(case: Case, event: LogEvent) -> bool:
    """Say whether a line was no end: its writer made steps after it, or raised something that has its own reason."""
    if event.kind not in _SAID_IN_PASSING or event.get("type"):
        return False
    line = event.line
    if _script_went_on(case, event):
        return True
    for log in case.record.logs:
        if log.path == line.path and any(
            step.line.order > line.order and _is_same(step, event)
            for step in log.last_progress.values()
        ):
            return True
    return any(
        later.line.path == line.path
        and later.line.order > line.order
        and later.role is LineRole.CAUSE
        and later.get("uncaught")
        and _is_same(later, event)
        and not _NEEDS_WHAT_WAS_MISSING.search(later.get("type"))
        for later in case.of("exception", "errno")
    )


def _script_went_on(case: Case, event: LogEvent) -> bool:
    """Say whether a script lacked a command, e.g. ping, and started the launcher all the same."""
    command = event.get("command") or event.get("other") or event.get("name")
    if event.kind != "no_command" or not command or _STARTS_TRAINING.search(command):
        return False
    line = event.line
    return any(
        later.line.path == line.path and later.line.order > line.order
        for later in case.of(*_LAUNCHER_SPEAKS)
    )


def _is_same(one: LogEvent, other: LogEvent) -> bool:
    """Say whether two lines may be of one writer: an exception often bears no host where NCCL's lines do."""
    hosts = {one.who.host, other.who.host} - {None}
    return len(hosts) < 2 and one.who.task == other.who.task
