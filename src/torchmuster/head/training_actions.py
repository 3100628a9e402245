"""What the policy of a training run is told of its head, and what it asks the head to do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchmuster.head.attempt import Attempt
from torchmuster.head.membership import Member
from torchmuster.net import messages
from torchmuster.net.channel import Channel


@dataclass(frozen=True, slots=True)
class Record:
    """Write an event."""

    name: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to an agent."""

    channel: Channel
    message: messages.Message


@dataclass(frozen=True, slots=True)
class AskForNodes:
    """Ask for agents at these places; `again` where the last ones have not come."""

    places: tuple[int, ...]
    again: bool = False


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Open the store of the next attempt at this address, and go on with `store_is_open`."""

    attempt: Attempt
    address: str


@dataclass(frozen=True, slots=True)
class CutOff:
    """A node has been lost: close what is left of its connection."""

    member: Member
    channel: Channel
    why: str


TrainingAction = Record | Send | AskForNodes | OpenStore | CutOff


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """What a policy is told of its head.

    Attributes:
        pid: Its process.
        first_attempt: Not 0 when the head was lost and the run was started again.
        hint: What to add while nodes are missing.
        is_ours: Says whether the head has started an agent on this host itself: a second one is not needed.
        log_path: Returns where the output of a rank of an attempt is.
    """

    pid: int
    log_path: Callable[[int, int], str]
    first_attempt: int = 0
    restarts_spent: int = 0
    hint: str = ""
    is_ours: Callable[[str], bool] | None = None
