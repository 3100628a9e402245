"""A part of the head of a training run. Rooms plug theirs in as `head_parts`, other packages too (docs/plugging-in.md)."""

from typing import TYPE_CHECKING

from torchmuster.core.head.head import HeadClient
from torchmuster.core.head.membership import Member
from torchmuster.core.model.events import RecordEvent
from torchmuster.core.net.messages import Message

if TYPE_CHECKING:
    from torchmuster.core.head.training_head import TrainingHead


class HeadPart:
    """One part, made with its head; this one does nothing. What it raises is a bug of its own: the head ends with it."""

    def __init__(self, head: "TrainingHead") -> None:
        self.head = head

    async def serve(self) -> None:
        """Work as long as the head conducts its run; cancelled at its end."""

    def hear(self, event: RecordEvent) -> None:
        """Take an event that has just been written."""

    def take_word(self, member: Member, message: Message) -> bool:
        """Take what an agent says; say whether it was for this part."""
        del member, message
        return False

    def take_request(self, client: HeadClient, message: Message) -> bool:
        """Take what a client asks for; say whether it was for this part."""
        del client, message
        return False

    def client_gone(self, client: HeadClient) -> None:
        """Take the end of a client's connection."""

    def lose(self, member: Member, why: str) -> None:
        """Take that a node was lost."""

    def advance(self, now: float) -> None:
        """Do what is due; called whenever something has come, and at least each second while workers run."""
