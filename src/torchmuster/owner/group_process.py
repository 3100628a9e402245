"""The head of one group on this machine, as its owner sees it: a process, and a connection to it."""

import asyncio
import os
from collections.abc import Callable

from torchmuster import proc
from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.liveness.lease import OwnClock
from torchmuster.model.outcome import GroupOutcome
from torchmuster.model.workflow import GroupStart
from torchmuster.net import messages
from torchmuster.net.address import bind
from torchmuster.node.task.options import GroupOrder
from torchmuster.owner.head_follower import HeadFollower
from torchmuster.owner.head_watch import HeadWatch
from torchmuster.owner.record_writer import RecordWriter
from torchmuster.owner.stops import Stops
from torchmuster.owner.views.record import read_outcome

_POLL_S = 0.02


class GroupProcess:
    """Starts the head of a group and follows it to its end."""

    def __init__(
        self,
        run_dir: RunDir,
        group: str,
        stops: Stops,
        hear: Callable[[messages.Message], None],
        say: Callable[[str], None],
        record: RecordWriter,
    ) -> None:
        self._run_dir = run_dir
        self._group = group
        self._hear = hear
        self._record = record
        self._lifeline = os.pipe2(os.O_CLOEXEC)
        self._child: proc.Child | None = None
        self._head = HeadFollower(
            run_dir,
            # A cancelled group may bring its outputs away for long: only silence ends it.
            watch=HeadWatch(OwnClock(), f"group {group}", None),
            stops=stops,
            state=self._state,
            kill=self.kill,
            hear=self._take,
            say=say,
        )

    @property
    def pid(self) -> int:
        """Return the process of the head."""
        return self._child.pid if self._child is not None else 0

    async def start(self, start: GroupStart) -> tuple[str, int]:
        """Start the head; return where it listens.

        Raises:
            OSError: What the head has to read can't be written.
        """
        log = await asyncio.to_thread(self._write_start, start)
        listening = bind("127.0.0.1", 0)
        host, port = listening.getsockname()[:2]
        with listening:
            order = GroupOrder(
                run_dir=self._run_dir.path,
                group=self._group,
                listen_fd=listening.fileno(),
                lifeline_fd=self._lifeline[0],
            )
            try:
                self._child = proc.start(
                    proc.node_program("group", *codec.to_words(order)),
                    stdout=log,
                    stderr=log,
                    pass_fds=[order.listen_fd, order.lifeline_fd],
                )
            finally:
                os.close(log)
        head = self._run_dir.group(self._group).head
        self._record.replace(head, {"host": host, "port": port}, mode=0o600)
        return str(host), int(port)

    def _write_start(self, start: GroupStart) -> int:
        """Write what the head is told; return its log, which is open."""
        folder = self._run_dir.group(self._group)
        os.makedirs(folder.path, exist_ok=True)
        atomic.write_json(folder.start, codec.to_plain(start))
        path = self._run_dir.agent_log(f"group-{self._group}")
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    async def follow(self, address: tuple[str, int]) -> GroupOutcome | None:
        """Pass on what the head says until it has ended; None when it left no result."""
        await self._head.follow(address, self._wait_for_end)
        await self._wait_for_end()  # one that was silent has been killed
        return read_outcome(self._run_dir, self._group)

    def _take(self, message: messages.Message) -> bool:
        self._hear(message)
        return True

    def _state(self) -> str:
        facts = proc.read_process(self.pid)
        return facts.state if facts is not None else "X"

    async def _wait_for_end(self) -> str:
        while self._child is not None and self._child.poll() is None:
            await asyncio.sleep(_POLL_S)
        return "it has ended"

    def send_stop(self) -> None:
        """Ask the head to stop its group."""
        self._head.send_stop()

    def kill(self) -> None:
        """SIGKILL the head; what it started becomes ours and is ended by `end_rest`."""
        if self._child is not None:
            self._child.send_signal(9)

    def close(self) -> None:
        """Cut the lifeline: a head that still lives ends."""
        for fd in self._lifeline:
            os.close(fd)
