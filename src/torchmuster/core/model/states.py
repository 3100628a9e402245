"""The states of runs, of tasks, groups and workflows, and of scheduler jobs, with conversions.

    runs         starting -> waiting -> running
                 -> succeeded, failed, preempted, timed out, cancelled, stopped, lost
    tasks, ...   SUBMITTING -> WAITING -> PROCESSING -> SCHEDULING -> INITIALIZING -> RUNNING
                 -> COMPLETED, RESCHEDULED (a task only), FAILED, FAILED_*

A state only moves forward; a finished one is final. The values are the words that users and records
see.
"""

import enum
from collections.abc import Iterable, Mapping


class RunState(enum.Enum):
    """The state of a run or a whole workflow; the last seven are final."""

    STARTING = "starting"
    WAITING = "waiting"
    RUNNING = "running"
    UNKNOWN = "unknown"  # its scheduler reports no state that we know; never a success
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    PREEMPTED = "preempted"
    TIMED_OUT = "timed out"
    CANCELLED = "cancelled"
    STOPPED = "stopped"  # a sweep ended it early because others were better
    LOST = "lost"

    @property
    def is_final(self) -> bool:
        """Return whether nothing can follow this state."""
        return self not in _RUN_NOT_FINAL


_RUN_NOT_FINAL = frozenset(
    {RunState.STARTING, RunState.WAITING, RunState.RUNNING, RunState.UNKNOWN}
)


class State(enum.Enum):
    """The state of a task or a group; those before COMPLETED follow each other, the others are final."""

    SUBMITTING = "SUBMITTING"
    WAITING = "WAITING"
    PROCESSING = "PROCESSING"
    SCHEDULING = "SCHEDULING"
    INITIALIZING = "INITIALIZING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    RESCHEDULED = "RESCHEDULED"
    FAILED = "FAILED"
    FAILED_CANCELED = "FAILED_CANCELED"
    FAILED_SERVER_ERROR = "FAILED_SERVER_ERROR"
    FAILED_BACKEND_ERROR = "FAILED_BACKEND_ERROR"
    FAILED_EXEC_TIMEOUT = "FAILED_EXEC_TIMEOUT"
    FAILED_QUEUE_TIMEOUT = "FAILED_QUEUE_TIMEOUT"
    FAILED_IMAGE_PULL = "FAILED_IMAGE_PULL"
    FAILED_UPSTREAM = "FAILED_UPSTREAM"
    FAILED_EVICTED = "FAILED_EVICTED"
    FAILED_START_ERROR = "FAILED_START_ERROR"
    FAILED_START_TIMEOUT = "FAILED_START_TIMEOUT"
    FAILED_PREEMPTED = "FAILED_PREEMPTED"

    @property
    def is_final(self) -> bool:
        """Return whether no state can follow."""
        return self not in _ORDER

    @property
    def is_failed(self) -> bool:
        """Return whether this is a failure."""
        return self.name.startswith("FAILED")

    @property
    def of_run(self) -> RunState:
        """Return the run state that corresponds to this workflow state."""
        if not self.is_final:
            begun = self in (State.INITIALIZING, State.RUNNING)
            return RunState.RUNNING if begun else RunState.WAITING
        if self is State.COMPLETED:
            return RunState.SUCCEEDED
        return RunState.CANCELLED if self is State.FAILED_CANCELED else RunState.FAILED

    def may_become(self, later: "State") -> bool:
        """Return whether `later` can follow: forward only, and nothing after an end."""
        if self.is_final:
            return False
        if later.is_final:
            return True
        return _ORDER.index(later) > _ORDER.index(self)


# The states that are not final, in the order in which they follow each other.
_ORDER = list(State)[: list(State).index(State.COMPLETED)]

# The failure that names a group or a workflow with several, strongest first.
_STRONGEST = [
    State.FAILED_CANCELED,
    State.FAILED_UPSTREAM,
    State.FAILED_SERVER_ERROR,
    State.FAILED_EXEC_TIMEOUT,
    State.FAILED_QUEUE_TIMEOUT,
    State.FAILED_PREEMPTED,
    State.FAILED_EVICTED,
]


class JobState(enum.Enum):
    """The state of a scheduler's job, in the same words for every scheduler."""

    PENDING = "pending"
    HELD = "held"
    SUSPENDED = "suspended"  # it has its nodes, and waits to be resumed
    RUNNING = "running"
    ENDING = "ending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    NODE_FAILED = "node_failed"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"
    UNKNOWN = "unknown"  # an unknown word, or none: never a success

    @property
    def is_final(self) -> bool:
        """Return whether the job is over; a REQUEUED one comes back.

        A preempted job that comes back is REQUEUED: Slurm records PREEMPTED for it only in its
        accounting (`_job_requeue_op`, 22.05).
        """
        return self not in _WITHOUT_RESULT or self in _ENDS

    @property
    def of_run(self) -> RunState:
        """Return the state of a run without a result: never a success."""
        return _WITHOUT_RESULT.get(self, _LEFT_NOTHING)[0]

    @property
    def of_group(self) -> State:
        """Return the state of a workflow's group without a result."""
        return _WITHOUT_RESULT.get(self, _LEFT_NOTHING)[1]


_LEFT_NOTHING = (RunState.LOST, State.FAILED_BACKEND_ERROR)
_WITHOUT_RESULT = {
    JobState.PENDING: (RunState.WAITING, State.SCHEDULING),
    JobState.HELD: (RunState.WAITING, State.SCHEDULING),
    JobState.SUSPENDED: (RunState.WAITING, State.SCHEDULING),
    JobState.REQUEUED: (RunState.WAITING, State.SCHEDULING),
    JobState.UNKNOWN: (RunState.UNKNOWN, State.SCHEDULING),
    JobState.RUNNING: (RunState.RUNNING, State.RUNNING),
    JobState.ENDING: (RunState.RUNNING, State.RUNNING),
    JobState.PREEMPTED: (RunState.PREEMPTED, State.FAILED_PREEMPTED),
    JobState.CANCELLED: (RunState.CANCELLED, State.FAILED_CANCELED),
    JobState.TIMED_OUT: (RunState.LOST, State.FAILED_EXEC_TIMEOUT),
}

_ENDS = (JobState.CANCELLED, JobState.TIMED_OUT, JobState.PREEMPTED)


def group_state(tasks: Mapping[str, State], lead: str, *, ignore_nonlead: bool) -> State:
    """Return the state of a group from its tasks' newest attempts."""
    states = list(tasks.values())
    if any(not state.is_final for state in states):
        if any(state.is_final or state is State.RUNNING for state in states):
            return State.RUNNING
        return min(states, key=_ORDER.index)
    counted = [tasks[lead]] if ignore_nonlead else states
    failed = [state for state in counted if state.is_failed]
    return _one_of(failed) if failed else State.COMPLETED


def workflow_state(groups: Iterable[State]) -> State:
    """Return the state of a workflow from its groups."""
    states = list(groups)
    if any(not state.is_final for state in states):
        begun = [state for state in states if state.is_final or state is State.RUNNING]
        return State.RUNNING if begun else State.WAITING
    failed = [state for state in states if state.is_failed]
    own: list[State] = [state for state in failed if state is not State.FAILED_UPSTREAM]
    return _one_of(own or failed) if failed else State.COMPLETED


def _one_of(failed: list[State]) -> State:
    for state in _STRONGEST:
        if state in failed:
            return state
    return failed[0] if len(set(failed)) == 1 else State.FAILED
