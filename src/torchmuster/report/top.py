"""The live view of runs (`muster top`): its state, what each key does to it, and its frames; without I/O."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchmuster.core.files.layout import short_id
from torchmuster.core.model.text import in_one_line, printable, span
from torchmuster.launcher.model.live import LiveAttempt, LiveRow, LiveRun, LiveTask
from torchmuster.launcher.ui import run_lines
from torchmuster.launcher.ui.ranks import SORTS, choose, rank_rows
from torchmuster.launcher.ui.table import DASH, Line, Span, line


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
        key: A character, or a key name from `report/cli/top_screen.py`.
        shown: What is on the screen.
    """
    quiet = replace(state, message="")
    if key == "ctrl-c":
        return quiet, Leave()
    if state.typed is not None:
        return _type(quiet, state.typed, key), None
    if state.asked is not None:
        return _answer(quiet, state.asked, key)
    move = _MOVES.get(key)
    if move is not None:
        return _move(quiet, move, shown), None
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
        parents = (*state.parents, state.run_id or "")
        return _opened(state, task.folder, parents), OpenRun(task.folder)
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


_MOVES = {
    **{name: name for name in ("up", "down", "page-up", "page-down", "home", "end")},
    "k": "up",
    "j": "down",
    " ": "page-down",
    "g": "home",
    "G": "end",
}


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
    by = {"up": -1, "down": 1, "page-up": -shown.num_rows}
    if key == "home":
        return replace(state, first=0)
    to = first + by.get(key, shown.num_rows)
    if key == "end" or (to >= last and state.page is Page.TEXT):
        return replace(state, first=-1 if state.page is Page.TEXT else last)
    return replace(state, first=min(max(to, 0), last))


def _index(known: Sequence[object], chosen: object) -> int:
    return known.index(chosen) if chosen in known else -1


def _moved(at: int, key: str, num: int, num_rows: int) -> int:
    to = {
        "up": at - 1,
        "down": at + 1,
        "page-up": at - num_rows,
        "home": 0,
        "end": num - 1,
    }.get(key, at + num_rows)
    return min(max(to, 0), max(num - 1, 0))


def _scrolled(first: int, at: int, num_rows: int) -> int:
    """Return the first row to show, so that the row `at` is visible."""
    return max(min(max(first, 0), at), at - num_rows + 1)


# The frames: as many lines as the screen has rows.


# The overview: a line for each live or queued run.


HEADER = ("RUN", "STATE", "ON", "RANKS", "STEP", "LEFT", "TIME", "")
_RIGHT = frozenset({"RANKS", "STEP", "LEFT", "TIME"})
_MOST = (24, 11, 14, 5, 10, 10, 10)


def overview_lines(rows: Sequence[LiveRow], columns: int, chosen: str | None = None) -> list[Line]:
    """Return the header and a line for each run.

    Args:
        rows: The runs.
        columns: The width of the terminal.
        chosen: The id of the selected run.
    """
    table = [HEADER, *(_cells(row) for row in rows)]
    widths = [min(max(len(row[at]) for row in table), most) for at, most in enumerate(_MOST)]
    lines = []
    for number, row in enumerate(table):
        cells = [
            _fit(text, width).rjust(width) if name in _RIGHT else _fit(text, width).ljust(width)
            for name, text, width in zip(HEADER, row, widths, strict=False)
        ]
        is_chosen = number > 0 and rows[number - 1].run_id == chosen
        mark = "> " if is_chosen else "  "
        style = "title" if number == 0 else "chosen" if is_chosen else ""
        lines.append(line(Span(f"{mark}{'  '.join(cells)}  {row[-1]}".rstrip()[:columns], style)))
    return lines


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}~"


def _cells(row: LiveRow) -> tuple[str, ...]:
    return (
        in_one_line(short_id(row.run_id)),
        row.state,
        in_one_line(row.place),
        str(row.num_workers) if row.num_workers is not None else DASH,
        str(row.step) if row.step is not None else DASH,
        span(row.left_s, whole=True),
        span(row.elapsed_s, whole=True),
        in_one_line(row.why),
    )


