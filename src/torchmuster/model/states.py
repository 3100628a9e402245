"""The states of tasks, groups and workflows, and how those of many become that of the whole.

    SUBMITTING -> WAITING -> PROCESSING -> SCHEDULING -> INITIALIZING -> RUNNING -> COMPLETED
                                                                                 -> RESCHEDULED (a task only)
                                                                                 -> FAILED, FAILED_*

A state only moves forward; a finished one is final.
"""

import enum
from collections.abc import Iterable, Mapping


class State(enum.Enum):
    """Where a task or a group stands."""

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
        """Say whether nothing follows."""
        return self not in _ORDER

    @property
    def is_failed(self) -> bool:
        """Say whether this is one of the failures."""
        return self.name.startswith("FAILED")

    def may_become(self, later: "State") -> bool:
        """Say whether `later` can follow: forward only, and nothing after an end."""
        if self.is_final:
            return False
        if later.is_final:
            return True
        return _ORDER.index(later) > _ORDER.index(self)


_ORDER = [
    State.SUBMITTING,
    State.WAITING,
    State.PROCESSING,
    State.SCHEDULING,
    State.INITIALIZING,
    State.RUNNING,
]

# Which failure of many names a group or a workflow, the strongest first.
_STRONGEST = [
    State.FAILED_CANCELED,
    State.FAILED_UPSTREAM,
    State.FAILED_SERVER_ERROR,
    State.FAILED_EXEC_TIMEOUT,
    State.FAILED_QUEUE_TIMEOUT,
    State.FAILED_PREEMPTED,
    State.FAILED_EVICTED,
]


def group_state(tasks: Mapping[str, State], lead: str, *, ignore_nonlead: bool) -> State:
    """Return the state of a group from those of its tasks' newest attempts."""
    states = list(tasks.values())
    if any(not state.is_final for state in states):
        if any(state.is_final or state is State.RUNNING for state in states):
            return State.RUNNING
        return min(states, key=_ORDER.index)
    counted = [tasks[lead]] if ignore_nonlead else states
    failed = [state for state in counted if state.is_failed]
    return _one_of(failed) if failed else State.COMPLETED


def workflow_state(groups: Iterable[State]) -> State:
    """Return the state of a workflow from those of its groups."""
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
