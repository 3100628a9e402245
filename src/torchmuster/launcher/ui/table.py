"""Plain tables: columns as wide as their widest cell, no lines, no colour."""

from collections.abc import Sequence

from torchmuster.core.model.text import in_one_line


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table with a newline at the end of every row."""
    table = [list(header), *[[in_one_line(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    return "\n".join(lines) + "\n"
