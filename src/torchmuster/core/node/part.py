"""A part of an agent: what a node does beside its workers. Rooms plug theirs in as `agent_parts` (docs/plugging-in.md)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torchmuster.core.net.messages import Message

if TYPE_CHECKING:
    from torchmuster.core.node.agent import Agent


class AgentPart:
    """One part, made with its agent; this one does nothing."""

    def __init__(self, agent: "Agent") -> None:
        self.agent = agent

    async def serve(self) -> None:
        """Work as long as the agent lives; cancelled at its end."""

    def take(self, message: Message) -> bool:
        """Take what the head sends; say whether it was for this part."""
        del message
        return False

    def take_torch(self, found: Mapping[str, Any]) -> None:
        """Take what the spawner says of the torch that it imports; nothing of it once it is ready."""

    def waiting(self, attempt: int, workers: list[tuple[int, int]]) -> set[int]:
        """Return which of these (rank, pid) are seen to wait for other ranks; called in a thread."""
        del attempt, workers
        return set()

    def end_attempt(self) -> None:
        """End what belongs to the workers of the attempt that has ended."""

    def close(self) -> None:
        """Give back what is held."""
