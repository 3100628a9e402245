"""Barriers of the tasks of a group: the agent of a task calls the head, which answers."""

import enum

from torchmuster.net.messages.base import Message


class BarrierState(enum.Enum):
    """The kind of an answer; `waiting` is followed by another one."""

    RELEASED = "released"
    FAILED = "failed"
    WAITING = "waiting"


class BarrierCall(Message):
    """A process of the sender's task has reached a barrier.

    Attributes:
        caller_id: Names the call among those of this agent; all answers carry it.
        count: The number of callers; None for every task of the group, once each.
        rank: The number of this caller, from 0; None when the callers have no numbers.
    """

    caller_id: str
    name: str = "default"
    count: int | None = None
    rank: int | None = None
    timeout_s: float = 600.0


class BarrierLeave(Message):
    """The process of this call is gone; it waits no longer."""

    caller_id: str


class BarrierAnswer(Message):
    """The answer of a barrier to one caller.

    Attributes:
        what: Failed: the sentence of the error. Waiting: who is missing.
        missing: The first few names of those that are missing.
        left_s: Waiting: how long this caller still waits.
        timed_out: Failed because the limit of this caller has passed.
    """

    caller_id: str
    kind: BarrierState
    what: str = ""
    where: str | None = None
    why: str | None = None
    fix: str | None = None
    missing: tuple[str, ...] = ()
    left_s: float = 0.0
    timed_out: bool = False
