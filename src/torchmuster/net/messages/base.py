"""The base class of all messages of the channel."""

from torchmuster.model.message import TypedMessage


class Message(TypedMessage):
    """Base class of messages between agents, heads, owners and clients of a run."""