_LEAST_TABLE_ROWS = 5
_LEAST_TAIL_ROWS = 4
_HELP = (
    ("up down, page, home end", "choose a run or a rank; scroll"),
    ("enter", "open the run, the task, the member; the log of the rank"),
    ("l", "log of the rank"),
    ("s", "where the rank stands now, then all others"),
    ("a", "all attempts, and why they ended; enter: the log of the rank that ended one"),
    ("n, p", "in a log: that of the next rank, of the one before"),
    ("c", "cancel the run; asked twice"),
    ("f or /", "filter ranks: 3, 0-7, a node, what it does, slow; escape: all again"),
    ("o", "sort ranks by another column"),
    ("q, escape", "back; at the top q ends, the run goes on"),
    ("", ""),
    ("STEP, STEPS/S", "the last step and the speed of the last ten to twenty seconds"),
    ("AGE", "since the library's last sign; of other scripts, its agent's report"),
    ("CPU, MEM", "processors used and memory held by the rank and what it has started"),
    ("GPU, GPUMEM", "use and memory of its GPU, by NVIDIA's driver"),
    ("WAIT", "share of a step in which the rank waits for others: 0% is the slowest"),
    ("! +20ms", "the rank makes each step so much longer"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A frame, and what is on it that keys refer to."""

    lines: tuple[Line, ...]
    shown: OnScreen


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What has been read so far; None where nothing has.

    Attributes:
        runs: The list of runs.
        run: The open run.
        text: The lines of a log, or the stacks.
        tail: The rank whose log `last` ends, and these last lines; shown where there is room.
    """

    runs: Sequence[LiveRow] | None = None
    run: LiveRun | None = None
    text: Sequence[str] | None = None
    tail: tuple[int, Sequence[str]] | None = None


def draw(
    state: ViewState, known: Known, columns: int, num_rows: int, *, unicode: bool = True
) -> Picture:
    """Return the frame for a terminal of this size."""
    room = max(num_rows - 1, 1)  # the last line has the keys, a question or a message
    body, shown = _body(state, known, columns, room, unicode=unicode)
    body = [*body[:room], *[line()] * (room - len(body))]
    return Picture(lines=(*body, _last_line(state, known)), shown=shown)


def _body(
    state: ViewState, known: Known, columns: int, room: int, *, unicode: bool
) -> tuple[list[Line], OnScreen]:
    if state.page is Page.HELP:
        lines = [line(Span(name.ljust(24), "bold"), about) for name, about in _HELP]
        return _scroll(state, lines, room)
    if state.page is Page.OVERVIEW:
        return _overview(state, known.runs, columns, room)
    if known.run is None:
        return [line("reading the run ...")], OnScreen(num_rows=room)
    if state.page is Page.TEXT:
        texts = ["reading ..."] if known.text is None else known.text
        title = line(Span(f"{state.title} of {short_id(known.run.run_id)}", "title"))
        folded = [piece for text in texts for piece in _folded(in_one_line(text), columns)]
        lines, shown = _scroll(state, [line(piece) for piece in folded], room - 1)
        return [title, *lines], replace(shown, num_ranks=_num_ranks(known.run, state.log))
    if state.page is Page.ATTEMPTS:
        return _attempts(state, known.run, room)
    lines, shown = _run(state, known.run, columns, room, unicode=unicode)
    return [*lines, *_tail(known, columns, room - len(lines))], shown


def _attempts(state: ViewState, run: LiveRun, room: int) -> tuple[list[Line], OnScreen]:
    attempts = tuple(reversed(run.attempts))
    chosen = min(state.chosen_row, len(attempts) - 1)
    lines = [
        line("> " if at == chosen else "  ", *run_lines.attempt_line(one, run.now).spans)
        for at, one in enumerate(attempts)
    ]
    more = run.num_attempts - len(lines)
    lines += [line(f"and {more} before them: muster status has all")] if more else []
    shown, on_screen = _scroll(state, lines, room)
    return shown, replace(on_screen, attempts=attempts)


def _overview(
    state: ViewState, rows: Sequence[LiveRow] | None, columns: int, room: int
) -> tuple[list[Line], OnScreen]:
    if rows is None:
        return [line("reading the runs ...")], OnScreen(num_rows=room)
    if not rows:
        return [line("no runs yet: muster run train.py")], OnScreen(num_rows=room)
    ids = tuple(row.run_id for row in rows)
    chosen = state.chosen_run if state.chosen_run in ids else ids[0]
    lines = overview_lines(rows, columns, chosen)
    first = min(max(state.first, 0), max(len(rows) - room + 1, 0))
    return [lines[0], *lines[1 + first :]], OnScreen(runs=ids, num_rows=max(room - 1, 1))


def _run(
    state: ViewState, run: LiveRun, columns: int, room: int, *, unicode: bool
) -> tuple[list[Line], OnScreen]:
    rows = rank_rows(run.sample) if run.sample is not None else []
    kept = choose(rows, state.typed if state.typed is not None else state.word, state.sort)
    head = run_lines.head_lines(run, rows, columns, unicode=unicode)
    if run.training is not None and not run.tasks and run.training.curves:
        spare = room - len(head) - (len(kept) + 2 if rows else 0)
        if spare > 0:
            head = run_lines.head_lines(run, rows, columns, unicode=unicode, num_curves=1 + spare)
    if run.tasks:
        return _tasks(state, run, head, room)
    head = head[: max(room - _LEAST_TABLE_ROWS, 1) if rows else room]
    table_rows = max(room - len(head) - 2, 1)
    first = min(max(state.first, 0), max(len(kept) - table_rows, 0))
    chosen = state.chosen_rank
    if chosen is None and kept:
        chosen = kept[0].rank
    visible = kept[first : first + table_rows]
    table = run_lines.table_lines(visible, columns, chosen, unicode=unicode) if rows else []
    shown = OnScreen(
        ranks=tuple(row.rank for row in kept), num_rows=table_rows, is_over=run.is_final
    )
    note = _table_note(state, run, len(kept), len(rows), first, table_rows)
    return [*head, line(Span(note, "dim")), *table], shown


def _tail(known: Known, columns: int, room: int) -> list[Line]:
    """Return the last lines of a log, for the rows that nothing else needs."""
    if known.tail is None or room < _LEAST_TAIL_ROWS or not known.tail[1]:
        return []
    rank, texts = known.tail
    pieces = [in_one_line(text)[:columns] for text in texts][-(room - 2) :]
    return [line(), line(Span(f"log of rank {rank}", "title")), *map(line, pieces)]


def _tasks(
    state: ViewState, run: LiveRun, head: list[Line], room: int
) -> tuple[list[Line], OnScreen]:
    head = head[: max(room - _LEAST_TABLE_ROWS, 1)]
    title, *rows = run_lines.task_lines(run, min(state.chosen_row, len(run.tasks) - 1))
    table_rows = max(room - len(head) - 2, 1)
    first = min(max(state.first, 0), max(len(rows) - table_rows, 0))
    shown = OnScreen(tasks=run.tasks, num_rows=table_rows, is_over=run.is_final)
    return [*head, line(), title, *rows[first : first + table_rows]], shown


def _table_note(
    state: ViewState, run: LiveRun, num_kept: int, num_all: int, first: int, room: int
) -> str:
    parts = []
    if num_kept < num_all:
        parts.append(f"{num_kept} of {num_all} ranks: {state.word or state.typed or ''}")
    if num_kept > room:
        parts.append(f"rows {first + 1}-{min(first + room, num_kept)} of {num_kept}")
    if state.sort != "rank":
        parts.append(f"by {state.sort}")
    parts += [note] if (note := run_lines.stale_note(run)) else []
    return "; ".join(parts)


def _num_ranks(run: LiveRun, log: tuple[int | None, int] | None) -> int:
    """Return the number of ranks in the attempt whose log is shown, or in the newest one."""
    of_log = [one for one in run.attempts if log is not None and one.number == log[0]]
    attempts = of_log or run.attempts[-1:]
    return attempts[0].num_workers if attempts else 0


def _folded(text: str, columns: int) -> list[str]:
    """Return a line of a log, wrapped to the width of the screen."""
    return [text[at : at + columns] for at in range(0, len(text), columns)] or [""]


def _scroll(state: ViewState, lines: Sequence[Line], room: int) -> tuple[list[Line], OnScreen]:
    last = max(len(lines) - room, 0)
    first = last if state.first < 0 else min(state.first, last)
    return list(lines[first : first + room]), OnScreen(num_rows=room, num_lines=len(lines))


def _last_line(state: ViewState, known: Known) -> Line:
    if state.typed is not None:
        return line(Span(f"filter: {state.typed}_", "bold"), "   enter: keep  escape: all")
    if state.asked is not None:
        name = short_id(known.run.run_id) if known.run is not None else "the run"
        really = "really " if state.asked else ""
        return line(Span(f"{really}cancel {name}? y: yes, any other key: no", "bad"))
    if state.message:
        return line(Span(in_one_line(state.message), "bold"))
    log = state.page is Page.TEXT and state.log is not None
    keys = {
        Page.ATTEMPTS: "enter log of the rank that ended it  q back",
        Page.TEXT: f"up down scroll{'  n p next rank, rank before' if log else ''}  q back",
        Page.OVERVIEW: "enter open  ? keys  q quit",
        Page.RUN: "l log  s stacks  a attempts  c cancel  f filter  o sort  ? keys  q back",
    }.get(state.page, "up down scroll  q back")
    return line(Span(keys, "dim"))


_CURVES = 6


def run_picture(run: LiveRun, columns: int) -> list[Line]:
    """Return all lines about a run, for output that is not a terminal."""
    rows = rank_rows(run.sample) if run.sample is not None else []
    lines = run_lines.head_lines(run, rows, columns, unicode=True, num_curves=_CURVES)
    if run.tasks:
        return [*lines, line(), *run_lines.task_lines(run)]
    if not rows or run.is_final:
        return lines
    return [*lines, line(run_lines.stale_note(run)), *run_lines.table_lines(rows, columns)]
