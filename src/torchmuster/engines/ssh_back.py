"""What comes back from hosts: the record while it grows, the outputs at the end, and calls to the coordinator."""

import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable
from typing import Any

from torchmuster.engines.ssh_session import HostError, SshSession
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
        self._bases: dict[tuple[str, str], int] = {}

    def append_from(self, host: str) -> None:
        """Put the record of a host behind ours: it is the head now, and knows nothing of what came before."""
        for path in (self._run_dir.events, self._run_dir.training):
            with contextlib.suppress(OSError):
                self._bases[host, os.path.basename(path)] = os.path.getsize(path)

    def take(self, payload: bytes, host: str = "") -> None:
        """Write one piece of a host's; FrameError for one that has no business here."""
        path, offset, data = frames.read_file(payload)
        offset += self._bases.get((host, path), 0)
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


def own_paths(value: Any, theirs: str, ours: str, code: str | None) -> Any:
    """Return JSON in which the texts name our copies of a host's files; what stays there keeps its path.

    Args:
        value: Anything that JSON has.
        theirs: The run directory on the host.
        ours: The client's.
        code: The folder whose copy the host has; None where it has none.
    """
    if isinstance(value, dict):
        return {key: own_paths(entry, theirs, ours, code) for key, entry in value.items()}
    if isinstance(value, list):
        return [own_paths(entry, theirs, ours, code) for entry in value]
    if not isinstance(value, str) or theirs == ours:
        return value
    if code is not None:
        value = value.replace(f"{theirs}/code/", f"{code.rstrip('/')}/")
    come = r"(?=/(?:logs/|events\.jsonl|training\.jsonl|result\.json))"
    return re.sub(re.escape(theirs) + come, lambda _: ours, value)


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


def collect(session: SshSession, back: OutputBack, say: Callable[[str], None]) -> None:
    """Take back what the run has made in the copied code folder of a host, and say what stays there."""
    name = session.host.name
    try:
        said = session.ask(Kind.COLLECT, {}, Kind.COLLECTED)
        count = back.unpack()
    except (HostError, OSError, ValueError) as error:
        say(f"outputs of {name} did not come back: {error}")
        return
    if count:
        files = f"{count} new or changed file{'s' if count != 1 else ''}"
        say(f"{files} of {name} came back to {back.folder}")
    if said["num_stay"]:
        names = ", ".join(said["stay"][:3])
        say(
            f"{said['num_stay']} files stay on {name} in {said['root']}, together"
            f" they are larger than {code_copy.show_size(code_copy.MAX_OUTPUT_BYTES)}: {names}"
        )
    if said.get("snapshots"):
        say(f"the snapshots are on {name} in {said['snapshots']}")


class Relay:
    """A port of this machine whose calls come out at the coordinator's, through the head's session.

    The channel inside is authenticated by the run's secret from end to end.
    """

    def __init__(self, head: Callable[[], SshSession | None]) -> None:
        self._head = head
        self._listening = listener.bind("127.0.0.1", 0)
        self._listening.setblocking(True)
        self.port = int(self._listening.getsockname()[1])
        self._calls: dict[int, tuple[socket.socket, SshSession]] = {}
        self._last = 0
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def close(self) -> None:
        """Take no more calls and end those that are open."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for call, _ in list(self._calls.values()):
            _end(call)

    def take(self, session: SshSession, kind: int, payload: bytes) -> None:
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

    def drop(self, session: SshSession) -> None:
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

    def _read(self, number: int, call: socket.socket, session: SshSession) -> None:
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
