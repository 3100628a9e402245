"""Reports as plain text: `error / at / because / hint`, readable without colour; and escaping of foreign text."""

import itertools
import re
from collections.abc import Iterable, Sequence

from torchmuster.errors import MusterError
from torchmuster.model.verdict import Report

# What a terminal would obey, or what reorders text: C0 and C1 controls but \t and \n, and Unicode's own directions.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_MAX_WORD, _MAX_NAMES = 200, 200  # of a search for a near miss
MAX_NAMES = 8


def printable(text: str) -> str:
    """Return a foreign text with control characters made visible and colours removed.

    Every message of muster goes through here: an exception, a host's name or a scheduler's word may hold anything.
    """
    if text.isprintable():
        return text
    return _CONTROL.sub(lambda found: _visible(found[0]), _COLOUR.sub("", text))


def _visible(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def in_one_line(text: str) -> str:
    """Return a printable text without newlines and tabs, for a cell of a table or a name in a list."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def few_of(names: Iterable[str], most: int, num_names: int | None = None) -> str:
    """Return `a, b, c and 3 more`; of `num_names` there are more than are named."""
    listed = [in_one_line(name) for name in names]
    more = (num_names or len(listed)) - len(listed[:most])
    return ", ".join(listed[:most]) + (f" and {more} more" if more > 0 else "")


def name_missing(names: Sequence[str], num_missing: int) -> str:
    """Return `b, c`, or `2 of b, c, d` when any two of these are enough, or `5 more`.

    Args:
        names: Who may be meant; the first few are enough when all of them are.
        num_missing: How many have to come still.
    """
    if not names:
        return f"{num_missing} more"
    if len(names) > num_missing:
        return f"{num_missing} of {few_of(names, MAX_NAMES)}"
    return few_of(names, MAX_NAMES, num_missing)


def say_missing(num_here: int, num_needed: int, who: str) -> str:
    """Return the sentence of a progress line."""
    return f"{num_here} of {num_needed} {'is' if num_here == 1 else 'are'} here, missing: {who}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant; None without one."""
    import difflib

    names = list(known)
    if len(word) > _MAX_WORD:
        return None
    if len(names) > _MAX_NAMES:  # comparing each with each takes time
        alike = (name for name in names if abs(len(name) - len(word)) < 3 and name[:1] == word[:1])
        names = list(itertools.islice(alike, _MAX_NAMES))
    near = difflib.get_close_matches(word, names, n=1)
    folded = {name.lower().replace("_", "").replace("-", ""): name for name in names}
    return near[0] if near else folded.get(word.lower().replace("_", "").replace("-", ""))


def did_you_mean(word: str, known: Iterable[str], otherwise: str | None = None) -> str | None:
    """Return a hint that suggests the nearest known word."""
    near = nearest(word, known)
    return f"did you mean `{near}`?" if near else otherwise


def report_of_error(error: MusterError) -> Report:
    """Return an error as a report."""
    because = tuple(error.why.splitlines()) if error.why else ()
    return Report(error=error.what, at=error.where, because=because, hint=error.fix)


def render_report(report: Report) -> str:
    """Return the message with each part on its own lines and a newline at the end."""
    lines = [f"error: {report.error}"]
    if report.at:
        lines.append(f"  at: {in_one_line(report.at)}")
    if report.because:
        first, *rest = report.because
        lines.append(f"  because: {first}")
        lines += [f"    {line}".rstrip() for line in rest]
    if report.hint:
        lines.append(f"hint: {report.hint}")
    return printable("\n".join(lines) + "\n")


def show_size(size_bytes: float) -> str:
    """Return a size for people, e.g. `30 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} TiB"
