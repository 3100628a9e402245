"""The run directory of a host that does not share the client's, and what goes back of it: the record, the outputs."""

import contextlib
import glob
import hmac
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchmuster.errors import RunDirectoryError
from torchmuster.files import atomic, code_copy
from torchmuster.files.layout import RunDir, muster_home
from torchmuster.net.relay import SendsMessages
from torchmuster.net.remote_messages import (
    CALL_FILE,
    CHUNK_BYTES,
    CODE_FILE,
    OUTPUT_FILE,
    FilePiece,
)

TOKEN_FILE = "shared-token"
MARK_FILE = "made-here"
_RUN_FILE = "made-for"
# Each side has its own.
OWN_FILES = frozenset(
    {"secret", TOKEN_FILE, MARK_FILE, _RUN_FILE, "plan.json", "head.json", "owner.json", CALL_FILE}
)
_EVERY_S = 0.3
MAX_SMALL_BYTES = 1 << 20
_NEVER = OWN_FILES | {CODE_FILE, "code.stamps.json"}


def send_pieces(
    session: SendsMessages,
    path: str,
    name: str,
    offset: int = 0,
    note: Callable[[int], None] | None = None,
) -> int:
    """Send a file from an offset on, under a name relative to the run directory; return how far it was sent.

    Args:
        session: Carries the pieces.
        path: Of the file.
        name: Relative to the run directory.
        offset: In bytes.
        note: Gets how far it is after each piece.
    """
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < offset:
            offset = 0
        file.seek(offset)
        while data := file.read(CHUNK_BYTES):
            if not session.send(FilePiece(path=name, offset=offset, data=data), bulk=True):
                break
            offset += len(data)
            if note is not None:
                note(offset)
    return offset


def write_piece(folder: str, name: str, offset: int, data: bytes, mode: int = 0o644) -> None:
    """Write a piece where it belongs in a file below a folder; links are not followed. `mode` is that of a new file."""
    path = os.path.join(folder, name)
    if "/" in name:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        os.pwrite(fd, data, offset)
    finally:
        os.close(fd)


class RecordStream:
    """Sends what is appended to the record of a run directory that the client doesn't see."""

    def __init__(
        self,
        run_dir: RunDir,
        session: SendsMessages,
        known: Mapping[str, int] | None = None,
        group: str | None = None,
    ) -> None:
        """`known` is how much the other side has of files already, by their names in the run directory.

        With `group` it is the record of that group of a workflow.
        """
        self._run_dir = run_dir
        self._group = group
        self._session = session
        self._sent = {
            os.path.join(run_dir.path, name): size for name, size in (known or {}).items()
        }
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
                self._send(path, self._sent.get(path, 0))
            for path in self._small() if small_files else []:
                self._send(path, 0)

    def _send(self, path: str, offset: int) -> None:
        name = os.path.relpath(path, self._run_dir.path)
        with contextlib.suppress(OSError):
            self._sent[path] = send_pieces(self._session, path, name, offset)

    def _work(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            self.send_new()

    def _growing(self) -> list[str]:
        logs = os.path.join(self._run_dir.path, "logs")
        found, folders = [self._run_dir.events, self._run_dir.training], [logs]
        if self._group is not None:
            found = [self._run_dir.group(self._group).events]
            folders = [os.path.join(logs, self._group), os.path.join(logs, "agents")]
            for one in self._trainings():
                found += [one.events, one.training]
                folders.append(one.logs)
        for top in folders:
            for folder, _, names in os.walk(top):
                found += [os.path.join(folder, name) for name in names]
        return found

    def _trainings(self) -> list[RunDir]:
        """Return the runs that tasks of several nodes are, each with a record of its own."""
        attempts = self._run_dir.training_folder("*", 0).removesuffix("0")
        return [RunDir(folder) for folder in sorted(glob.glob(f"{attempts}*/*"))]

    def _small(self) -> list[str]:
        if self._group is not None:
            own = [path for one in self._trainings() for path in (one.plan, one.result)]
            return [self._run_dir.group(self._group).result, *filter(os.path.exists, own)]
        found: list[str] = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._run_dir.path):
                small = entry.is_file(follow_symlinks=False) and entry.name not in _NEVER
                if small and ".tmp" not in entry.name and entry.stat().st_size <= MAX_SMALL_BYTES:
                    found.append(entry.path)
        return [p for p in found if p not in (self._run_dir.events, self._run_dir.training)]


def sees_run(run_dir: str, token: str) -> bool:
    """Say whether this host sees the run directory of the client, or of the head, with this token."""
    try:
        with open(os.path.join(run_dir, TOKEN_FILE)) as file:
            return secrets.compare_digest(file.read(256).strip(), token)
    except (OSError, ValueError):
        return False


