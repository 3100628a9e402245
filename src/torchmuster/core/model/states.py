"""The state of a run: starting -> waiting -> running -> one of the final ones.

A state only moves forward; the values are the words that users and records see.
"""

import enum


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
