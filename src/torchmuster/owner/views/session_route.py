"""The way to the nodes of a session on other machines: the streams of remote ends, in the session's own authenticated channel.

It stands for ssh where hosts are reached by it (`engines/ssh_host.py`): one connection to the head of the session carries the
streams of all nodes, as those of `muster exec`. A thread of its own has the connection; pipes lead to it.
"""

import asyncio
import base64
import contextlib
import os
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from torchmuster.errors import ChannelError, MusterError
from torchmuster.model import codec
from torchmuster.net import messages, remote_messages
from torchmuster.net.channel import Channel, ChannelClosedError
from torchmuster.net.frames import FrameReader
from torchmuster.node.door.messages import DoorState
from torchmuster.owner.views.head_call import call_head
from torchmuster.owner.views.run_view import RunView

_LOST = 255  # as ssh's status
_TRY_EVERY_S = 0.1
_START_S = 30.0


class SessionRoute:
    """The connection to a session's head, made when it is first needed, and again when it was lost.

    Args:
        view: The run that is the session.
        lives: Says whether the session does.
        patience_s: How long to wait for a door that opens again.
    """

    def __init__(self, view: RunView, lives: Callable[[], bool], patience_s: float) -> None:
        self._view, self._lives, self._patience_s = view, lives, patience_s
        self._channel: Channel | None = None
        self._streams: dict[str, NodeStreams] = {}
        self._calling = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._listening: asyncio.Task[None] | None = None
        threading.Thread(target=self._loop.run_forever, name="session", daemon=True).start()

    def open(self, host: str, errors: int) -> "tuple[NodeStreams, int, int]":
        """Return what stands for the remote end of a node, and our ends of its input and output.

        Args:
            host: The name of the node in the session.
            errors: Where its standard error goes.

        Raises:
            MusterError: It can't be reached; or its door has not opened in time.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return self._wait_for(self._open(host, errors))
            except MusterError:
                if time.monotonic() > deadline or not self._lives():
                    raise
            threading.Event().wait(_TRY_EVERY_S)

    def _wait_for(
        self, opening: "Coroutine[Any, Any, NodeStreams]"
    ) -> "tuple[NodeStreams, int, int]":
        streams = asyncio.run_coroutine_threadsafe(opening, self._loop).result()
        if not streams.started.wait(_START_S):
            streams.send_signal(signal.SIGTERM)
            raise ChannelError(f"the door of {streams.host} does not answer")
        if streams.refusal is not None:
            raise streams.refusal
        return streams, streams.ours_in, streams.ours_out

    async def _open(self, host: str, errors: int) -> "NodeStreams":
        async with self._calling:
            if self._channel is None:
                self._channel = await call_head(self._view)
                self._listening = asyncio.create_task(self._listen(self._channel))
        streams = NodeStreams(host, os.dup(errors), self._channel, self._loop)
        self._streams[streams.exec_id] = streams
        streams.begin()
        return streams

    async def _listen(self, channel: Channel) -> None:
        with contextlib.suppress(ChannelClosedError):
            while True:
                message = await channel.receive()
                exec_id = getattr(message, "exec_id", None)
                streams = self._streams.get(exec_id) if isinstance(exec_id, str) else None
                if streams is not None:
                    streams.take(message)
                    if streams.is_over:
                        self._streams.pop(streams.exec_id, None)
        self._channel = None
        lost, self._streams = list(self._streams.values()), {}
        for streams in lost:
            streams.end(_LOST, ChannelError("the connection to the session's head has ended"))

    def close(self) -> None:
        """Hang up: remote ends end what is below them."""

        def hang_up() -> None:
            if self._channel is not None:
                self._channel.abort()

        self._loop.call_soon_threadsafe(hang_up)


class NodeStreams:
    """The streams of one remote end; to their users it is the process at whose other end that runs.

    Attributes:
        ours_in: What is written here is its input.
        ours_out: Its output.
        started: It has said something, or was refused.
        refusal: Why it was.
    """

    pid = 0

    def __init__(
        self, host: str, errors: int, channel: Channel, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.host, self.exec_id = host, secrets.token_hex(8)
        self.started = threading.Event()
        self.refusal: MusterError | None = None
        self._errors, self._channel, self._loop = errors, channel, loop
        self._theirs_in, self.ours_in = os.pipe2(os.O_CLOEXEC)
        self.ours_out, self._theirs_out = os.pipe2(os.O_CLOEXEC)
        for fd in (self._theirs_in, self._theirs_out):
            os.set_blocking(fd, False)
        self._room_bytes = messages.EXEC_WINDOW_BYTES
        self._waiting: deque[bytes] = deque()
        self._status: int | None = None
        self._last: tuple[int, MusterError] | None = None
        self._ended = threading.Event()

    # As a process.

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._status

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; return the exit status or None when the time is up."""
        self._ended.wait(timeout_s)
        return self._status

    def send_signal(self, signum: int) -> None:
        """End it, whatever the signal: its input ends."""
        del signum
        if self._status is None:
            self._loop.call_soon_threadsafe(self._leave)

    @property
    def is_over(self) -> bool:
        """Say whether it has ended."""
        return self._status is not None

    def _leave(self) -> None:
        if self._status is None:
            self._say(messages.ExecLeave(exec_id=self.exec_id))
            self.end(_LOST)

    # In the loop of the connection.

    def begin(self) -> None:
        """Ask the node's door for it."""
        self._say(messages.ExecStart(exec_id=self.exec_id, task=f"node {self.host}", door=True))
        self._loop.add_reader(self._theirs_in, self._read)

    def _say(self, message: messages.Message) -> None:
        self._channel.send_nowait(message)

    def take(self, message: messages.Message) -> None:
        """Take what its node says; after the end our descriptors may be somebody else's."""
        if self._status is not None:
            return
        match message:
            case messages.ExecOutput(stream=stream, data=data):
                self.started.set()
                piece = base64.b64decode(data)
                if stream == 1:
                    self._waiting.append(piece)
                    self._write()
                else:
                    os.write(self._errors, piece)
                    self._say(messages.ExecTaken(exec_id=self.exec_id, size_bytes=len(piece)))
            case messages.ExecTaken(size_bytes=size_bytes):
                self._room_bytes += size_bytes
                self._loop.add_reader(self._theirs_in, self._read)
            case messages.ExecEnded(code=code, why=why):
                self._last = code, ChannelError(f"the remote end has ended ({code})", why=why)
                self._write()
            case messages.ExecRefused(what=what, why=why, fix=fix):
                self.end(_LOST, ChannelError(what, why=why, fix=fix))

    def end(self, status: int, why: MusterError | None = None) -> None:
        """Take its end."""
        if self._status is not None:
            return
        self._status = status
        for fd in (self._theirs_in, self._theirs_out):
            self._loop.remove_reader(fd)
            self._loop.remove_writer(fd)
        if not self.started.is_set():
            self.refusal = why
            os.close(self.ours_in)
            os.close(self.ours_out)
        for fd in (self._theirs_in, self._theirs_out, self._errors):
            os.close(fd)
        self._ended.set()
        self.started.set()

    def _read(self) -> None:
        try:
            data = os.read(self._theirs_in, min(self._room_bytes, messages.EXEC_CHUNK_BYTES))
        except BlockingIOError:
            return
        self._room_bytes -= len(data)
        if not data or self._room_bytes <= 0:
            self._loop.remove_reader(self._theirs_in)
        text = base64.b64encode(data).decode()
        self._say(messages.ExecInput(exec_id=self.exec_id, data=text, end=not data))

    def _write(self) -> None:
        try:
            while self._waiting:
                num_bytes = os.write(self._theirs_out, self._waiting[0])
                self._say(messages.ExecTaken(exec_id=self.exec_id, size_bytes=num_bytes))
                self._waiting[0] = self._waiting[0][num_bytes:]
                if not self._waiting[0]:
                    self._waiting.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._theirs_out, self._write)
            return
        except OSError:  # nobody reads any more
            self._waiting.clear()
        self._loop.remove_writer(self._theirs_out)
        if self._last is not None:  # behind what it had said before
            self.end(*self._last)


def ask_doors(view: RunView, names: Sequence[str]) -> list[DoorState]:
    """Return what the doors of these nodes of a session say of themselves.

    Raises:
        MusterError: One of them can't be reached.
    """
    way = SessionRoute(view, lambda: False, 0.0)
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        return [_ask_door(way, name, null) for name in names]
    finally:
        os.close(null)
        way.close()


def _ask_door(way: SessionRoute, name: str, null: int) -> DoorState:
    streams, to, out = way.open(name, null)
    try:
        reader = FrameReader(out)
        for _ in range(2):  # facts come first
            told = reader.read(_START_S)
            if isinstance(told, remote_messages.SessionTold):
                return DoorState(**codec.to_plain(told))
    except (TimeoutError, remote_messages.FrameError) as error:
        raise ChannelError(f"the door of {name} does not answer") from error
    finally:
        streams.send_signal(signal.SIGTERM)
        os.close(to)
        os.close(out)
    raise ChannelError(f"the door of {name} does not say how it is")
