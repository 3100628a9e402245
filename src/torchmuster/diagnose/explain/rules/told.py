"""What the catalogue's messages argue: each entry is a row, on lines and on exceptions alike."""

from collections.abc import Iterator
from dataclasses import replace

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.catalogue.entry import TOLD, Row, Weight
from torchmuster.diagnose.explain.catalogue.index import CATALOGUE
from torchmuster.diagnose.explain.events import LogEvent, LogFinding
from torchmuster.diagnose.explain.rules.rows import HIGH, found_by

# Messages that name a cause, by the kind of their events.
ROWS: dict[str, Row] = {f"{TOLD}{row.name}": row for row in CATALOGUE.by_name.values() if row.cause}


def told(case: Case) -> Iterator[LogFinding]:
    """Each message that stands in a line of its own; those of exceptions belong to the rule of exceptions."""
    found: dict[str, list[LogEvent]] = {}
    for event in case.events:
        if event.kind in ROWS and not event.get("type"):
            found.setdefault(event.kind, []).append(event)
    findings = [found_by(case, ROWS[kind], events) for kind, events in found.items()]
    for finding in findings:
        # Of one cause only the first is shown: what else is proved to be missing is said with it.
        also = [
            other.error
            for other in findings
            if other.cause == finding.cause and other is not finding and other.confidence is HIGH
        ]
        because = tuple(f"also: {error}" for error in dict.fromkeys(also) if error != finding.error)
        yield replace(finding, because=(*finding.because, *because))


def row_of_exception(event: LogEvent) -> Row | None:
    """Return what the catalogue knows of an exception; None when it does not know its message."""
    row = ROWS.get(event.get("told"))
    if row is None:
        return None
    return replace(row, weight=max(row.weight, Weight.PROGRAM))
