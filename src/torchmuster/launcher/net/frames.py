"""Read and write messages on the standard streams of an ssh session.

The reader has a time limit; the writer blocks only senders of bulk data.
"""

import os
import select
import threading
import time
from collections import deque

from torchmuster.launcher.net import remote_messages as messages

# Bulk data waits while more than this is queued.
_BUSY_BYTES = 2 << 20


class FrameReader:
    """Reads messages from a descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = bytearray()

    def read(self, timeout_s: float) -> messages.RemoteMessage | None:
        """Return the next message; None at the end of file.

        Raises:
            TimeoutError: Nothing was received for `timeout_s`.
            messages.FrameError: The received bytes are not a message.
        """
        while True:
            if len(self._buffer) >= messages.LENGTH.size:
                (length,) = messages.LENGTH.unpack_from(self._buffer)
                if length > messages.MAX_FRAME_BYTES:
                    raise messages.FrameError(f"a frame of {length} bytes")
                end = messages.LENGTH.size + length
                if len(self._buffer) >= end:
                    payload = bytes(self._buffer[messages.LENGTH.size : end])
                    del self._buffer[:end]
                    return messages.decode(payload)
            if not self._fill(timeout_s):
                return None

    def read_until(self, marker: bytes, limit_bytes: int, timeout_s: float) -> bytes | None:
        """Return the bytes before the line `marker`; None at the end of file (see `rest`).

        Raises:
            TimeoutError: The marker was not received within `timeout_s`.
            messages.FrameError: More than `limit_bytes` were received before it.
        """
        deadline = time.monotonic() + timeout_s
        while (at := self._buffer.find(marker + b"\n")) < 0:
            if len(self._buffer) > limit_bytes:
                raise messages.FrameError(
                    f"more than {limit_bytes} bytes before the session begins"
                )
            if not self._fill(max(0.0, deadline - time.monotonic())):
                return None
        before = bytes(self._buffer[:at])
        del self._buffer[: at + len(marker) + 1]
        return before

    @property
    def rest(self) -> bytes:
        """Return the received bytes that are not yet a complete message."""
        return bytes(self._buffer)

    def _fill(self, timeout_s: float) -> bool:
        poller = select.poll()  # `select` knows no descriptor beyond 1023
        poller.register(self._fd, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            raise TimeoutError
        data = os.read(self._fd, 1 << 16)
        self._buffer += data
        return bool(data)


class FrameWriter:
    """A thread that writes to a descriptor; if that blocks, only senders of bulk data wait."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._ping_every_s: float | None = None
        self._pinged_at = time.monotonic()
        self._queue: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self.is_broken = False
        threading.Thread(target=self._work, name="frames", daemon=True).start()

    def ping_every(self, interval_s: float) -> None:
        """Send a ping this often, even between bulk data.

        Only pings are answered, and silence ends a session.
        """
        with self._changed:
            self._ping_every_s = interval_s
            self._changed.notify_all()

    def send(self, message: messages.RemoteMessage, *, bulk: bool = False) -> bool:
        """Queue a message, a bulk one once the queue is short; return False if the peer is gone."""
        frame = messages.pack(message)
        with self._changed:
            while bulk and self._waiting_bytes > _BUSY_BYTES and not self._is_over:
                self._changed.wait(1.0)
        self.send_raw(frame)
        return not self.is_broken

    def send_raw(self, data: bytes) -> None:
        """Queue bytes that are not a message; drop them after the end."""
        with self._changed:
            if not self._is_over:
                self._queue.append(data)
                self._waiting_bytes += len(data)
                self._changed.notify_all()

    @property
    def _is_over(self) -> bool:
        return self.is_broken or self._closing

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is written; return whether it was in time."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_bytes or self.is_broken, timeout_s)
            return not self._waiting_bytes

    def close(self) -> None:
        """Write queued data, then close the descriptor: the other side gets the end of file."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            while (data := self._next()) is not None:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._fd, view) :]
                with self._changed:
                    self._waiting_bytes -= len(data)
                    self._changed.notify_all()
        except OSError:
            pass
        with self._changed:
            self.is_broken = True
            self._changed.notify_all()
        os.close(self._fd)

    def _next(self) -> bytes | None:
        with self._changed:
            while True:
                every_s, now = self._ping_every_s, time.monotonic()
                left_s = None if every_s is None else self._pinged_at + every_s - now
                if left_s is not None and left_s <= 0 and not self._closing:
                    self._pinged_at = now
                    ping = messages.pack(messages.RemotePing())
                    self._waiting_bytes += len(ping)
                    return ping
                if self._queue:
                    return self._queue.popleft()
                if self._closing:
                    return None
                self._changed.wait(left_s)
