"""What findings weigh, and where they happened: what all rules share."""

from collections.abc import Callable, Iterator

from torchmuster.doctor.explain.case import Case
from torchmuster.doctor.explain.events import Confidence, Event, Finding


class Weight:
    """What comes first when several causes are argued; all in one place, so that they can be compared."""

    SCHEDULER = 100
    START = 90
    PROVED = 85
    SPECIFIC = 80
    LAUNCH = 70
    NETWORK = 65
    PROGRAM = 60
    ABSENCE = 50
    SIGNAL = 40
    COLLECTIVE = 35
    ENVELOPE = 10


Rule = Callable[[Case], Iterator[Finding]]
HIGH, MEDIUM, LOW = Confidence.HIGH, Confidence.MEDIUM, Confidence.LOW


def at(event: Event) -> str:
    """Return where an event was: who wrote it, file and line."""
    who = str(event.who)
    return f"{who}, {event.line.place}" if who else event.line.place
