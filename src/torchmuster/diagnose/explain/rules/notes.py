"""Notes on what slows a job but does not end it, and what it costs; shown with the verdict."""

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.catalogue.index import signs

_MAX_NOTES = 3


def slow_notes(case: Case) -> tuple[str, ...]:
    """Return what could make the job faster, as its logs show."""
    lines = [line.text for log in case.record.logs for line in (*log.header, *log.last)]
    lines += [event.line.text for event in case.events]
    found = [row.error for row in signs("slow.").values() if any(map(row.find, lines))]
    return tuple(found[:_MAX_NOTES])
