"""The local end of a command that runs elsewhere.

Its streams are descriptors here, and its messages (`launcher/net/part_messages.py`) go over any channel. The
other end is `launcher/node/exec.py`: in a task, next to a rank, on a session's node or in a pod.
"""

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from torchmuster.core.net import messages
from torchmuster.core.net.channel import Channel, ChannelClosedError
from torchmuster.launcher.net import part_messages

GONE = 255  # the status of ssh after a broken connection
_SURE_BYTES = 4096  # a writable pipe accepts so much at once
_TERM, _KILL = 15, 9


class Command:
    """One command; use it only in the event loop that created it.

    Args:
        start: The order that starts it.
        say: Sends a message to the other end.
        streams: Descriptors of its input, output and errors; the caller closes them.

    Attributes:
        ended: Its exit code; 255 if it was refused or its connection was lost.
        spoken: Set once it has written output or has ended.
        refusal: Why it was not started.
        lost: Why its connection ended before the command did.
    """

    def __init__(
        self,
        start: part_messages.ExecStart,
        say: Callable[[messages.Message], None],
        streams: Sequence[int],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self.spoken = asyncio.Event()
        self.refusal: part_messages.ExecRefused | None = None
        self.lost: str | None = None
        self.exec_id = start.exec_id
        self._start, self._say = start, say
        self._fds = tuple(streams)
        self._waiting: dict[int, deque[memoryview]] = {1: deque(), 2: deque()}
        self._room_bytes = start.window_bytes
        self._most_bytes = start.window_bytes + part_messages.EXEC_CHUNK_BYTES
        self._waiting_bytes = self._taken_bytes = 0
        self._has_input = True
        self._code: int | None = None

    def begin(self) -> None:
        """Send the order to start, and begin to forward the input."""
        self._say(self._start)
        self._when_ready(self._loop.add_reader, self._fds[0], self._read)

    def take(self, message: messages.Message) -> None:
        """Handle a message of the other end; ignore it after the end, as our fds may be reused."""
        if self.ended.done():
            return
        match message:
            case part_messages.ExecOutput(stream=stream, data=data) if stream in self._waiting:
                self.spoken.set()
                self._waiting[stream].append(memoryview(data))
                self._waiting_bytes += len(data)
                if self._waiting_bytes > self._most_bytes:
                    self.leave()  # our own other end never sends more than a window
                    return
                self._when_ready(self._loop.add_writer, self._fds[stream], self._write, stream)
            case part_messages.ExecAcknowledged(size_bytes=size_bytes):
                self._room_bytes += size_bytes
                self._when_ready(self._loop.add_reader, self._fds[0], self._read)
            case part_messages.ExecEnded(code=code):
                self._code = code
                self._end_when_written()
            case part_messages.ExecRefused():
                self.refusal = message
                self._end(GONE)

    async def listen(self, channel: Channel) -> None:
        """Handle all messages of a channel that serves only this command, until it closes."""
        try:
            while True:
                self.take(await channel.receive())
        except ChannelClosedError as error:
            self.lose(str(error))

    def leave(self) -> None:
        """End the command, and ignore its further output."""
        if not self.ended.done():
            self._say(part_messages.ExecLeave(exec_id=self.exec_id))
            self._end(GONE)

    def lose(self, why: str) -> None:
        """Handle a lost connection; the output of a command that had ended is still written."""
        if not self.ended.done() and self._code is None:
            self.lost = why
            self._end(GONE)

    def _when_ready(self, add: Callable[..., object], fd: int, act: Any, *given: Any) -> None:
        try:
            add(fd, act, *given)
        except PermissionError:  # a plain file is always ready
            self._loop.call_soon(act, *given)

    def _read(self) -> None:
        fd = self._fds[0]
        self._loop.remove_reader(fd)
        if self.ended.done() or not self._has_input or self._room_bytes <= 0:
            return
        try:
            data = os.read(fd, min(self._room_bytes, part_messages.EXEC_CHUNK_BYTES))
        except BlockingIOError:  # somebody else has read it meanwhile
            self._when_ready(self._loop.add_reader, fd, self._read)
            return
        except OSError:  # closed by the shell, `<&-`
            data = b""
        self._has_input = bool(data)
        self._room_bytes -= len(data)
        self._say(part_messages.ExecInput(exec_id=self.exec_id, data=data, end=not data))
        self._when_ready(self._loop.add_reader, fd, self._read)

    def _write(self, stream: int) -> None:
        waiting, fd = self._waiting[stream], self._fds[stream]
        if self.ended.done():
            return
        if waiting:
            try:
                num_bytes = os.write(fd, waiting[0][:_SURE_BYTES])
            except BlockingIOError:  # another process has filled it meanwhile
                return
            except OSError:  # nobody reads any more
                self.leave()
                return
            self._waiting_bytes -= num_bytes
            self._taken_bytes += num_bytes
            waiting[0] = waiting[0][num_bytes:]
            if not waiting[0]:
                waiting.popleft()
                taken = part_messages.ExecAcknowledged(
                    exec_id=self.exec_id, size_bytes=self._taken_bytes
                )
                self._taken_bytes = 0
                self._say(taken)
        if waiting:
            self._when_ready(self._loop.add_writer, fd, self._write, stream)
        else:
            self._loop.remove_writer(fd)
            self._end_when_written()

    def _end_when_written(self) -> None:
        if self._code is not None and not any(self._waiting.values()):
            self._end(self._code)

    def _end(self, code: int) -> None:
        self._loop.remove_reader(self._fds[0])
        for fd in self._fds[1:]:
            self._loop.remove_writer(fd)
        self.spoken.set()
        self.ended.set_result(code)


class CommandProcess:
    """A command elsewhere that looks like an ssh process: any thread may wait for it or end it.

    Attributes:
        pid: The id of this process, which carries the command.

    Args:
        loop: The event loop in which it runs.
        running: Runs the command and returns its exit code.
        streams: Its descriptors, which are closed when it has ended.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        running: Coroutine[Any, Any, int],
        streams: Sequence[int],
    ) -> None:
        self.pid = os.getpid()
        self._loop = loop
        self._ended = threading.Event()
        self._status: int | None = None
        self._streams = tuple(streams)
        self._task: asyncio.Task[int] | None = None
        self._is_killed = False
        loop.call_soon_threadsafe(self._begin, running)

    def _begin(self, running: Coroutine[Any, Any, int]) -> None:
        self._task = self._loop.create_task(running)
        # A callback, since a task that is cancelled before its first step runs no `finally`.
        self._task.add_done_callback(self._end)
        if self._is_killed:
            self._task.cancel()

    def _end(self, task: "asyncio.Task[int]") -> None:
        has_code = not task.cancelled() and task.exception() is None
        self._status = task.result() if has_code else GONE
        for fd in self._streams:
            os.close(fd)
        self._ended.set()

    def poll(self) -> int | None:
        """Return the command's exit code, 255 for a broken connection; None while it runs."""
        return self._status

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; return the exit code or None when the time is up."""
        self._ended.wait(timeout_s)
        return self._status

    def send_signal(self, signum: int) -> None:
        """Cancel the command on SIGTERM or SIGKILL; ignore other signals."""
        if signum in (_TERM, _KILL) and self._status is None:
            self._is_killed = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
