"""A thread that writes to the terminal, so that a slow one never blocks an event loop.

Its queue is bounded: if the terminal is too slow, lines are dropped and counted. A file or a pipe
gets every line: the backlog of a slow reader waits on disk (`files.disk`).
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torchmuster.core.files.disk import Backlog, DiskWriter, PatientWriter
from torchmuster.core.model import events
from torchmuster.core.model.lines import HALF_LINE_S, LineJoiner, StatusBelow
from torchmuster.core.model.narration import ShownOutput, narrate
from torchmuster.core.model.text import as_bytes, printable, transfer_in
from torchmuster.core.plainfile import write_all

_MAX_WAITING_BYTES = 1 << 20
_OWN_WORDS_BYTES = 1 << 20  # so that a verdict fits after any flood


def every_line_streams() -> tuple[int, ...]:
    """Return our standard streams that are not terminals, where every line has to arrive."""
    return tuple(fd for fd in (1, 2) if not os.isatty(fd))


@dataclass(slots=True)
class TerminalVoice:
    """Prints on this process's standard streams, from a thread.

    Attributes:
        prefix_always: Several ranks will print, so each line gets a prefix.
        shown: The output shown so far.
    """

    prefix_always: bool = False
    shown: ShownOutput = field(default_factory=ShownOutput)
    _writers: dict[int, PatientWriter] = field(default_factory=dict)
    _joiner: LineJoiner = field(default_factory=LineJoiner)
    _queue: deque[tuple[int, bytes]] = field(default_factory=deque)
    _waiting_bytes: int = 0
    _lost_lines: int = 0
    _why_lost: str = ""
    _shown_transfers: set[str] = field(default_factory=set)
    _busy: bool = False
    _halves_due: float | None = None  # when waiting half lines are shown
    _status: StatusBelow = field(init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._status = StatusBelow(self._joiner)

    def start(self) -> None:
        """Start the thread."""
        self._joiner.prefix_always = self.prefix_always
        threading.Thread(target=self._work, name="terminal", daemon=True).start()

    def write_every_line(self, path: Callable[[], str], disk: DiskWriter) -> None:
        """Write every line to those standard streams that are not terminals.

        Args:
            path: Returns the path of a file for the backlog of a slow reader.
            disk: Writes that file.
        """
        streams = every_line_streams()
        is_one = streams == (1, 2) and _is_one_file()
        for fd in streams:
            if fd == 2 and is_one:
                self._writers[fd] = self._writers[1]  # one queue keeps their order
                continue
            backlog = Backlog(partial(_named, path, fd), disk)
            writer = self._writers[fd] = PatientWriter(fd, backlog, self.lose)
            if fd == 1 and not is_one:
                writer.waits = partial(self.say, "waiting for the reader of standard output")
            writer.start()
        self._joiner.whole, self._joiner.is_apart = frozenset(streams), 1 in streams and not is_one

    def lose(self, lines: int, why: str) -> None:
        """Count lines that could not be written."""
        with self._changed:
            self._lost_lines, self._why_lost = self._lost_lines + lines, why

    def name_rank(self, rank: int, name: str) -> None:
        """Use this name instead of `rank N` in the prefix of a rank."""
        self._joiner.names[rank] = name

    def prefix_rank(self, rank: int, prefix: str) -> None:
        """Use this text instead of `[rank N] ` as the prefix of a rank."""
        self._joiner.prefixes[rank] = prefix

    def say(self, sentence: str) -> None:
        """Print a sentence on its own line on standard error.

        Progress of a transfer is repeated only on a terminal; elsewhere only its first report is
        printed.
        """
        moved = transfer_in(sentence)
        if moved is not None and not os.isatty(2):
            if moved in self._shown_transfers:
                return
            self._shown_transfers.add(moved)
        self.print("".join(f"muster: {line}\n" for line in printable(sentence).splitlines()))

    def explain(self, sentence: str) -> None:
        """Print a sentence even where others are left out: why something takes longer."""
        TerminalVoice.say(self, sentence)

    def tell(self, event: events.RecordEvent) -> None:
        """Print the sentence for an event of the run, if any."""
        with self._changed:
            if isinstance(event, events.AttemptStartedEvent):
                self.shown.begin_attempt()
            if isinstance(event, events.NoticeEvent) and event.logs_lost_lines:
                self._joiner.lacks_logs = True
            sentence = narrate(event, self.shown)
        if sentence is not None:
            self.explain(sentence)

    def show(self, rank: int, stream: int, text: str, left_out: int) -> None:
        """Print a rank's output on the same stream."""
        with self._changed:
            new = self.shown.filter(rank, stream, text)
            if new or left_out:
                self._put_all(self._joiner.add(rank, stream, new, left_out))
            if self._joiner.waits and (self._halves_due is None or stream in self._writers):
                self._halves_due = time.monotonic() + HALF_LINE_S
                self._changed.notify_all()

    def print(self, text: str) -> None:
        """Print text unchanged on standard error."""
        with self._changed:
            self._put_all(self._joiner.interject())
            self._put(2, text, _OWN_WORDS_BYTES)

    def show_status(self, rows: Sequence[str]) -> None:
        """Keep these rows below the output until replaced; they are hidden at a prompt.

        Standard error has to be a terminal that understands cursor movements.
        """
        with self._changed:
            self._status.wanted = tuple(rows)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Print the remaining unfinished lines, remove the status rows, and wait for the terminal.

        A file or a pipe has no timeout: wait until all is written or its reader has gone.
        """
        with self._changed:
            self._status.wanted = ()
            self._changed.notify_all()  # the thread may sleep after redrawing rows
            for rank, number, text in self.shown.rest():
                self._put_all(self._joiner.add(rank, number, text))
            self._put_all(self._joiner.rest())
            self._say_what_was_lost()
            self._changed.wait_for(self._is_done, timeout_s)
        for writer in self._writers.values():
            writer.flush()

    def _is_done(self) -> bool:
        return not self._queue and not self._busy and not self._status.is_drawn

    def _put_all(self, pieces: list[tuple[int, str]]) -> None:
        for stream, text in pieces:
            self._put(stream, text)

    def _put(self, stream: int, text: str, more_bytes: int = 0) -> None:
        data = as_bytes(text)
        with self._changed:
            is_full = self._waiting_bytes + len(data) > _MAX_WAITING_BYTES + more_bytes
            if is_full and stream not in self._writers:
                self.lose(text.count("\n") or 1, "this terminal is slow")
                return
            self._say_what_was_lost()
            self._queue_bytes(stream, data)

    def _say_what_was_lost(self) -> None:
        if self._lost_lines:
            mark = f"\nmuster: {self._lost_lines} lines were not shown: {self._why_lost}\n"
            self._lost_lines = 0
            self._queue_bytes(2, mark.encode())

    def _queue_bytes(self, stream: int, data: bytes) -> None:
        if stream in self._writers:
            self._writers[stream].put(data)
            return
        self._queue.append((stream, data))
        self._waiting_bytes += len(data)
        self._changed.notify_all()

    def _work(self) -> None:
        status = self._status
        gone: set[int] = set()
        while True:
            with self._changed:
                stream, data = self._next()
                self._busy = True
                around = status.cover() if data else status.draw(may_draw=_is_in_foreground())
            for fd, piece in ((2, around.encode(errors="replace")), (stream, data)):
                try:
                    if piece and fd not in gone:
                        write_all(fd, piece)
                except OSError:  # the reader of our output has gone
                    gone.add(fd)
            with self._changed:
                self._waiting_bytes -= len(data)
                self._busy = False
                self._changed.notify_all()

    def _next(self) -> tuple[int, bytes]:
        """Wait for the next text; meanwhile show unfinished lines that have waited long enough.

        An empty text means that the status has to be drawn.
        """
        while True:
            wait_s = None
            if self._halves_due is not None:
                wait_s = self._halves_due - time.monotonic()
                if wait_s <= 0:
                    self._halves_due = wait_s = None
                    self._put_all(self._joiner.show_halves())
            if self._queue:
                return self._queue.popleft()
            if self._status.is_due(may_draw=_is_in_foreground()):
                return 2, b""
            self._changed.wait(wait_s)


class BriefVoice(TerminalVoice):
    """A voice that omits the usual sentences about a run and its stop, which the user expects."""

    def say(self, sentence: str) -> None:
        """Say nothing."""

    def tell(self, event: events.RecordEvent) -> None:
        """Print the sentence for an event, unless it is a stop."""
        if not isinstance(event, events.StoppingEvent):
            super().tell(event)


def _named(path: Callable[[], str], fd: int) -> str:
    return f"{path()}-{fd}"


def _is_one_file() -> bool:
    """Say whether standard output and error are the same file, as with `2>&1`."""
    try:
        return os.path.sameopenfile(1, 2)
    except OSError:  # one is closed
        return False


def _is_in_foreground() -> bool:
    """Say whether the terminal is ours: nothing of ours may appear below a shell's prompt."""
    try:
        return os.tcgetpgrp(2) == os.getpgrp()
    except OSError:
        return False
