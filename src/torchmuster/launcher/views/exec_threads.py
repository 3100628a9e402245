"""The two threads of a client of `muster exec`: they read and write what may block, so that its loop never does."""

import asyncio
import os
import queue
import select
import threading
from collections.abc import Callable

from torchmuster.core.net import messages

_LOOK_EVERY_MS = 200

# task, stream (1 or 2), data; may block
Write = Callable[[str, int, bytes], None]


class OutputThread:
    """Writes what comes, in order. What waits is bounded by the windows of the commands.

    Args:
        write: Writes; may block.
        taken: Hears of each piece that was written.
        broken: Hears once that nobody reads any more (None), or why writing failed.
    """

    def __init__(
        self,
        write: Write,
        taken: Callable[[str, int], None],
        broken: Callable[[str | None], None],
    ) -> None:
        self._write = write
        self._taken = taken
        self._broken = broken
        self._queue: queue.SimpleQueue[tuple[str, str, int, bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="exec-output", daemon=True)
        self._is_broken = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, exec_id: str, task: str, stream: int, data: bytes) -> None:
        """Queue a piece."""
        self._queue.put((exec_id, task, stream, data))

    async def finish(self, is_left: Callable[[], bool]) -> None:
        """Wait until everything is written, or the user leaves: a reader may never read."""
        self._queue.put(None)
        while self._thread.is_alive() and not self._is_broken and not is_left():
            await asyncio.sleep(0.005)

    def _work(self) -> None:
        while (piece := self._queue.get()) is not None:
            exec_id, task, stream, data = piece
            try:
                self._write(task, stream, data)
            except BrokenPipeError:
                self._fail(None)
                return
            except OSError as error:
                self._fail(f"the output can't be written: {error.strerror}")
                return
            self._taken(exec_id, len(data))

    def _fail(self, why: str | None) -> None:
        self._is_broken = True
        self._broken(why)


class InputThread:
    """Reads standard input, as much as the command's end has room for.

    The thread is a daemon: one that waits for a key has to be left behind.
    """

    def __init__(self, fd: int | None, typed: Callable[..., None]) -> None:
        self._fd = fd
        self._typed = typed
        self._room_bytes = messages.EXEC_WINDOW_BYTES
        self._changed = threading.Condition()
        self._is_over = False

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._work, name="exec-input", daemon=True).start()

    def taken(self, num_bytes: int) -> None:
        """Note that the command has taken so much."""
        with self._changed:
            self._room_bytes += num_bytes
            self._changed.notify()

    def stop(self) -> None:
        """Read no more: what is typed from now on is for somebody else."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._room_bytes > 0 or self._is_over)
                room_bytes = min(self._room_bytes, messages.EXEC_CHUNK_BYTES)
            if self._is_over:
                return
            data = self._read(room_bytes)
            with self._changed:
                self._room_bytes -= len(data)
            self._typed(data, end=not data)
            if not data:
                return

    def _read(self, num_bytes: int) -> bytes:
        try:
            fd = self._fd if self._fd is not None else 0
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            while True:
                poll.poll(_LOOK_EVERY_MS)
                with self._changed:  # so that nothing is read behind `stop`
                    if self._is_over:
                        return b""
                    if poll.poll(0):
                        return os.read(fd, num_bytes)
        except OSError:  # closed by the shell (`<&-`), or a terminal that is gone
            return b""
