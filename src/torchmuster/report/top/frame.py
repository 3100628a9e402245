"""Draw one frame of `muster top`, as many lines as the screen has rows; without I/O."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchmuster.core.files.layout import short_id
from torchmuster.core.model.text import in_one_line, span
from torchmuster.launcher.model.live import LiveRow, LiveRun
from torchmuster.launcher.ui.ranks import choose, rank_rows
from torchmuster.launcher.ui.run_lines import (
    attempt_line,
    head_lines,
    stale_note,
    table_lines,
    task_lines,
)
from torchmuster.launcher.ui.words import DASH, Line, Span, line
from torchmuster.report.top.state import OnScreen, Page, ViewState

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
        line("> " if at == chosen else "  ", *attempt_line(one, run.now).spans)
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
    head = head_lines(run, rows, columns, unicode=unicode)
    if run.training is not None and not run.tasks and run.training.curves:
        spare = room - len(head) - (len(kept) + 2 if rows else 0)
        if spare > 0:
            head = head_lines(run, rows, columns, unicode=unicode, num_curves=1 + spare)
    if run.tasks:
        return _tasks(state, run, head, room)
    head = head[: max(room - _LEAST_TABLE_ROWS, 1) if rows else room]
    table_rows = max(room - len(head) - 2, 1)
    first = min(max(state.first, 0), max(len(kept) - table_rows, 0))
    chosen = state.chosen_rank if state.chosen_rank is not None else _first_of(kept)
    visible = kept[first : first + table_rows]
    table = table_lines(visible, columns, chosen, unicode=unicode) if rows else []
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
    title, *rows = task_lines(run, min(state.chosen_row, len(run.tasks) - 1))
    table_rows = max(room - len(head) - 2, 1)
    first = min(max(state.first, 0), max(len(rows) - table_rows, 0))
    shown = OnScreen(tasks=run.tasks, num_rows=table_rows, is_over=run.is_final)
    return [*head, line(), title, *rows[first : first + table_rows]], shown


def _first_of(rows: Sequence[object]) -> int | None:
    rank = getattr(rows[0], "rank", None) if rows else None
    return rank if isinstance(rank, int) else None


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
    parts += [note] if (note := stale_note(run)) else []
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
