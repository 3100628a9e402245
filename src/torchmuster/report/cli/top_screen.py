"""`muster top` on a terminal: painted frames, and the loop; all that may block is in threads.

Only changed lines are sent, so that a slow connection is enough. The colours are those of Okabe and
Ito, which people with any colour vision can distinguish, as close as the terminal can show them;
rich detects that and honours NO_COLOR. No information is in the colour alone.
"""

import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Generic, TypeVar

from rich.console import Console
from rich.style import Style
from rich.text import Text

from torchmuster.core.files.layout import last_lines
from torchmuster.core.owner.record import DAMAGED, unreadable
from torchmuster.core.plainfile import write_all
from torchmuster.errors import MusterError
from torchmuster.launcher.head.hang_watch import rank_first
from torchmuster.launcher.model.live import LiveRow, LiveRun
from torchmuster.launcher.ui.table import Line
from torchmuster.launcher.views.elsewhere import copied, is_elsewhere
from torchmuster.launcher.views.execute import RawTerminal
from torchmuster.launcher.views.find import find_run
from torchmuster.launcher.views.live import LiveReader
from torchmuster.launcher.views.run_view import RunView
from torchmuster.report import top
from torchmuster.report.live_list import ListReader

if TYPE_CHECKING:
    from torchmuster.launcher.model.progress import RankSample
    from torchmuster.launcher.views.head_call import BoardWatch

# From the bytes of a terminal to the names of keys.


_NAMES = {
    "A": "up",
    "B": "down",
    "C": "right",
    "D": "left",
    "H": "home",
    "F": "end",
    "5~": "page-up",
    "6~": "page-down",
    "1~": "home",
    "4~": "end",
    "7~": "home",
    "8~": "end",
}
_CONTROL = {
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x03": "ctrl-c",
    "\x1b": "escape",
}
# Source: ECMA-48 5.4: parameters, intermediate bytes, one final byte; in application mode, cursor
# keys are `ESC O x`.
_SEQUENCE = re.compile(r"\x1b(?:\[|O)([0-?]*[ -/]*[@-~])")


def read_keys(data: bytes) -> list[str]:
    """Return the keys in a terminal's input; leave out sequences that have no name here."""
    text, keys, at = data.decode(errors="ignore"), [], 0
    while at < len(text):
        found = _SEQUENCE.match(text, at)
        if found is not None:
            name = _NAMES.get(found[1])
            keys += [name] if name is not None else []
            at = found.end()
            continue
        key = _CONTROL.get(text[at], text[at])
        keys += [key] if len(key) > 1 or key.isprintable() else []
        at += 1
    return keys


