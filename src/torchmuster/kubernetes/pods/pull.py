"""Sessions with pods in which a copy of files travels: `Pull` brings it here, `Push` takes it there (`launcher/net/replica.py`)."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence

from torchmuster.core import proc
from torchmuster.core.proc import HasStatus
from torchmuster.errors import MusterError
from torchmuster.kubernetes.node.order import ORDER_VARIABLE, PROGRAMS_VARIABLE
from torchmuster.launcher.engines.ssh_bundle import Starts, start_between_pipes
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.launcher.net.frames import FrameReader, FrameWriter
from torchmuster.launcher.net.replica import Copy, CopyState, Feed, Scope

# Also what a damaged file or a hostile name raises: it must not end what tries again.
BROKEN = (MusterError, OSError, messages.FrameError, ValueError, RecursionError)
_LIMIT_S, _LATE_S, _EVERY_S = 3600.0, 5.0, 2.0
_HELD_S = 60.0  # to write what has come, and to rename it


def program(words: str) -> str:
    """Return the command by which a pod's shell starts a program of ours for its order."""
    return f'exec ${PROGRAMS_VARIABLE} {words} --order="${ORDER_VARIABLE}"'


def start_beside(argv: Sequence[str], stdin: int, stdout: int, stderr: int) -> HasStatus:
    """Open a session as a process of its own; `PodLines.start` carries it in this one."""
    return proc.start_beside(list(argv), stdin=stdin, stdout=stdout, stderr=stderr)


@contextlib.contextmanager
def _session(
    argv: Sequence[str], start: Starts
) -> Iterator[tuple[FrameWriter, FrameReader, HasStatus]]:
    """Open a session; give its two directions, and what stands for it."""
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        child, to, out = start_between_pipes(start, argv, null)
    finally:
        os.close(null)
    writer = FrameWriter(to)
    try:
        yield writer, FrameReader(out), child
    finally:
        writer.close()
        os.close(out)
        child.send_signal(15)
        if child.wait(_LATE_S) is not None and isinstance(child, proc.Child):
            proc.let_go(child)


def into(copy: Copy) -> Callable[[messages.RemoteMessage], bool]:
    """Return what takes a feed's messages into a copy; OSError where it can't be written."""

    def take(message: messages.RemoteMessage) -> bool:
        match message:
            case messages.CopyOf(mark=mark):
                copy.begin(mark)
            case messages.FilePiece():
                copy.put(message)
        return not isinstance(message, messages.CopyEnd)

    return take


class _Carried:
    """One session, which another thread may break.

    Args:
        argv: The words that open it and run a program of ours there.
        start: Opens it.
    """

    def __init__(self, argv: Sequence[str], start: Starts = start_beside) -> None:
        self._argv, self._start = argv, start
        self._child: HasStatus | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Break the way, from another thread."""
        self._is_stopped = True
        if self._child is not None:
            self._child.send_signal(15)

    def _take(self, child: HasStatus) -> HasStatus:
        """Keep what stands for the session; who has said stop while it opened means it, too."""
        self._child = child
        if self._is_stopped:
            child.send_signal(15)
        return child


class Pull(_Carried):
    """One reading of what `pod-record` sends."""

    def run(
        self,
        has: Iterator[messages.CopyHas],
        take: Callable[[messages.RemoteMessage], bool],
        is_held: Callable[[], bool] = lambda: False,
        limit_s: float = _LIMIT_S,
    ) -> messages.CopyEnd | None:
        """Read until `take` says that it has everything, or nothing more comes; return what was said at the end.

        Args:
            has: How far the copy is.
            take: Gets each message; says whether more is wanted.
            is_held: Whether the other end may forget what it has, when nothing more is wanted.
            limit_s: How long it may be silent.

        Raises:
            MusterError: The command can't be started.
            OSError: It ended before it was told, or nothing can be written here.
        """
        message: messages.RemoteMessage | None = None
        with _session(self._argv, self._start) as (writer, reader, child):
            self._take(child)
            for part in has:
                writer.send(part)
            while (message := reader.read(limit_s)) is not None and take(message):
                continue
            if is_held():
                writer.send(messages.CopyHeld())
                writer.close()
                child.wait(_LATE_S)  # the word is on its way
        return message if isinstance(message, messages.CopyEnd) else None


class Push(_Carried):
    """One feeding of a copy that `pod-keep` has."""

    def run(self, root: str, scope: Scope, mark: str, until: threading.Event) -> bool:
        """Send what is new until then, and at last what is missing; say whether the pod holds all of it.

        Raises:
            MusterError: The session can't be opened, or the pod can't keep it.
            OSError: The way breaks.
            FrameError: The other side speaks something else.
        """
        with _session(self._argv, self._start) as (writer, reader, child):
            self._take(child)
            known = CopyState()
            while isinstance(has := reader.read(_HELD_S), messages.CopyHas) and not known.take(has):
                continue
            if not isinstance(has, messages.CopyHas):
                return isinstance(has, messages.CopyHeld)
            writer.send(messages.CopyOf(mark=mark))
            feed = Feed(root, scope, writer, known if known.mark == mark else None)
            feed.look()
            while not until.wait(_EVERY_S) and child.poll() is None:
                feed.look()
            feed.look(is_over=True)
            writer.send(messages.CopyEnd(is_over=True))
            answer = reader.read(_HELD_S)
            if isinstance(answer, messages.RemoteFailed):
                raise MusterError(answer.what, where=answer.where, why=answer.why)
            return isinstance(answer, messages.CopyHeld)
