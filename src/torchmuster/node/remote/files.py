"""What a courier sends of a host's disk: the run's record while it grows, and the outputs at the end."""

import contextlib
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable
from typing import Any

from torchmuster.files import atomic, code_copy
from torchmuster.files.layout import RunDir, muster_home
from torchmuster.net import frames
from torchmuster.net.frames import FrameWriter, Kind

TOKEN_FILE = "shared-token"
MARK_FILE = "made-here"
_EVERY_S = 0.3
_MAX_SMALL_BYTES = 1 << 20
_NEVER = frozenset(
    {"secret", TOKEN_FILE, MARK_FILE, "plan.json", "head.json", "owner.json", "code.stamps.json"}
)


class RecordStream:
    """Sends what is appended to the record of a run directory that the client doesn't see."""

    def __init__(self, run_dir: RunDir, writer: FrameWriter) -> None:
        self._run_dir = run_dir
        self._writer = writer
        self._sent: dict[str, int] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._work, name="record", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()

    def send_new(self, *, small_files: bool = False) -> None:
        """Send what has been appended since; at the end the small files too."""
        with self._lock:
            for path in self._growing():
                self._send_rest(path)
            for path in self._small() if small_files else []:
                self._sent.pop(path, None)
                self._send_rest(path)

    def _work(self) -> None:
        while not self._stopping.wait(_EVERY_S) and not self._writer.is_broken:
            with contextlib.suppress(OSError):
                self.send_new()

    def _growing(self) -> list[str]:
        found = [self._run_dir.events, self._run_dir.training]
        for folder, _, names in os.walk(os.path.join(self._run_dir.path, "logs")):
            found += [os.path.join(folder, name) for name in names]
        return found

    def _small(self) -> list[str]:
        found: list[str] = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._run_dir.path):
                small = entry.is_file(follow_symlinks=False) and entry.name not in _NEVER
                if small and ".tmp" not in entry.name and entry.stat().st_size <= _MAX_SMALL_BYTES:
                    found.append(entry.path)
        return [p for p in found if p not in (self._run_dir.events, self._run_dir.training)]

    def _send_rest(self, path: str) -> None:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            offset = self._sent.get(path, 0)
            if os.fstat(file.fileno()).st_size < offset:
                offset = 0
            file.seek(offset)
            name = os.path.relpath(path, self._run_dir.path)
            while data := file.read(frames.CHUNK_BYTES):
                if not self._writer.send_bulk(frames.pack_file(name, offset, data)):
                    return
                offset += len(data)
                self._sent[path] = offset


def sees(token_path: str, token: str) -> bool:
    """Say whether this host sees the client's (or the head's) file of this path and content."""
    try:
        with open(token_path) as file:
            return secrets.compare_digest(file.read(256).strip(), token)
    except (OSError, ValueError):
        return False


def make_own_run_dir(run_id: str, token: str) -> RunDir:
    """Make the run directory of this host, below its $MUSTER_HOME; one of the same run is used again.

    Raises:
        OSError: It can't be made, or another run's is there.
    """
    home = os.path.join(muster_home(), "runs")
    os.makedirs(home, mode=0o700, exist_ok=True)
    path = os.path.join(home, run_id)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        status = os.lstat(path)
        ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if not ours or not sees(os.path.join(path, TOKEN_FILE), token):
            raise
    run_dir = RunDir(path)
    for folder in (run_dir.logs, os.path.dirname(run_dir.agent_log("n1"))):
        os.makedirs(folder, exist_ok=True)
    write_private(os.path.join(path, TOKEN_FILE), token)
    if not mark_of(run_dir):
        write_private(os.path.join(path, MARK_FILE), secrets.token_hex(16))
    return run_dir


def mark_of(run_dir: RunDir) -> str:
    """Return what tells this folder from another host's of the same path and run; empty for the client's own."""
    try:
        with open(os.path.join(run_dir.path, MARK_FILE)) as file:
            return file.read(64).strip()
    except OSError:
        return ""


def write_private(path: str, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    temporary = f"{path}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text + "\n")
    os.replace(temporary, path)


class FrameStream:
    """The pieces of an archive as they come in frames, as a file to read from."""

    def __init__(self, next_piece: Callable[[], bytes]) -> None:
        self._next_piece = next_piece
        self._buffer = b""
        self._ended = False

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, fewer at the end only."""
        found = [self._buffer]
        have = len(self._buffer)
        while have < size and not self._ended:
            piece = self._next_piece()
            self._ended = not piece
            found.append(piece)
            have += len(piece)
        data = b"".join(found)
        self._buffer = data[size:]
        return data[:size]

    def skip_rest(self) -> None:
        """Read to the end: what follows is the next frame."""
        while not self._ended:
            self._ended = not self._next_piece()


class FrameSink:
    """A file to write to, whose content goes out in frames."""

    def __init__(self, kind: Kind, writer: FrameWriter) -> None:
        self._kind = kind
        self._writer = writer

    def write(self, data: bytes) -> int:
        """Send it; BrokenPipeError when the other side is gone."""
        for at in range(0, len(data), frames.CHUNK_BYTES):
            piece = data[at : at + frames.CHUNK_BYTES]
            if not self._writer.send_bulk(frames.pack(self._kind, piece)):
                raise BrokenPipeError
        return len(data)

    def flush(self) -> None:
        """Nothing is kept back."""


class CodeOutputs:
    """The copied code folder of a host, and what the run has made in it."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._stamp_file = f"{root}.stamps.json"
        known: Any = atomic.read_json(self._stamp_file)
        self._before = (
            {name: (at[0], at[1]) for name, at in known.items()} if isinstance(known, dict) else {}
        )

    @property
    def is_there(self) -> bool:
        """Say whether the folder has been unpacked whole, in this session or an earlier one."""
        return os.path.exists(self._stamp_file)

    def unpack(self, stream: FrameStream) -> None:
        """Take the folder; ValueError when what comes is no proper archive."""
        shutil.rmtree(self.root, ignore_errors=True)
        os.makedirs(self.root, mode=0o700)
        code_copy.read_archive(stream, self.root, code_copy.MAX_CODE_BYTES * 2)
        stream.skip_rest()
        self._before = code_copy.stamps(self.root)
        atomic.write_json(self._stamp_file, self._before)

    def send(self, writer: FrameWriter) -> dict[str, Any]:
        """Send new and changed files; return what came and what stays here."""
        come, stay = code_copy.outputs(self.root, self._before, code_copy.MAX_OUTPUT_BYTES)
        if come:
            code_copy.write_archive(self.root, come, FrameSink(Kind.OUTPUT, writer))  # type: ignore[arg-type]
        writer.send(frames.pack(Kind.OUTPUT))
        return {"count": len(come), "stay": stay[:20], "num_stay": len(stay), "root": self.root}
