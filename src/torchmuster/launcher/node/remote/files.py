"""Make the run directory of a host that doesn't see the client's; send its record and outputs back."""

import contextlib
import hashlib
import hmac
import os
import secrets
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, muster_home
from torchmuster.errors import RunDirectoryError
from torchmuster.launcher.files import code_copy
from torchmuster.launcher.net.relay import SendsMessages
from torchmuster.launcher.net.remote_messages import (
    CALL_FILE,
    CHUNK_BYTES,
    CODE_FILE,
    OUTPUT_FILE,
    FilePiece,
)
from torchmuster.launcher.net.replica import Copy, CopyScope

TOKEN_FILE = "shared-token"
MARK_FILE = "made-here"
_RUN_MARK_FILE = "made-for"
# Never copied: each side makes its own.
OWN_FILES = frozenset(
    {
        "secret",
        TOKEN_FILE,
        MARK_FILE,
        _RUN_MARK_FILE,
        "plan.json",
        "head.json",
        "owner.json",
        CALL_FILE,
    }
)
_NOT_COPIED = OWN_FILES | {CODE_FILE, "code.stamps.json"}


RUN_RECORD = CopyScope(
    (RunDir.events, RunDir.training, "logs/**"), (RunDir.result, "*"), _NOT_COPIED
)


def scope_of_group(group: str) -> CopyScope:
    """Return what a group sends back: its record, and those of its tasks' trainings."""
    own, run = f"groups/{group}", "tasks/*/training/attempt-*/*"
    return CopyScope(
        (
            f"{own}/{RunDir.events}",
            f"logs/{group}/**",
            "logs/agents/**",
            *(f"{run}/{name}" for name in (RunDir.events, RunDir.training, "logs/**")),
        ),
        (f"{own}/{RunDir.result}", f"{run}/{RunDir.plan}", f"{run}/{RunDir.result}"),
    )


def sees_run(run_dir: str, token: str) -> bool:
    """Return whether this host sees the run directory that has this token."""
    known = read_private(os.path.join(run_dir, TOKEN_FILE))
    return known != "" and secrets.compare_digest(known, token)


def make_own_run_dir(run_id: str, token: str, secret: str) -> str:
    """Make this host's run directory below $MUSTER_HOME, or use the run's earlier one again.

    The secret identifies the run; an owner that returns has a new token.

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
        if not ours or not secrets.compare_digest(
            read_private(os.path.join(path, _RUN_MARK_FILE)), of_run
        ):
            raise RunDirectoryError(
                f"the run directory of `{run_id}` exists already",
                where=path,
                fix="choose another --run-id, or remove that of the earlier run from this host",
            ) from error
    run_dir = RunDir(path)
    for folder in (run_dir.logs, os.path.dirname(run_dir.agent_log("n1"))):
        os.makedirs(folder, exist_ok=True)
    write_private(os.path.join(path, _RUN_MARK_FILE), of_run)
    write_private(os.path.join(path, TOKEN_FILE), token)
    make_mark(path)
    return path


def mark_of(run_dir: str) -> str:
    """Return the folder's mark, which differs on each host; empty for the client's own."""
    return read_private(os.path.join(run_dir, MARK_FILE))


def make_mark(run_dir: str) -> None:
    """Give a folder its mark, unless it has one."""
    if not mark_of(run_dir):
        write_private(os.path.join(run_dir, MARK_FILE), secrets.token_hex(16))


def read_private(path: str) -> str:
    """Return what `write_private` has written; empty if there is nothing."""
    try:
        with open(path) as file:
            return file.read(256).strip()
    except (OSError, ValueError):
        return ""


def write_private(path: str, text: str) -> None:
    """Write a line that only its owner can read, whole or not at all."""
    atomic.replace_file(path, f"{text}\n".encode(), mode=0o600)


class _PieceSink:
    """A file object that sends what is written, in pieces."""

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


class ReturnedOutputs:
    """The archives of outputs that other machines sent, by the machine's name."""

    def __init__(self, run_dir: RunDir) -> None:
        self._root = run_dir.path
        self._copies: dict[str, Copy] = {}

    def take(self, piece: FilePiece, host: str) -> None:
        """Take a piece of an archive; `unpack` raises what went wrong."""
        name = self._name(host)
        new = Copy(self._root, CopyScope((name,)), most_bytes=2 * code_copy.MAX_OUTPUT_BYTES)
        self._copies.setdefault(host, new).take(replace(piece, path=name))

    def unpack(self, host: str, folder: str) -> int:
        """Unpack what a machine sent; return the number of files.

        Raises:
            OSError: There is no room for it here.
            ValueError: It is damaged, or too large.
        """
        archive, copy = os.path.join(self._root, self._name(host)), self._copies.pop(host, None)
        if copy is None:
            return 0
        try:
            if copy.trouble is not None:
                raise copy.trouble
            if copy.left_out:
                raise ValueError(*copy.left_out.values())
            os.makedirs(folder, exist_ok=True)
            with open(archive, "rb") as file:
                return code_copy.read_archive(file, folder, code_copy.MAX_OUTPUT_BYTES)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(archive)

    def _name(self, host: str) -> str:
        return f"output-{hashlib.sha256(host.encode()).hexdigest()[:16]}.part"


def send_made(
    session: SendsMessages, root: str, before: Mapping[str, tuple[int, int]]
) -> list[str]:
    """Send the new and changed files below a root; return those that stay here."""
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
        """Return whether the folder has been unpacked whole, in this session or an earlier one."""
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

    def send(self, session: SendsMessages) -> list[str]:
        """Send new and changed files; return those that stay here."""
        return send_made(session, self.root, self._before)