def make_own_run_dir(run_id: str, token: str, secret: str) -> str:
    """Make the run directory of this host, below its $MUSTER_HOME; one of the same run is used again.

    The run is the same where its secret is: an owner who comes later, as a first pod that is made again, has another token.

    Raises:
        OSError: It can't be made.
        RunDirectoryError: Another run's is there.
    """
    home = os.path.join(muster_home(), "runs")
    os.makedirs(home, mode=0o700, exist_ok=True)
    path = os.path.join(home, run_id)
    of_run = hmac.new(secret.encode(), b"own run directory", "sha256").hexdigest()
    try:
        os.mkdir(path, 0o700)
    except FileExistsError as error:
        status = os.lstat(path)
        ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if not ours or not secrets.compare_digest(_read_line(path, _RUN_FILE), of_run):
            raise RunDirectoryError(
                f"the run directory of `{run_id}` exists already",
                where=path,
                fix="choose another --run-id, or remove that of the earlier run from this host",
            ) from error
    run_dir = RunDir(path)
    for folder in (run_dir.logs, os.path.dirname(run_dir.agent_log("n1"))):
        os.makedirs(folder, exist_ok=True)
    write_private(os.path.join(path, _RUN_FILE), of_run)
    write_private(os.path.join(path, TOKEN_FILE), token)
    make_mark(path)
    return path


def mark_of(run_dir: str) -> str:
    """Return what tells this folder from another host's of the same path and run; empty for the client's own."""
    return _read_line(run_dir, MARK_FILE)


def make_mark(run_dir: str) -> None:
    """Give a folder its mark, unless it has one."""
    if not mark_of(run_dir):
        write_private(os.path.join(run_dir, MARK_FILE), secrets.token_hex(16))


def _read_line(folder: str, name: str) -> str:
    try:
        with open(os.path.join(folder, name)) as file:
            return file.read(64).strip()
    except (OSError, ValueError):
        return ""


def write_private(path: str, text: str) -> None:
    """Write a line that only its owner can read, whole or not at all."""
    atomic.replace_file(path, f"{text}\n".encode(), mode=0o600)


class _PieceSink:
    """A file to write to, whose content is sent in pieces."""

    def __init__(self, session: SendsMessages, name: str) -> None:
        self._session = session
        self._name = name
        self._offset = 0

    def write(self, data: bytes) -> int:
        for at in range(0, len(data), CHUNK_BYTES):
            piece = data[at : at + CHUNK_BYTES]
            message = FilePiece(path=self._name, offset=self._offset, data=piece)
            if not self._session.send(message, bulk=True):
                raise BrokenPipeError
            self._offset += len(piece)
        return len(data)

    def flush(self) -> None:
        """Nothing is kept back."""


def send_outputs(
    session: SendsMessages, root: str, names: Sequence[str], host: str | None = None
) -> None:
    """Send files below a root as the archive of outputs, of another host with its name; nothing where there are none."""
    if names:
        sink: Any = _PieceSink(session, OUTPUT_FILE if host is None else f"{OUTPUT_FILE}/{host}")
        code_copy.write_archive(root, names, sink)


def send_made(
    session: SendsMessages, root: str, before: Mapping[str, tuple[int, int]]
) -> list[str]:
    """Send the files below a root that were not there before, or were others; return those that stay here."""
    come, stay = code_copy.outputs(root, dict(before), code_copy.MAX_OUTPUT_BYTES)
    send_outputs(session, root, come)
    return stay


class CodeOutputs:
    """The copied code folder of a host, and what the run has made in it."""

    def __init__(self, run_dir: RunDir) -> None:
        self.root = os.path.join(run_dir.path, "code")
        self._archive = os.path.join(run_dir.path, CODE_FILE)
        self._stamp_file = f"{self.root}.stamps.json"
        known: Any = atomic.read_json(self._stamp_file)
        self._before = (
            {name: (at[0], at[1]) for name, at in known.items()} if isinstance(known, dict) else {}
        )

    @property
    def is_there(self) -> bool:
        """Say whether the folder has been unpacked whole, in this session or an earlier one."""
        return os.path.exists(self._stamp_file)

    def unpack(self) -> None:
        """Unpack the archive that came; ValueError when it is damaged."""
        shutil.rmtree(self.root, ignore_errors=True)
        os.makedirs(self.root, mode=0o700)
        with open(self._archive, "rb") as file:
            code_copy.read_archive(file, self.root, code_copy.MAX_CODE_BYTES * 2)
        os.unlink(self._archive)
        self._before = code_copy.stamps(self.root)
        atomic.write_json(self._stamp_file, self._before)

    @property
    def num_made(self) -> int:
        """Return how many files are new or changed."""
        come, stay = code_copy.outputs(self.root, self._before, code_copy.MAX_OUTPUT_BYTES)
        return len(come) + len(stay)

    def note(self) -> None:
        """Take what there is now for sent."""
        self._before = code_copy.stamps(self.root)
        atomic.write_json(self._stamp_file, self._before)

    def send(self, session: SendsMessages) -> list[str]:
        """Send new and changed files; return those that stay here."""
        return send_made(session, self.root, self._before)
