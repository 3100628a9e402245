"""Reports as plain text: `error / at / because / hint`, readable without colour."""

from torchmuster.errors import MusterError
from torchmuster.model.verdict import Report


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
    return "\n".join(lines) + "\n"
