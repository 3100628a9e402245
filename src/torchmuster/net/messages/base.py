"""The root of all that travels over the channel."""

from torchmuster.model.message import TypedMessage


class Message(TypedMessage):
    """What agents, heads, owners and clients of a run say to each other."""
