"""Reports as plain text: `error / at / because / hint`, readable without colour."""

import re

from torchmuster.errors import MusterError
from torchmuster.model.verdict import Report

# What a terminal would obey, or what reorders text: C0 and C1 controls but \t and \n, and Unicode's own directions.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_COLOUR = re.compile("\x1b\\[[0-9;]*m")


def printable(text: str) -> str:
    """Return a text of others such that a terminal shows it and obeys nothing in it; colours are left out.

    Every message of muster goes through here: an exception, a host's name or a scheduler's word may hold anything.
    """
    if text.isprintable():
        return text
    return _CONTROL.sub(lambda found: _visible(found[0]), _COLOUR.sub("", text))


def _visible(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def report_of_error(error: MusterError) -> Report:
    """Return the report that says what an error says."""
    because = tuple(error.why.splitlines()) if error.why else ()
    return Report(error=error.what, at=error.where, because=because, hint=error.fix)


def render_report(report: Report) -> str:
    """Return the message, each part on lines of its own, with a newline at the end."""
    lines = [f"error: {report.error}"]
    if report.at:
        lines.append(f"  at: {report.at}")
    if report.because:
        first, *rest = report.because
        lines.append(f"  because: {first}")
        lines += [f"    {line}".rstrip() for line in rest]
    if report.hint:
        lines.append(f"hint: {report.hint}")
    return printable("\n".join(lines) + "\n")
