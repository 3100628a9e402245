"""Frames between the client and a courier: they travel on the standard streams of one ssh session.

A frame is one byte of kind, four bytes of length and the payload, both bounded before anything is read.
"""

import enum
import json
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

MAX_PAYLOAD_BYTES = 4 << 20
CHUNK_BYTES = 256 << 10
_HEADER = struct.Struct(">BI")
_RELAY = struct.Struct(">I")
_FILE = struct.Struct(">HQ")
_MAX_PATH_BYTES = 4096
# Behind so much that waits to be sent, bulk data waits too.
_BUSY_BYTES = 2 << 20
# Calls that begin on the host have numbers from here on, so both sides count by themselves.
FIRST_CALL_BACK = 1 << 31


class Kind(enum.IntEnum):
    """What a frame says; `c` is sent by the client, `h` by the courier on a host."""

    FACTS = 1  # h: what the host is
    PACKAGE = 2  # c: a piece of torchmuster; an empty one is the end
    FAIL = 3  # h: an error for the user
    SETUP = 10  # c: what the run is
    PLACED = 11  # h: where it lives there, and what is missing
    CODE = 12  # c: a piece of the code folder; an empty one is the end
    READY = 13  # h: everything is there
    START = 20  # c: start the agent
    STARTED = 21  # h: it runs; where it listens
    ENDED = 22  # h: it has ended; its files have been sent before
    CUT = 23  # c: cut the agent's lifeline
    KILL = 24  # c: SIGKILL everything below
    COLLECT = 25  # c: send the outputs
    OUTPUT = 26  # h: a piece of them; an empty one is the end
    COLLECTED = 27  # h: what came, and what didn't
    END = 28  # c: leave
    PING = 30  # c
    PONG = 31  # h
    RELAY_OPEN = 40  # c: call the coordinator
    RELAY_DATA = 41  # both
    RELAY_CLOSE = 42  # both
    FILE = 50  # h: bytes of a file of the run
    TASKS = 60  # c: the workflow whose tasks come here; answered by PLACED
    SPAWN = 61  # c: start an agent of it
    GONE = 62  # h: one has ended
    WITHDRAW = 63  # c: SIGKILL one and what it started
    ASK = 64  # h: a process here wants an agent on another host
    ANSWER = 65  # c: that agent has ended
    UNASK = 66  # h: who asked has gone
    CALL_OPEN = 67  # h: an agent calls the head of its group; the bytes go as RELAY_DATA


class FrameError(Exception):
    """What came is no frame."""


def pack(kind: int, payload: bytes = b"") -> bytes:
    """Return a frame; ValueError for a payload that is too long."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a frame of {len(payload)} bytes")
    return _HEADER.pack(kind, len(payload)) + payload


def pack_json(kind: int, value: Mapping[str, Any]) -> bytes:
    """Return a frame that holds a JSON object."""
    return pack(kind, json.dumps(value).encode())


def read_json(payload: bytes) -> dict[str, Any]:
    """Return the object of a payload; FrameError when it is none."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise FrameError("no JSON") from error
    if not isinstance(value, dict):
        raise FrameError("no JSON object")
    return value


def pack_relay(kind: int, number: int, data: bytes = b"") -> bytes:
    """Return a frame of one relayed connection."""
    return pack(kind, _RELAY.pack(number) + data)


def read_relay(payload: bytes) -> tuple[int, bytes]:
    """Return the connection's number and its data; FrameError when too short."""
    if len(payload) < _RELAY.size:
        raise FrameError("a relay frame without a number")
    return _RELAY.unpack_from(payload)[0], payload[_RELAY.size :]


def pack_file(path: str, offset: int, data: bytes) -> bytes:
    """Return a frame with bytes of a file; `path` is relative to the run directory."""
    name = os.fsencode(path)
    return pack(Kind.FILE, _FILE.pack(len(name), offset) + name + data)


