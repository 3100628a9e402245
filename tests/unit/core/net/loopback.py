"""Real connections on the loopback interface, for tests of the channel."""

import asyncio
import contextlib
import os
import socket

from torchmuster.core.net.address import bind
from torchmuster.core.net.channel import Channel, Role, SessionKeys
from torchmuster.core.net.listener import Listener

SECRET = b"s" * 32
PUBLIC = b"p" * 32
DEADLINE_S = 60.0


class Doorman:
    """Notes whom a listener let in and whom it turned away."""

    def __init__(self):
        self.channels = asyncio.Queue()
        self.refused = asyncio.Queue()

    async def serve(self, channel):
        self.channels.put_nowait(channel)
        await asyncio.Event().wait()  # the connection lives until the listener ends

    def refuse(self, peer, error):
        self.refused.put_nowait(error.reason)


@contextlib.asynccontextmanager
async def listening(secrets=(SECRET, None), doorman=None):
    """Serve on a port of the kernel's choice; yield the listener and its doorman."""
    doorman = doorman or Doorman()
    listener = Listener(bind("127.0.0.1", 0), secrets, doorman.serve, doorman.refuse)
    serving = asyncio.create_task(listener.serve())
    try:
        yield listener, doorman
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@contextlib.asynccontextmanager
async def answering(stranger):
    """Let a stranger serve one connection; yield his port."""
    served = asyncio.Event()

    async def serve(reader, writer):
        try:
            await stranger(reader, writer)
        finally:
            writer.transport.abort()
            served.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        await served.wait()


@contextlib.asynccontextmanager
async def raw_connection(port):
    """Yield reader and writer of a connection on which nothing has been said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def channel_and_wire():
    """Yield a channel, and what its frames look like on the wire and can be put onto it.

    The second value returns the frames that the other side would send for some messages.
    """
    keys = os.urandom(32), os.urandom(32)
    here, wire = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=here)
    session = SessionKeys(role=Role.AGENT, send_key=keys[0], receive_key=keys[1])
    channel = Channel(reader, writer, session)
    try:
        yield channel, wire, lambda *sent: frames_of(keys[1], sent)
    finally:
        channel.abort()
        wire.close()


class _Tape:
    """Takes what a channel writes."""

    def __init__(self):
        self.parts = []
        self.transport = self

    def write(self, data):
        self.parts.append(bytes(data))

    def is_closing(self):
        return False

    def get_write_buffer_size(self):
        return 0


def frames_of(key, sent):
    """Return the frames of messages under a key, one for each."""
    tape = _Tape()
    session = SessionKeys(role=Role.AGENT, send_key=key, receive_key=b"")
    channel = Channel(None, tape, session)
    for message in sent:
        channel.send_nowait(message)
    return tape.parts
