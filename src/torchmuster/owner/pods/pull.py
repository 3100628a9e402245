"""Reads what `pod-record` sends in a session with a pod, until it says that this is all or the way breaks."""

import json
import os
from collections.abc import Callable, Mapping, Sequence

from torchmuster import proc
from torchmuster.engines.ssh_bundle import Starts
from torchmuster.net import remote_messages as messages
from torchmuster.net.frames import FrameReader
from torchmuster.node.door.forked import HasStatus
from torchmuster.node.pod.record import HELD

_LIMIT_S = 3600.0
_LATE_S = 5.0


class RecordPull:
    """One reading of a record.

    Args:
        argv: The command that opens the session and runs `pod-record` there.
        start: Opens it in this process, by the last two words; None: the command is a process.
    """

    def __init__(self, argv: Sequence[str], start: Starts | None = None) -> None:
        self._argv = list(argv)
        self._start = start
        self._child: HasStatus | None = None

    def run(
        self,
        known: Mapping[str, object],
        take: Callable[[messages.RemoteMessage], bool],
        is_held: Callable[[], bool] = lambda: False,
    ) -> None:
        """Read until `take` says that it has everything, or nothing more comes.

        Args:
            known: Which record there is here already, and how much of each file.
            take: Gets each message; says whether more is wanted.
            is_held: Whether the other end may forget what it has, when nothing more is wanted.

        Raises:
            MusterError: The command can't be started.
            OSError: It ended before it was told.
        """
        theirs_in, ours_in = os.pipe2(os.O_CLOEXEC)
        ours_out, theirs_out = os.pipe2(os.O_CLOEXEC)
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            child, let_go = self._open(theirs_in, theirs_out, null)
        finally:
            for fd in (theirs_in, theirs_out, null):
                os.close(fd)
        self._child = child
        try:
            os.write(ours_in, json.dumps(known).encode() + b"\n")
            reader = FrameReader(ours_out)
            while (message := reader.read(_LIMIT_S)) is not None and take(message):
                continue
            if is_held():
                os.write(ours_in, HELD)
        finally:
            os.close(ours_in)
            if is_held():
                child.wait(_LATE_S)  # the word is on its way
            os.close(ours_out)
            child.send_signal(15)
            if child.wait(_LATE_S) is not None:
                let_go()

    def _open(self, stdin: int, stdout: int, stderr: int) -> tuple[HasStatus, Callable[[], None]]:
        """Open the session; return what stands for it, and what forgets it when it has ended."""
        if self._start is not None:
            return self._start(self._argv, stdin, stdout, stderr), lambda: None
        child = proc.start_beside(self._argv, stdin=stdin, stdout=stdout, stderr=stderr)
        return child, lambda: proc.let_go(child)

    def stop(self) -> None:
        """Break the way, from another thread."""
        if self._child is not None:
            self._child.send_signal(15)
