"""What a first pod that was made again finds in its record: an attempt that ended with the pod before it.

A pod that is told to end leaves a `run_ended`. Without one, something killed it: its container was out of memory, or its node
died. That spends a restart, as the loss of any other pod does; else a run whose rank 0 needs too much memory never ends.
"""

from collections.abc import Iterable
from typing import Any

from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.event import event_line, utc_now
from torchmuster.model.failure import EndKind, WorkerEnd, describe
from torchmuster.model.plan import RunPlan
from torchmuster.model.states import RunState
from torchmuster.model.verdict import Circumstances, Result, explain_failure, final_exit_code
from torchmuster.owner.resubmit import restarts_spent
from torchmuster.owner.views.record import read_events

_ENDS = ("attempt_failed", "run_ended")


def count_loss(run_dir: RunDir, plan: RunPlan) -> Result | None:
    """Note the end of an attempt that nobody has noted; return the run's result where no restart is left for another.

    Raises:
        OSError: The record can't be written.
    """
    start = _unfinished(read_events(run_dir.events))
    if start is None:
        return None
    most = plan.limits.max_restarts
    spent = restarts_spent(run_dir, most)
    is_last = spent >= most
    cause = _end_of(start)
    told = {
        "attempt": cause.attempt,
        "what": f"{cause.node}: {describe(cause)}",
        "cause": codec.to_plain(cause),
        "restarts_left": None if is_last else most - spent - 1,
    }
    with open(run_dir.events, "a") as file:
        file.write(event_line(utc_now(), "attempt_failed", told))
    return _result(cause, start, spent, plan) if is_last else None


def _unfinished(events: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the start of the last attempt, where nothing says how it ended."""
    start = None
    for event in events:
        if event.get("event") == "attempt_started":
            start = event
        elif event.get("event") in _ENDS:
            start = None
    return start


def _end_of(start: dict[str, Any]) -> WorkerEnd:
    return WorkerEnd(
        attempt=int(start["attempt"]),
        rank=0,
        local_rank=0,
        node=str(start["nodes"][0]["node"]),
        kind=EndKind.NODE_LOST,
        asked=False,
        elapsed_s=0.0,
        signum=9,
        detail="this pod, the first one, ended in the middle of the attempt",
    )


def _result(cause: WorkerEnd, start: dict[str, Any], spent: int, plan: RunPlan) -> Result:
    known = Circumstances(
        world_size=int(start["world_size"]),
        attempt=cause.attempt,
        restarts_spent=spent,
        max_restarts=plan.limits.max_restarts,
        same_as=None,
        is_final=False,
        early_ranks=(),
        restart_hint=plan.restart_hint,
        log_path=None,
    )
    return Result(
        run_id=plan.run_id,
        state=RunState.FAILED,
        exit_code=final_exit_code(cause, first_cause_code=plan.first_cause_code),
        attempts=cause.attempt + 1,
        restarts_spent=spent,
        elapsed_s=0.0,
        report=explain_failure(cause, [cause], known),
        cause=cause,
    )
