"""What comes back from hosts: the record while it grows, the outputs at the end, and calls to the coordinator."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable

from torchmuster.engines.ssh_session import Session
from torchmuster.files import code_copy
from torchmuster.files.layout import RunDir
from torchmuster.net import frames, listener
from torchmuster.net.frames import FrameError, Kind

_KEPT = frozenset({"plan.json", "secret", "owner.json", "head.json", "shared-token", "made-here"})
_MAX_FILE_BYTES = 64 << 30
_MAX_ARCHIVE_BYTES = 2 * code_copy.MAX_OUTPUT_BYTES


class RecordBack:
    """Writes what hosts send of their run directories into ours, each piece at its own place."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def take(self, payload: bytes) -> None:
        """Write one piece; FrameError for one that has no business here."""
        path, offset, data = frames.read_file(payload)
        if path.partition("/")[0] in _KEPT or offset + len(data) > _MAX_FILE_BYTES:
            raise FrameError(f"the host sends {path}")
        target = os.path.join(self._run_dir.path, path)
        if "/" in path:
            os.makedirs(os.path.dirname(target), exist_ok=True)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(fd, data, offset)
        finally:
            os.close(fd)


class OutputBack:
    """Collects the outputs of one host into a folder of their own."""

    def __init__(self, run_dir: RunDir, host: str) -> None:
        self.folder = os.path.join(run_dir.path, "output", host)
        self._archive = os.path.join(run_dir.path, f"output-{host}.tmp")
        self._size_bytes = 0

    def take(self, data: bytes) -> None:
        """Keep one piece of the archive; FrameError when there is too much of it."""
        if not data:
            return
        self._size_bytes += len(data)
        if self._size_bytes > _MAX_ARCHIVE_BYTES:
            raise FrameError("more outputs than were allowed")
        with open(self._archive, "ab") as file:
            file.write(data)

    def unpack(self) -> int:
        """Unpack what has come; return the number of files. ValueError when it is damaged."""
        if not self._size_bytes:
            return 0
        try:
            os.makedirs(self.folder, exist_ok=True)
            with open(self._archive, "rb") as file:
                limit = code_copy.MAX_OUTPUT_BYTES
                return code_copy.read_archive(file, self.folder, limit)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self._archive)


class Relay:
    """A port of this machine whose calls come out at the coordinator's, through the head's session.

    The channel inside is authenticated by the run's secret from end to end.
    """

    def __init__(self, head: Callable[[], Session | None]) -> None:
        self._head = head
        self._listening = listener.bind("127.0.0.1", 0)
        self._listening.setblocking(True)
        self.port = int(self._listening.getsockname()[1])
        self._calls: dict[int, tuple[socket.socket, Session]] = {}
        self._last = 0
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def close(self) -> None:
        """Take no more calls and end those that are open."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for call, _ in list(self._calls.values()):
            _end(call)

    def take(self, session: Session, kind: int, payload: bytes) -> None:
        """Pass on what the coordinator has sent."""
        number, data = frames.read_relay(payload)
        call, of = self._calls.get(number, (None, None))
        if call is None or of is not session:
            return
        try:
            if kind == Kind.RELAY_DATA:
                call.sendall(data)
                return
        except OSError:
            pass
        self._calls.pop(number, None)
        _end(call)

    def drop(self, session: Session) -> None:
        """End the calls through a session that is gone."""
        for number, (call, of) in list(self._calls.items()):
            if of is session:
                self._calls.pop(number, None)
                _end(call)

    def _accept(self) -> None:
        while True:
            try:
                call, _ = self._listening.accept()
            except OSError:
                return
            session = self._head()
            if session is None or session.is_lost:
                _end(call)
                call.close()
                continue
            self._last += 1
            number = self._last
            self._calls[number] = (call, session)
            session.send_frame(frames.pack_relay(Kind.RELAY_OPEN, number))
            reading = threading.Thread(
                target=self._read, args=(number, call, session), name="relay", daemon=True
            )
            reading.start()

    def _read(self, number: int, call: socket.socket, session: Session) -> None:
        with contextlib.suppress(OSError):
            while data := call.recv(1 << 16):
                frame = frames.pack_relay(Kind.RELAY_DATA, number, data)
                if not session.send_frame(frame, bulk=True):
                    break
        if self._calls.pop(number, None) is not None:
            session.send_frame(frames.pack_relay(Kind.RELAY_CLOSE, number))
        call.close()


def _end(call: socket.socket) -> None:
    with contextlib.suppress(OSError):
        call.shutdown(socket.SHUT_RDWR)
