"""The events of a sweep's record."""

from torchmuster.core.model.events import EndedEvent, RecordEvent, StartedEvent


class SweepStartedEvent(StartedEvent):
    """An owner has started to conduct the sweep."""

    members: int = 0
    slots: int = 0


class SweepEndedEvent(EndedEvent):
    """The sweep is over."""


class MemberEvent(RecordEvent):
    """An event of one member of a sweep."""

    member: int


class MemberStartedEvent(MemberEvent):
    """An attempt of a member has started."""

    slot: int = 0
    attempt: int = 0


class MemberLostEvent(MemberEvent):
    """The node of a member was lost."""

    attempt: int = 0


class MemberMeasuredEvent(MemberEvent):
    """A new value of a member's metric, and its step."""

    value: float
    step: int | None = None


class MemberStoppedEvent(MemberEvent):
    """A rule stopped a member because others were better."""

    step: int | None = None
    rule: str | None = None


class MemberEndedEvent(MemberEvent):
    """A member has ended, with the newest value of its metric."""

    attempt: int = 0
    state: str = ""
    exit_code: int | None = None
    elapsed_s: float = 0.0
    why: str | None = None
    value: float | None = None
    step: int | None = None
