"""All live and queued runs as lines."""

from collections.abc import Sequence

from torchmuster.files.layout import short_id
from torchmuster.model.display.live import LiveRow
from torchmuster.model.display.text import in_one_line
from torchmuster.ui.top.words import DASH, Line, Span, line, show_time

HEADER = ("RUN", "STATE", "ON", "RANKS", "STEP", "LEFT", "TIME", "")
_RIGHT = frozenset({"RANKS", "STEP", "LEFT", "TIME"})
_MOST = (24, 11, 14, 5, 10, 10, 10)


def overview_lines(rows: Sequence[LiveRow], columns: int, chosen: str | None = None) -> list[Line]:
    """Return the header and a line for each run.

    Args:
        rows: The runs.
        columns: Of the terminal.
        chosen: The id of the run that is marked.
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
        show_time(row.left_s),
        show_time(row.elapsed_s),
        in_one_line(row.why),
    )
