"""Sessions with pods that copy files: `Pull` copies from a pod, `Push` to it.

They speak the protocol of `launcher/net/replica.py`.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence

from torchmuster.core import proc
from torchmuster.core.proc import HasStatus
from torchmuster.errors import MusterError
from torchmuster.kubernetes.node.order import ORDER_VARIABLE, PROGRAMS_VARIABLE
from torchmuster.launcher.engines.ssh_host import Starts, start_between_pipes
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.launcher.net.remote_messages import FrameReader, FrameWriter
from torchmuster.launcher.net.replica import Copy, CopyScope, CopyState, Feed

# Includes what a damaged file or a hostile name raises, which must not end a retry loop.
BROKEN = (MusterError, OSError, messages.FrameError, ValueError, RecursionError)
_LIMIT_S, _LATE_S, _EVERY_S = 3600.0, 5.0, 2.0
_HELD_S = 60.0  # to write what has come, and to rename it


def program(words: str) -> str:
    """Return the shell command that starts a program of ours in a pod with the pod's order."""
    return f'exec ${PROGRAMS_VARIABLE} {words} --order="${ORDER_VARIABLE}"'


def start_process(argv: Sequence[str], stdin: int, stdout: int, stderr: int) -> HasStatus:
    """Open a session as a separate process; `PodConnections.start` runs it in this one."""
    return proc.start_spared(list(argv), stdin=stdin, stdout=stdout, stderr=stderr)


def into(copy: Copy) -> Callable[[messages.RemoteMessage], bool]:
    """Return a function that writes a feed's messages to a copy; it raises OSError if it can't."""

    def take(message: messages.RemoteMessage) -> bool:
        match message:
            case messages.CopyOf(mark=mark):
                copy.begin(mark)
            case messages.FilePiece():
                copy.put(message)
        return not isinstance(message, messages.CopyEnd)

    return take


class _OneSession:
    """One session, which another thread may break.

    Args:
        argv: The command that opens it and runs a program of ours there.
        start: Starts the command.
    """

    def __init__(self, argv: Sequence[str], start: Starts = start_process) -> None:
        self._argv, self._start = argv, start
        self._child: HasStatus | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Break the connection, from another thread."""
        self._is_stopped = True
        if self._child is not None:
            self._child.send_signal(15)

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple[FrameWriter, FrameReader, HasStatus]]:
        """Open the session; yield its two directions and its process."""
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            child, to, out = start_between_pipes(self._start, self._argv, null)
        finally:
            os.close(null)
        writer, self._child = FrameWriter(to), child
        if self._is_stopped:  # while it opened
            child.send_signal(15)
        try:
            yield writer, FrameReader(out), child
        finally:
            writer.close()
            os.close(out)
            child.send_signal(15)
            if child.wait(_LATE_S) is not None and isinstance(child, proc.Child):
                proc.let_go(child)


class Pull(_OneSession):
    """One reading of what `pod-record` sends."""

    def run(
        self,
        has: Iterator[messages.CopyHas],
        take: Callable[[messages.RemoteMessage], bool],
        is_held: Callable[[], bool] = lambda: False,
        limit_s: float = _LIMIT_S,
    ) -> messages.CopyEnd | None:
        """Read until `take` returns False or nothing more comes; return the end message, if any.

        Args:
            has: How far the copy is.
            take: Handles a message; returns whether more is wanted.
            is_held: Says in the end whether the other side may forget what it has.
            limit_s: How long the other side may be silent.

        Raises:
            MusterError: The command can't be started.
            OSError: The connection broke, or nothing can be written here.
        """
        message: messages.RemoteMessage | None = None
        with self._open() as (writer, reader, child):
            for part in has:
                writer.send(part)
            while (message := reader.read(limit_s)) is not None and take(message):
                continue
            if is_held():
                writer.send(messages.CopyHeld())
                writer.close()
                child.wait(_LATE_S)  # the message is on its way
        return message if isinstance(message, messages.CopyEnd) else None


class Push(_OneSession):
    """One update of a copy that `pod-keep` holds."""

    def run(self, root: str, scope: CopyScope, mark: str, until: threading.Event) -> bool:
        """Send what is new until the event is set, then the rest; say whether the pod holds it.

        Raises:
            MusterError: The session can't be opened, or the pod can't keep the copy.
            OSError: The connection breaks.
            FrameError: The other side speaks another protocol.
        """
        with self._open() as (writer, reader, child):
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