def read_file(payload: bytes) -> tuple[str, int, bytes]:
    """Return path, offset and data; FrameError for a path that leaves the run directory."""
    if len(payload) < _FILE.size:
        raise FrameError("a file frame without a name")
    length, offset = _FILE.unpack_from(payload)
    name = payload[_FILE.size : _FILE.size + length]
    if not 0 < length <= _MAX_PATH_BYTES or len(name) != length or offset > 1 << 50:
        raise FrameError("a file frame with a wrong name")
    path = os.fsdecode(name)
    if path.startswith("/") or any(part in ("", ".", "..") for part in path.split("/")):
        raise FrameError("a file outside of the run directory")
    if "\0" in path:
        raise FrameError("a file name with a zero byte")
    return path, offset, payload[_FILE.size + length :]


class FrameReader:
    """Reads frames from a descriptor, with a limit to the silence in between."""

    def __init__(self, fd: int, early: bytes = b"") -> None:
        self._fd = fd
        self._buffer = bytearray(early)

    def read(self, timeout_s: float) -> tuple[int, bytes] | None:
        """Return the next frame; None at the end of file.

        Raises:
            TimeoutError: Nothing came for `timeout_s`.
            FrameError: What came is no frame.
        """
        while True:
            if len(self._buffer) >= _HEADER.size:
                kind, length = _HEADER.unpack_from(self._buffer)
                if length > MAX_PAYLOAD_BYTES:
                    raise FrameError(f"a frame of {length} bytes")
                end = _HEADER.size + length
                if len(self._buffer) >= end:
                    payload = bytes(self._buffer[_HEADER.size : end])
                    del self._buffer[:end]
                    return kind, payload
            if not self._fill(timeout_s):
                return None

    def read_until(self, marker: bytes, limit_bytes: int, timeout_s: float) -> bytes | None:
        """Return what stands before the line `marker`; None at the end of file (see `rest`).

        Raises:
            TimeoutError: The marker did not come within `timeout_s`.
            FrameError: More than `limit_bytes` came before it.
        """
        deadline = time.monotonic() + timeout_s
        while (at := self._buffer.find(marker + b"\n")) < 0:
            if len(self._buffer) > limit_bytes:
                raise FrameError(f"more than {limit_bytes} bytes before the courier")
            if not self._fill(max(0.0, deadline - time.monotonic())):
                return None
        before = bytes(self._buffer[:at])
        del self._buffer[: at + len(marker) + 1]
        return before

    @property
    def rest(self) -> bytes:
        """Return what has come and is no frame yet."""
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
    """A thread that writes frames to a descriptor, so that a stalled one holds nobody but bulk senders."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._ping_every_s: float | None = None
        self._queue: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self.is_broken = False
        self._thread = threading.Thread(target=self._work, name="frames", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ping_every(self, interval_s: float) -> None:
        """Send a ping whenever nothing else has been sent for so long."""
        with self._changed:
            self._ping_every_s = interval_s
            self._changed.notify_all()

    def send(self, frame: bytes) -> None:
        """Queue a frame; after the end it is dropped."""
        with self._changed:
            if not self.is_broken and not self._closing:
                self._queue.append(frame)
                self._waiting_bytes += len(frame)
                self._changed.notify_all()

    def send_bulk(self, frame: bytes) -> bool:
        """Queue a frame once little else waits; return False when the other side is gone."""
        with self._changed:
            while self._waiting_bytes > _BUSY_BYTES and not self.is_broken and not self._closing:
                self._changed.wait(1.0)
        self.send(frame)
        return not self.is_broken

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is written; say whether it is."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_bytes or self.is_broken, timeout_s)
            return not self._waiting_bytes

    def close(self) -> None:
        """Write what waits, then close the descriptor: the other side sees the end of file."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            while (frame := self._next()) is not None:
                view = memoryview(frame)
                while view:
                    view = view[os.write(self._fd, view) :]
                with self._changed:
                    self._waiting_bytes -= len(frame)
                    self._changed.notify_all()
        except OSError:
            pass
        with self._changed:
            self.is_broken = True
            self._changed.notify_all()
        os.close(self._fd)

    def _next(self) -> bytes | None:
        with self._changed:
            while not self._queue and not self._closing:
                interval = self._ping_every_s
                if not self._changed.wait(interval) and interval is not None:
                    break
            if self._queue:
                return self._queue.popleft()
            if self._closing:
                return None
            ping = pack(Kind.PING)
            self._waiting_bytes += len(ping)
            return ping
