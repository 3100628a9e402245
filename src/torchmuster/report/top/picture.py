"""Draw one run in full, for output that is not a terminal."""

from torchmuster.launcher.model.live import LiveRun
from torchmuster.launcher.ui.ranks import rank_rows
from torchmuster.launcher.ui.run_lines import head_lines, stale_note, table_lines, task_lines
from torchmuster.launcher.ui.words import Line, line

_CURVES = 6


def run_picture(run: LiveRun, columns: int, *, unicode: bool = True) -> list[Line]:
    """Return all lines about a run."""
    rows = rank_rows(run.sample) if run.sample is not None else []
    lines = head_lines(run, rows, columns, unicode=unicode, num_curves=_CURVES)
    if run.tasks:
        return [*lines, line(), *task_lines(run)]
    if not rows or run.is_final:
        return lines
    note = stale_note(run)
    return [*lines, line(note), *table_lines(rows, columns, unicode=unicode)]
