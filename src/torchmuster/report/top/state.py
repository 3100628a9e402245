"""The state of the live view, and what each key does to it; without I/O."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchmuster.core.model.text import printable
from torchmuster.launcher.model.live import LiveAttempt, LiveTask
from torchmuster.launcher.ui.ranks import SORTS


class Page(enum.Enum):
    """What fills the screen."""

    OVERVIEW = "all runs"
    RUN = "a run"
    ATTEMPTS = "its attempts"
    TEXT = "a log, or stacks"
    HELP = "the keys"


@dataclass(frozen=True, slots=True)
class OpenRun:
    """Open a run; None: the list of all runs."""

    run_id: str | None


@dataclass(frozen=True, slots=True)
class ShowLog:
    """Follow the log of a rank; if `attempt` is None, in the newest attempt."""

    rank: int
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class ShowFile:
    """Follow another log."""

    path: str


@dataclass(frozen=True, slots=True)
class ShowStacks:
    """Ask for the stacks of all ranks, and show that of `rank` first."""

    rank: int | None


@dataclass(frozen=True, slots=True)
class CancelRun:
    """Stop the run."""


@dataclass(frozen=True, slots=True)
class Leave:
    """End the program."""


Order = OpenRun | ShowLog | ShowFile | ShowStacks | CancelRun | Leave


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewState:
    """The state of the live view.

    Attributes:
        came_from: The page that Escape returns to.
        is_alone: Whether the view was started for one run, without the list of runs.
        run_id: The open run.
        chosen_run: The selected run in the list.
        chosen_rank: The selected rank in the table; None: none yet.
        chosen_row: The selected task of a workflow, member of a sweep, or attempt.
        parents: The ids or folders of the workflows or sweeps that the open run is part of.
        log: The attempt and the rank whose log is shown; None for another text.
        first: The first row that is shown; -1 for the end of a text.
        word: The filter.
        typed: The filter while it is being typed, otherwise None.
        sort: The column that ranks are sorted by.
        asked: How often the user has confirmed to cancel; None if there is no such question.
        message: A message in the last line.
        title: The title of the text.
    """

    page: Page = Page.OVERVIEW
    came_from: Page = Page.OVERVIEW
    is_alone: bool = False
    run_id: str | None = None
    chosen_run: str | None = None
    chosen_rank: int | None = None
    chosen_row: int = 0
    parents: tuple[str, ...] = ()
    log: tuple[int | None, int] | None = None
    first: int = 0
    word: str = ""
    typed: str | None = None
    sort: str = "rank"
    asked: int | None = None
    message: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnScreen:
    """What the screen shows now, which keys refer to.

    Attributes:
        runs: The ids of all runs in the list, in its order.
        ranks: All ranks in the table that match the filter, in its order.
        tasks: All tasks or members of the run.
        attempts: All attempts in the order of their list, if that is on the screen.
        num_ranks: The number of ranks in the attempt whose log is shown.
        num_rows: The number of rows that fit.
        num_lines: The number of lines of the whole text.
        is_over: Whether the run has ended, so that it can't be cancelled.
    """

    runs: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    tasks: tuple[LiveTask, ...] = ()
    attempts: tuple[LiveAttempt, ...] = ()
    num_ranks: int = 0
    num_rows: int = 1
    num_lines: int = 0
    is_over: bool = False


def press(state: ViewState, key: str, shown: OnScreen) -> tuple[ViewState, Order | None]:
    """Return the state after a key, and the order to carry out, if any.

    Args:
        state: The state before the key.
        key: A character, or a key name from `report/top/painter.py`.
        shown: What is on the screen.
    """
    quiet = replace(state, message="")
    if key == "ctrl-c":
        return quiet, Leave()
    if state.typed is not None:
        return _type(quiet, state.typed, key), None
    if state.asked is not None:
        return _answer(quiet, state.asked, key)
    if key in _MOVES:
        return _move(quiet, key, shown), None
    if key in ("q", "escape", "left", "backspace"):
        return _back(quiet, key)
    if key in ("?", "h") and state.page is not Page.HELP:
        return replace(quiet, page=Page.HELP, came_from=state.page, first=0), None
    if state.page is Page.OVERVIEW:
        run_id = state.chosen_run or next(iter(shown.runs), None)
        if key in ("enter", "right") and run_id is not None:
            return _opened(quiet, run_id, ()), OpenRun(run_id)
        return quiet, None
    if state.page is Page.ATTEMPTS:
        return _of_attempts(quiet, key, shown)
    if state.page is Page.TEXT:
        return _of_log(quiet, key, shown)
    if state.page is Page.RUN and shown.tasks and key in ("enter", "right", "l"):
        return _of_task(quiet, key, shown)
    return _of_run(quiet, key, shown)


def _opened(state: ViewState, run_id: str, parents: tuple[str, ...]) -> ViewState:
    """Return the view of a run, from its top."""
    return replace(
        state,
        page=Page.RUN,
        run_id=run_id,
        parents=parents,
        first=0,
        chosen_rank=None,
        chosen_row=0,
        word="",
    )


def _of_task(state: ViewState, key: str, shown: OnScreen) -> tuple[ViewState, Order | None]:
    """Open the run of a task or member, or its log if it has no run, such as a command."""
    task = shown.tasks[min(state.chosen_row, len(shown.tasks) - 1)]
    if task.folder and key != "l":
        return _opened(state, task.folder, (*state.parents, state.run_id or "")), OpenRun(
            task.folder
        )
    title = f"log of {task.group} {task.name}"
    text = replace(state, page=Page.TEXT, came_from=Page.RUN, first=-1, log=None, title=title)
    return text, ShowFile(task.log)


def _of_attempts(state: ViewState, key: str, shown: OnScreen) -> tuple[ViewState, Order | None]:
    """Open the log of an attempt: that of the rank that ended it, or of the selected one."""
    if key not in ("enter", "right", "l") or not shown.attempts:
        return state, None
    one = shown.attempts[min(state.chosen_row, len(shown.attempts) - 1)]
    rank = one.cause_rank if one.cause_rank is not None else state.chosen_rank
    return _show_log(state, one.number, rank if rank is not None and rank >= 0 else 0)


def _of_log(state: ViewState, key: str, shown: OnScreen) -> tuple[ViewState, Order | None]:
    """Switch to the log of the next rank, or of the previous one."""
    if state.log is None or key not in ("n", "p") or not shown.num_ranks:
        return state, None
    attempt, rank = state.log
    following = (rank + (1 if key == "n" else -1)) % shown.num_ranks
    return _show_log(state, attempt, following)


def _show_log(state: ViewState, attempt: int | None, rank: int) -> tuple[ViewState, Order | None]:
    came_from = state.came_from if state.page is Page.TEXT else state.page
    of_attempt = f" in attempt {attempt}" if attempt is not None else ""
    text = replace(state, page=Page.TEXT, came_from=came_from, first=-1, log=(attempt, rank))
    return replace(text, title=f"log of rank {rank}{of_attempt}"), ShowLog(rank, attempt)


_MOVES = frozenset({"up", "down", "k", "j", "page-up", "page-down", "home", "end", "g", "G", " "})


def _of_run(state: ViewState, key: str, shown: OnScreen) -> tuple[ViewState, Order | None]:
    if state.page is not Page.RUN:
        return state, None
    rank = state.chosen_rank if state.chosen_rank is not None else next(iter(shown.ranks), None)
    match key:
        case "l" | "enter" if rank is not None:
            return _show_log(state, None, rank)
        case "s":
            text = replace(state, page=Page.TEXT, came_from=Page.RUN, first=0, log=None)
            return replace(text, title="stacks"), ShowStacks(rank)
        case "a":
            listed = replace(state, page=Page.ATTEMPTS, came_from=Page.RUN, first=0, chosen_row=0)
            return listed, None
        case "c" if shown.is_over:
            return replace(state, message="the run has ended"), None
        case "c":
            return replace(state, asked=0), None
        case "f" | "/":
            return replace(state, typed=state.word), None
        case "o":
            following = SORTS[(SORTS.index(state.sort) + 1) % len(SORTS)]
            return replace(state, sort=following, first=0, chosen_rank=None), None
    return state, None


def _type(state: ViewState, typed: str, key: str) -> ViewState:
    if key == "enter":
        return replace(state, word=typed, typed=None, first=0, chosen_rank=None)
    if key == "escape":
        return replace(state, word="", typed=None, first=0)
    if key == "backspace":
        return replace(state, typed=typed[:-1])
    if len(key) == 1 and printable(key) == key and len(typed) < 40:
        return replace(state, typed=typed + key)
    return state


def _answer(state: ViewState, asked: int, key: str) -> tuple[ViewState, Order | None]:
    if key not in ("y", "Y"):
        return replace(state, asked=None, message="not cancelled"), None
    if asked == 0:
        return replace(state, asked=1), None
    return replace(state, asked=None, message="cancelling: its workers get SIGTERM"), CancelRun()


def _back(state: ViewState, key: str) -> tuple[ViewState, Order | None]:
    if state.page is Page.RUN and state.word and key == "escape":
        return replace(state, word="", first=0), None
    if state.page is Page.RUN and state.parents:
        *above, parent = state.parents
        return _opened(state, parent, tuple(above)), OpenRun(parent)
    if state.page is Page.RUN and not state.is_alone:
        return replace(state, page=Page.OVERVIEW, run_id=None, word="", first=0), OpenRun(None)
    if state.page in (Page.OVERVIEW, Page.RUN):
        return state, Leave() if key == "q" else None
    if state.page is Page.TEXT and state.came_from is Page.ATTEMPTS:
        return replace(state, page=Page.ATTEMPTS, came_from=Page.RUN, first=0), None
    return replace(state, page=state.came_from, first=0), None


def _move(state: ViewState, key: str, shown: OnScreen) -> ViewState:
    if state.page is Page.OVERVIEW:
        at = _moved(_index(shown.runs, state.chosen_run), key, len(shown.runs), shown.num_rows)
        chosen = shown.runs[at] if shown.runs else None
        return replace(state, chosen_run=chosen, first=_scrolled(state.first, at, shown.num_rows))
    rows = shown.tasks if state.page is Page.RUN else shown.attempts
    if rows and state.page in (Page.RUN, Page.ATTEMPTS):
        at = _moved(min(state.chosen_row, len(rows) - 1), key, len(rows), shown.num_rows)
        return replace(state, chosen_row=at, first=_scrolled(state.first, at, shown.num_rows))
    if state.page is Page.RUN:
        if not shown.ranks:
            return state
        at = _moved(_index(shown.ranks, state.chosen_rank), key, len(shown.ranks), shown.num_rows)
        first = _scrolled(state.first, at, shown.num_rows)
        return replace(state, chosen_rank=shown.ranks[at], first=first)
    last = max(shown.num_lines - shown.num_rows, 0)
    first = last if state.first < 0 else min(state.first, last)
    by = {"up": -1, "k": -1, "down": 1, "j": 1, "page-up": -shown.num_rows}
    if key in ("home", "g"):
        return replace(state, first=0)
    to = first + by.get(key, shown.num_rows)
    if key in ("end", "G") or (to >= last and state.page is Page.TEXT):
        return replace(state, first=-1 if state.page is Page.TEXT else last)
    return replace(state, first=min(max(to, 0), last))


def _index(known: Sequence[object], chosen: object) -> int:
    return known.index(chosen) if chosen in known else -1


def _moved(at: int, key: str, num: int, num_rows: int) -> int:
    to = {
        "up": at - 1,
        "k": at - 1,
        "down": at + 1,
        "j": at + 1,
        "page-up": at - num_rows,
        "home": 0,
        "g": 0,
        "end": num - 1,
        "G": num - 1,
    }.get(key, at + num_rows)
    return min(max(to, 0), max(num - 1, 0))


def _scrolled(first: int, at: int, num_rows: int) -> int:
    """Return the first row to show, so that the row `at` is visible."""
    return max(min(max(first, 0), at), at - num_rows + 1)
