"""All messages of the channel: this folder defines the protocol.

Agents call the head of their run or group; its owner and clients call it too. One JSON object a frame, whose `type` is
the name of a class here and whose other fields are that class's fields (`model.message`). Both ends of a channel have the
same version: the handshake's for the frames (`net.handshake`), that of torchmuster for these words (`Hello.version`).
"""

# ruff: noqa: F403 - the modules here hold nothing but words

from torchmuster.model import message as _message
from torchmuster.net.messages.barrier import *
from torchmuster.net.messages.base import Message as Message
from torchmuster.net.messages.execute import *
from torchmuster.net.messages.run import *
from torchmuster.net.messages.survey import *
from torchmuster.net.messages.task import *

encode = _message.encode


def decode(payload: bytes) -> Message:
    """Return the message in a payload whose MAC was right.

    Raises:
        codec.CodecError: It is not one of ours.
    """
    return _message.decode(payload, Message)
