"""Hang detection for a member that is a single process, with a head's `launcher/head/hang_watch.py`."""

import asyncio
import time
from collections.abc import Callable

from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.events import RecordEvent, line_of
from torchmuster.core.model.failure import WorkerEnd
from torchmuster.core.model.narration import narrate
from torchmuster.core.model.plan import Limits
from torchmuster.core.net import messages
from torchmuster.core.node.workers import NodeAttempt
from torchmuster.launcher.head.hang_monitor import HangMonitor, watch_limits
from torchmuster.launcher.model.events import WorkerProcessEvent
from torchmuster.launcher.net import part_messages
from torchmuster.launcher.node.inquiries import ProgressReader
from torchmuster.launcher.node.stacks import take_stacks

_LOOK_EVERY_S = 2.0


class MemberWatch:
    """Watches whether one member makes progress.

    Args:
        attempt: The member's attempt.
        run_dir: The run directory of the member.
        folder: The folder with its heartbeats and stacks.
        node: The name of its node.
        limits: How long a rank may make no progress before it counts as hung.
        disk: Writes the member's record.
        say: Tells the user a sentence.
    """

    def __init__(
        self,
        attempt: NodeAttempt,
        run_dir: RunDir,
        folder: str,
        node: str,
        limits: Limits,
        disk: DiskWriter,
        say: Callable[[str], None],
    ) -> None:
        self._attempt, self._run_dir, self._folder = attempt, run_dir, folder
        self._disk, self._say = disk, say
        self._progress = ProgressReader(folder, attempt.attempt)
        self._asked: int | None = None
        logs = run_dir.attempt_logs(attempt.attempt)
        ranks, now = {0: node}, time.monotonic()
        self._monitor = HangMonitor(attempt.attempt, ranks, watch_limits(limits), logs, self, now)

    async def until_it_hangs(self) -> WorkerEnd:
        """Watch until the member counts as hung; return how it is to be recorded."""
        number = self._attempt.attempt
        for _, pid in self._attempt.running:
            self.event(WorkerProcessEvent(attempt=number, pid=pid, folder=self._folder))
        while True:
            ranks = await asyncio.to_thread(self._progress.read, self._attempt.running)
            now = time.monotonic()
            self._monitor.take_progress(now, part_messages.Progress(attempt=number, ranks=ranks))
            end = self._monitor.advance(now, held=False)
            if self._asked is not None:
                order = (self._folder, number, self._attempt.running)
                stacks = await asyncio.to_thread(take_stacks, *order)
                said = part_messages.Stacks(number=self._asked, stacks=stacks)
                self._asked = None
                self._monitor.take_stacks(0, said)
                end = self._monitor.advance(time.monotonic(), held=False)
            if end is not None:
                return end
            await asyncio.sleep(_LOOK_EVERY_S)

    # The interface for `HangMonitor`.

    def send_to_nodes(self, message: messages.Message) -> set[int]:
        """Note a request for stacks."""
        if isinstance(message, part_messages.TakeStacks):
            self._asked = message.number
        return {0}

    def event(self, event: RecordEvent) -> None:
        """Write an event into the member's record, and tell the user about it."""
        self._disk.append(self._run_dir.events, line_of(event).encode())
        if (sentence := narrate(event)) is not None:
            self._say(sentence)

    def append_file(self, path: str, text: str) -> None:
        """Write a file in the member's run directory."""
        self._disk.replace(path, text.encode())
