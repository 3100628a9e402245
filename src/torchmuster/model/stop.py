"""The origin of a stop, and how the run ends: decided here once, from what the head knows at that moment."""

import enum
import signal
from collections.abc import Mapping

from torchmuster.model import contract
from torchmuster.model.states import RunState
from torchmuster.model.verdict import Report

AT_ONCE = signal.SIGRTMIN  # muster sends it to an owner: as Ctrl-C and another one
# One Ctrl-C may come twice, from the terminal and from a wrapper that passes it on; so may SIGTERM, and more slowly.
AGAIN_AFTER_S = 0.5
TERM_AGAIN_AFTER_S = 5.0


class StopCause(enum.Enum):
    """The origin of a stop; the words for the sentence `... asked to stop`."""

    USER = "you"
    TIME = "the end of the job's time"
    NODE_LOST = "the loss of a node"
    TERMINAL = "the closed terminal"
    OUTSIDE = "the system"  # nobody can tell: a scheduler, an administrator, `kill`


_BEST_KNOWN_FIRST = (
    StopCause.USER,
    StopCause.TIME,
    StopCause.NODE_LOST,
    StopCause.TERMINAL,
    StopCause.OUTSIDE,
)
_WHY_CANCELLED = {
    StopCause.USER: "you cancelled it",
    StopCause.TERMINAL: "the terminal was closed",
}
_STAY = "in tmux or screen a run outlives its terminal; `muster run --detach` does, too, if not over ssh"


def cause_of_stop(
    signum: int, *, cancelled: bool = False, time_is_over: bool = False, node_is_lost: bool = False
) -> StopCause:
    """Return the origin of a stop.

    Args:
        signum: The signal that came.
        cancelled: `muster cancel` has left its note: it asks the scheduler, whose signal looks like any other.
        time_is_over: The announced end of the job has come.
        node_is_lost: A node of the job is missing now; schedulers end a job for that.
    """
    if cancelled or signum == signal.SIGINT:
        return StopCause.USER
    if time_is_over:
        return StopCause.TIME
    if node_is_lost and signum == signal.SIGTERM:
        return StopCause.NODE_LOST
    return StopCause.TERMINAL if signum == signal.SIGHUP else StopCause.OUTSIDE


def better_cause(known: StopCause, new: StopCause) -> StopCause:
    """Return the origin of a stop after a second report: agents see only a signal, the owner knows more."""
    return min(known, new, key=_BEST_KNOWN_FIRST.index)


def end_by_stop(
    cause: StopCause, signum: int, again: str, *, saved: bool, lost: Mapping[str, str]
) -> tuple[RunState, int, Report]:
    """Return state, exit code and report of a run that was stopped.

    Args:
        cause: Who asked for it.
        signum: The signal that the workers got.
        again: What starts the run again.
        saved: Workers said that they can be resumed, or another job goes on.
        lost: Why each node that is missing was lost.
    """
    name = contract.signal_name(signum)
    if cause is StopCause.NODE_LOST:
        error = f"{', '.join(lost) or 'a node'} was lost, and the job was stopped with {name} then"
        because = tuple(f"{node}: {why}" for node, why in lost.items())
        report = Report(error=error, because=because, hint=again)
        return RunState.PREEMPTED, contract.EX_TEMPFAIL, report
    # No shell loop may take what a user has ended for "run me again".
    by_hand = cause in _WHY_CANCELLED or signum in (signal.SIGINT, signal.SIGHUP)
    if saved and not by_hand:
        error = "the run was preempted and can be resumed"
        asked = f"{cause.value} asked to stop with {name}"
        by_itself = "; --resubmit N goes on by itself" if cause is StopCause.TIME else ""
        report = Report(error=error, because=(asked,), hint=again + by_itself)
        return RunState.PREEMPTED, contract.EX_TEMPFAIL, report
    if cause is StopCause.TIME:
        error = f"the time limit of the job was reached: the run was stopped with {name}"
        hint = f"more --time, or --resubmit to continue in another job; {again} resumes from the last save"
        return RunState.TIMED_OUT, 128 + signum, Report(error=error, hint=hint)
    asked = _WHY_CANCELLED.get(cause, f"{cause.value} asked for it")
    hints = [f"{again} continues from the last save"] * saved
    hints += [_STAY] * (cause is StopCause.TERMINAL)
    error = f"the run was stopped with {name}"
    report = Report(error=error, because=(asked,), hint="; ".join(hints) or None)
    return RunState.CANCELLED, 128 + signum, report


def not_replaced(report: Report, again: str, lost: Mapping[str, str]) -> Report:
    """Return the report on a run that has lost nodes, from that on nodes that did not come."""
    error = f"{', '.join(lost)} was lost, and no node came in its place"
    because = (*(f"{node}: {why}" for node, why in lost.items()), report.error)
    return Report(error=error, because=because, hint=again)
