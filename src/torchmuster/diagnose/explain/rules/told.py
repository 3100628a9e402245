"""What the catalogue's messages argue: each entry is a row, on lines and on exceptions alike."""

from collections.abc import Iterator
from dataclasses import replace

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells
from torchmuster.diagnose.explain.catalogue.index import CATALOGUE
from torchmuster.diagnose.explain.events import LogEvent, LogFinding
from torchmuster.diagnose.explain.reading.patterns import TOLD
from torchmuster.diagnose.explain.rules.rows import HIGH, LOW, MEDIUM, Row, Weight, found_by

_CONFIDENCE = {Tells.PROVES: HIGH, Tells.NAMES: MEDIUM, Tells.HINTS: LOW}
_WEIGHT = {
    Tells.PROVES: Weight.SPECIFIC,
    Tells.NAMES: Weight.PROGRAM + 1,
    Tells.HINTS: Weight.COLLECTIVE - 2,
}


def _row(entry: KnownMessage) -> Row:
    return Row(
        evidence=(f"{TOLD}{entry.name}",),
        cause=entry.cause,
        error=entry.error,
        hint=entry.advice,
        hint_in=entry.advice_in,
        confirm=entry.confirm,
        rivals=entry.rivals,
        confidence=_CONFIDENCE[entry.tells],
        weight=_WEIGHT[entry.tells],
    )


ROWS: dict[str, Row] = {
    f"{TOLD}{entry.name}": _row(entry) for entry in CATALOGUE.by_name.values() if entry.cause
}


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