_STYLES = {
    "bold": Style(bold=True),
    "dim": Style(dim=True),
    "title": Style(bold=True, underline=True),
    "chosen": Style(reverse=True),
    "warn": Style(color="#E69F00", bold=True),
    "bad": Style(color="#D55E00", bold=True),
    "good": Style(color="#56B4E9", bold=True),
}
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[0m\x1b[?25h\x1b[?1049l"


def as_rich(one: Line, columns: int) -> Text:
    """Return a line as rich text, cut at the edge of the screen."""
    text = Text(no_wrap=True)
    for span in one.spans:
        text.append(span.text, _STYLES.get(span.style))
    text.truncate(columns, overflow="crop")
    return text


class Painter:
    """Paints one terminal.

    Args:
        write: Sends text to the terminal.
        console: The rich console that knows what the terminal can show.
    """

    def __init__(self, write: Callable[[str], None], console: Console | None = None) -> None:
        self._write = write
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._before: list[str] = []
        self._size = (0, 0)

    @property
    def has_unicode(self) -> bool:
        """Return whether the terminal can show more than ASCII."""
        return self._console.encoding.lower().startswith("utf")

    def enter(self) -> None:
        """Switch to the terminal's alternate screen; `leave` restores the normal one."""
        self._write(_ENTER)

    def leave(self) -> None:
        """Switch back to the normal screen."""
        self._write(_LEAVE)

    def paint(self, lines: Sequence[Line], columns: int) -> None:
        """Show these lines, cut at the edge of the screen."""
        if self._size != (columns, len(lines)):
            self._size, self._before = (columns, len(lines)), []
            self._write("\x1b[2J")
        now = [self._as_text(one, columns) for one in lines]
        changed = [
            f"\x1b[{row + 1};1H{text}\x1b[0m\x1b[K"
            for row, text in enumerate(now)
            if row >= len(self._before) or self._before[row] != text
        ]
        self._before = now
        if changed:
            self._write("".join(changed))

    def _as_text(self, one: Line, columns: int) -> str:
        text = as_rich(one, columns)
        text.end = ""
        if not self.has_unicode:
            text.plain = text.plain.encode("ascii", "replace").decode()
        with self._console.capture() as captured:
            self._console.print(text, end="", soft_wrap=True, markup=False)
        return captured.get()


# The loop: it reads keys and paints.


_TICK_S = 0.1
_READ_EVERY_S = 1.0
_LIST_EVERY_S = 3.0  # less often, because it reads all runs
_FIRST_S = 0.15  # how long the first frame waits for data
_LOG_LINES, _LOG_BYTES = 2000, 256 << 10
_TAIL_LINES = 40
T = TypeVar("T")


class _Feed(Generic[T]):
    """Calls a reader repeatedly in a thread; keeps its newest value, and its error as text."""

    def __init__(self, read: Callable[[], T], every_s: float | None = _READ_EVERY_S) -> None:
        self._read, self._every_s = read, every_s
        self.value: T | None = None
        self.problem = ""
        self._first, self._ends = threading.Event(), threading.Event()
        threading.Thread(target=self._work, name="feed", daemon=True).start()

    def wait(self, timeout_s: float) -> None:
        """Wait for the first value."""
        self._first.wait(timeout_s)

    def close(self) -> None:
        """Stop reading."""
        self._ends.set()

    def _work(self) -> None:
        while not self._ends.is_set():
            try:
                self.value, self.problem = self._read(), ""
            except MusterError as error:
                self.problem = f"{error.what}: {error.why}" if error.why else error.what
            except OSError as error:
                self.problem = error.strerror or str(error)
            except DAMAGED as error:  # of another version
                self.problem = unreadable(error)
            self._first.set()
            if self._every_s is None:
                return
            self._ends.wait(self._every_s)


class _Viewer:
    """The live view on one terminal: its state, and the threads that read for it."""

    def __init__(self, view: RunView | None) -> None:
        self.state = top.ViewState()
        self._stack = ExitStack()
        self._runs: _Feed[Sequence[LiveRow]] | None = None
        self._run: _Feed[LiveRun] | None = None
        self._text: _Feed[list[str]] | None = None
        self._tail: _Feed[tuple[int, list[str]]] | None = None
        self._acts: _Feed[str] | None = None
        self._view: RunView | None = None
        self._watch: BoardWatch | None = None
        self._is_called = True
        if view is None:
            self._list()
        else:
            self.state = top.ViewState(page=top.Page.RUN, is_alone=True, run_id=view.run_id)
            self._open(view)

    def wait(self, timeout_s: float) -> None:
        """Wait for the first data."""
        feed = self._run or self._runs
        if feed is not None:
            feed.wait(timeout_s)

    def known(self) -> top.Known:
        """Return what has been read."""
        problem = next((f.problem for f in (self._run, self._runs) if f and f.problem), "")
        if problem and not self.state.message:
            self.state = replace(self.state, message=problem)
        text = self._text
        return top.Known(
            runs=self._runs.value if self._runs is not None else None,
            run=self._run.value if self._run is not None else None,
            text=([text.problem] if text.problem else text.value) if text is not None else None,
            tail=self._tail.value if self._tail is not None else None,
        )

    def show_outcome(self) -> None:
        """Show the outcome of a cancel order, once it is known."""
        acts = self._acts
        if acts is not None and (acts.value or acts.problem):
            self.state = replace(self.state, message=acts.problem or acts.value or "")
            self._acts = None

    def take(self, key: str, shown: top.OnScreen) -> bool:
        """Handle a key; return whether the program continues."""
        self.state, order = top.press(self.state, key, shown)
        if self._text is not None and self.state.page is not top.Page.TEXT:
            self._text.close()
            self._text = None
        return order is None or self._carry_out(order)

    def close(self) -> None:
        """End all threads."""
        for feed in (self._runs, self._run, self._text, self._tail):
            if feed is not None:
                feed.close()
        self._stack.close()

    def _carry_out(self, order: top.Order) -> bool:
        match order:
            case top.Leave():
                return False
            case top.OpenRun(run_id=None):
                self._list()
            case top.OpenRun(run_id=str(run_id)):
                self._open_word(run_id)
            case top.ShowLog(rank=rank, attempt=attempt):
                self._show(_Feed(lambda: self._log(rank, attempt)))
            case top.ShowFile(path=path):
                self._show(_Feed(lambda: _end_of(path)))
            case top.ShowStacks(rank=first):
                self._show(_Feed(lambda: self._stacks(first), every_s=None))
            case top.CancelRun():
                self._acts = _Feed(self._cancel, every_s=None)
        return True

    def _show(self, text: _Feed[list[str]]) -> None:
        if self._text is not None:
            self._text.close()
        self._text = text

    def _list(self) -> None:
        self._close_run()
        self._runs = self._runs or _Feed(ListReader().read, _LIST_EVERY_S)

    def _open_word(self, run_id: str) -> None:
        try:
            self._open(find_run(run_id))
        except MusterError as error:
            self.state = replace(self.state, page=top.Page.OVERVIEW, message=error.what)

    def _open(self, view: RunView) -> None:
        self._close_run()
        self._view = view
        self._is_called = view.state.is_final or not view.has_ranks
        self._run = _Feed(LiveReader(view.run_dir, self._board).read)
        self._tail = _Feed(self._read_tail) if view.has_ranks else None

    def _board(self) -> "tuple[RankSample | None, str]":
        return self._watch.newest() if self._watch is not None else (None, "")

    def call_head(self) -> None:
        """Start asking the open run's head; after the first frame, which needs only files."""
        view = self._view
        if self._is_called or view is None or self._run is None:
            return
        from torchmuster.launcher.views.head_call import BoardWatch

        self._is_called = True
        if is_elsewhere(view.run_dir):
            self._stack.enter_context(copied(view.run_dir))
        self._watch = BoardWatch(view)
        self._watch.start()
        self._stack.callback(self._watch.close)

    def _close_run(self) -> None:
        for feed in (self._run, self._tail):
            if feed is not None:
                feed.close()
        self._run = self._tail = None
        self._watch = None
        self._stack.close()

    # Orders.

    def _read_tail(self) -> tuple[int, list[str]]:
        rank = self.state.chosen_rank or 0
        path = self._path_of_log(rank, None)
        return rank, last_lines(path, _TAIL_LINES) if path is not None else []

    def _log(self, rank: int, attempt: int | None) -> list[str]:
        path = self._path_of_log(rank, attempt)
        return _end_of(path) if path is not None else ["no attempt has started"]

    def _path_of_log(self, rank: int, attempt: int | None) -> str | None:
        """Return where the log of a rank is, of the newest attempt if None; None before the first."""
        run = self._run.value if self._run is not None else None
        if self._view is None or run is None or not run.attempts:
            return None
        number = attempt if attempt is not None else run.attempts[-1].number
        return self._view.run_dir.rank_log(number, rank)

    def _stacks(self, rank: int | None) -> list[str]:
        import asyncio

        from torchmuster.launcher.views.execute import ask_stacks

        if self._view is None:
            return []
        found = asyncio.run(ask_stacks(self._view))
        lines = found.lines if rank is None else rank_first(found.lines, rank)
        return [found.sentence, "", *lines]

    def _cancel(self) -> str:
        import asyncio

        from torchmuster.launcher.views.control import send_stop

        if self._view is None:
            return ""
        asyncio.run(send_stop(self._view, int(signal.SIGTERM), at_once=False))
        return "cancelled: its workers have got SIGTERM"


def _end_of(path: str) -> list[str]:
    lines = last_lines(path, _LOG_LINES, _LOG_BYTES)
    return lines or [f"it has written nothing yet: {path}"]


def show(view: RunView | None) -> int:
    """Show a run, or all runs, until the user leaves; return the exit code."""

    def end(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)  # so that the terminal is restored

    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, end)
    sys.stdout.flush()
    painter = Painter(lambda text: write_all(1, text.encode(errors="replace")))
    viewer = _Viewer(view)
    viewer.wait(_FIRST_S)
    with RawTerminal(0) as terminal:
        painter.enter()
        try:
            _loop(viewer, painter, terminal)
        finally:
            viewer.close()
            painter.leave()
    return 0


def _loop(viewer: _Viewer, painter: Painter, terminal: RawTerminal) -> None:
    painted, frame = None, None
    while True:
        rows, columns = terminal.size()
        viewer.show_outcome()
        known = viewer.known()
        if frame is None or (viewer.state, known, rows, columns) != painted:
            painted = (viewer.state, known, rows, columns)
            frame = top.draw(viewer.state, known, columns, rows, unicode=painter.has_unicode)
            painter.paint(frame.lines, columns)
        viewer.call_head()
        if not select.select([0], [], [], _TICK_S)[0]:
            continue
        data = os.read(0, 1024)
        if not data:
            return  # the terminal has gone
        for key in read_keys(data):
            # Keys come faster than frames: each refers to the screen after the keys before it.
            now = top.draw(viewer.state, known, columns, rows)
            if not viewer.take(key, now.shown):
                return
