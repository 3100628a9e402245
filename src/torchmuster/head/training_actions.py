"""What the policy of a training run asks its head to do."""

from dataclasses import dataclass

from torchmuster.head.attempt import Attempt
from torchmuster.head.membership import Member
from torchmuster.model.record.events import RecordEvent
from torchmuster.net import messages
from torchmuster.net.channel import Channel


@dataclass(frozen=True, slots=True)
class Record:
    """Write an event."""

    event: RecordEvent


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
