"""`pod-keep` receives the code archive, or a copy of the first pod's record, into this pod.

It speaks the protocol of `launcher/net/replica.py`.
"""

import contextlib
import hashlib
import os
import secrets
import shutil
from dataclasses import dataclass, field

from torchmuster.core.files.layout import RunDir, muster_home
from torchmuster.core.model import codec
from torchmuster.kubernetes.node.order import CODE_FILE, PodOrder, read_order
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.launcher.net.remote_messages import FrameReader, FrameWriter
from torchmuster.launcher.net.replica import Copy, CopyScope
from torchmuster.launcher.node.remote.files import MARK_FILE, mark_of, read_line, write_private

_DRAIN_S = 30.0
_SILENCE_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepWords:
    """The command line of `pod-keep`: the order's file, and whether the code archive comes."""

    order: str
    code: bool = False


def kept_scope(order: PodOrder) -> CopyScope:
    """Return what other pods copy: the record without its logs.

    The mark comes first, so that a copy is never mistaken for another run's; the events come last.
    """
    run_dir = order.run_dir
    if order.group is None:
        return CopyScope((MARK_FILE, RunDir.training, RunDir.events))
    events = os.path.relpath(run_dir.group(order.group).events, run_dir.path)
    return CopyScope((MARK_FILE, events))


def kept_folder(order: PodOrder) -> str:
    """Return where a pod keeps the copy of the first pod's record of this run."""
    name = ".".join(word for word in (order.run_id, order.group) if word is not None)
    return os.path.join(muster_home(), "records", name)


@dataclass(slots=True)
class PodSession:
    """A session on standard input and output; redirects other output to standard error."""

    reader: FrameReader = field(default_factory=lambda: FrameReader(os.dup(0)))
    writer: FrameWriter = field(default_factory=lambda: FrameWriter(os.dup(1)))

    def __post_init__(self) -> None:
        os.dup2(2, 1)


class KeptRecord:
    """A copy of the first pod's record on this pod's disk."""

    def __init__(self, order: PodOrder) -> None:
        self._root = kept_folder(order)
        self.copy = Copy(self._root, kept_scope(order), mark_of(self._root), mode=0o600)
        self.is_held = False
        self.note = f"{self._root}.keeper"

    def forget(self) -> None:
        """Start from scratch: the first pod is another one, with an empty disk."""
        shutil.rmtree(self._root, ignore_errors=True)

    def place(self) -> bool:
        """Say whether all that has come is in its place."""
        return self.copy.is_in_place and not self.copy.left_out


class ArrivingCode:
    """The archive of the code, on its way from the client into the first pod."""

    def __init__(self, order: PodOrder) -> None:
        self._order = order
        self._root = arriving_folder(order)
        self.copy = Copy(self._root, CopyScope((CODE_FILE,)), order.code_sha, mode=0o600)
        there = [order.archive, *([order.kept] if order.kept is not None else [])]
        self.is_held = os.path.exists(order.stamps) or any(map(self._is_long, there))
        self.note = os.path.join(self._root, "keeper")

    def forget(self) -> None:
        """Start from scratch; another archive has another folder."""
        shutil.rmtree(self._root, ignore_errors=True)

    def place(self) -> bool:
        """Move the archive to its place, if it is complete and intact."""
        came = os.path.join(self._root, CODE_FILE)
        if not self._is_long(came):
            return False
        with open(came, "rb") as file:
            is_whole = hashlib.file_digest(file, "sha256").hexdigest() == self._order.code_sha
        if is_whole:
            os.replace(came, self._order.archive)
        self.forget()  # the next archive starts from its beginning
        return is_whole

    def _is_long(self, path: str) -> bool:
        with contextlib.suppress(OSError):
            return os.path.getsize(path) == self._order.code_bytes
        return False


def arriving_folder(order: PodOrder) -> str:
    """Return the folder in which the archive arrives."""
    return os.path.join(order.folder, f"arriving-{(order.code_sha or '')[:16]}")


def main(arguments: list[str]) -> int:
    """Receive files until the other side hangs up."""
    words = codec.from_arguments(KeepWords, arguments)
    session, order = PodSession(), read_order(words.order)
    kept = ArrivingCode(order) if words.code else KeptRecord(order)
    if kept.is_held:
        session.writer.send(messages.CopyHeld())
        session.writer.drain(_DRAIN_S)
        return 0
    try:
        return _keep(session, kept)
    except OSError as error:
        what, why = "what comes can't be written in the pod", error.strerror or str(error)
        session.writer.send(messages.RemoteFailed(what=what, where=kept.copy.root, why=why))
        session.writer.drain(_DRAIN_S)
        return 1


def _keep(session: PodSession, kept: KeptRecord | ArrivingCode) -> int:
    """Receive files; return 0 at the end, 1 if another keeper took over or the files are not whole.

    Raises:
        OSError: They can't be written.
    """
    os.makedirs(kept.copy.root, mode=0o700, exist_ok=True)
    mine = secrets.token_hex(8)  # an earlier keeper may only have been suspended
    write_private(kept.note, mine)
    for has in kept.copy.has():
        session.writer.send(has)
    while (message := _next(session)) is not None:
        if not isinstance(message, messages.CopyOf) and read_line(kept.note) != mine:
            return 1
        match message:
            case messages.CopyOf(mark=mark) if not kept.copy.begin(mark):
                kept.forget()
                os.makedirs(kept.copy.root, mode=0o700)
            case messages.FilePiece() if not kept.copy.take(message):
                raise kept.copy.trouble or OSError("a piece is missing")
            case messages.CopyEnd():
                if not kept.place():
                    return 1
                session.writer.send(messages.CopyHeld())
    return 0


def _next(session: PodSession) -> messages.RemoteMessage | None:
    """Return the next message; None if the other side is gone or sends something else."""
    with contextlib.suppress(messages.FrameError, OSError):
        return session.reader.read(_SILENCE_S)
    return None
