"""Writes an owner's files of the run directory in a thread: a file system that hangs must not keep it from its heads."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torchmuster.files import atomic
from torchmuster.files.disk import DiskWriter
from torchmuster.files.layout import RunDir
from torchmuster.model.record.events import RecordEvent, line_of

LAST_WRITES_S = 5.0
_LOOK_EVERY_S = 0.01


class RecordWriter:
    """Writes events and small files in the order in which they come; its end waits for the last of them, for a while.

    Args:
        run_dir: Where the files belong.
        say: Tells the user what could not be written.
    """

    def __init__(self, run_dir: RunDir, say: Callable[[str], None]) -> None:
        self._run_dir, self._say = run_dir, say
        self._disk = DiskWriter(root=run_dir.path)
        self._told: set[str] = set()

    async def __aenter__(self) -> Self:
        """Begin to write."""
        loop = asyncio.get_running_loop()

        def lose(lines: int, why: str) -> None:
            del lines
            loop.call_soon_threadsafe(self._tell_of_loss, why)

        self._disk.on_loss = lose
        self._disk.keep_room(self._run_dir.room)
        self._disk.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait until all is written, or the file system has had its time."""
        self._disk.close_file(self._run_dir.events)
        deadline = time.monotonic() + LAST_WRITES_S
        while not (is_written := self._disk.flush(0.0)) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_EVERY_S)
        if is_written:
            with contextlib.suppress(OSError):
                os.unlink(self._run_dir.room)
        self._disk.on_loss = None  # the loop ends
        if not is_written:
            self._tell_of_loss(f"the file system took more than {LAST_WRITES_S:.0f} s")

    def event(self, event: RecordEvent) -> None:
        """Append an event with the time of now."""
        self._disk.append(self._run_dir.events, line_of(event).encode())

    def replace(self, path: str, value: Any, *, mode: int = 0o644) -> None:
        """Write a file anew, as JSON."""
        self._disk.replace(path, atomic.as_json(value), mode=mode)

    def _tell_of_loss(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            self._say(
                f"files in {self._run_dir.path} can't be written, so other commands may not find this run"
                f" or see all of it: {why}"
            )
