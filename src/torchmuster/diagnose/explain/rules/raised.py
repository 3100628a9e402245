"""What exceptions mean, by type and message: the table behind the rule of exceptions, and advice for those of unknown words."""

import re

from torchmuster.diagnose.explain.advice.said import remedy_of
from torchmuster.diagnose.explain.catalogue.entry import Row
from torchmuster.diagnose.explain.catalogue.index import rule_rows
from torchmuster.diagnose.explain.events import LogEvent
from torchmuster.diagnose.explain.reading.chains import STANDARD_LIBRARY
from torchmuster.diagnose.explain.rules.rows import HIGH, fits
from torchmuster.diagnose.explain.rules.told import row_of_exception

# Of a type or a message what it means; the first row that fits.
EXCEPTIONS = rule_rows("raised.")


_SERVER_IS_AWAY = re.compile(
    r"(?i)\bservers?\b.{0,40}\b(?:launch failed|failed to (?:start|launch|come up)|(?:did|does|is|was) not (?:start|come up|ready|healthy|become))"
    r"|(?:failed to|could not|unable to) (?:start|launch) .{0,40}\bservers?\b|timed? ?out.{0,20} waiting for .{0,40}\bservers?\b"
)


def row_of(event: LogEvent) -> Row:
    """Return what an exception means: what proves a cause, then a type or message known here, then a name for it."""
    known = row_of_exception(event)
    if known is not None and known.confidence is HIGH:
        return known
    special = next((row for row in EXCEPTIONS[:-1] if fits(row, event)), None)
    return special or known or EXCEPTIONS[-1]


def general_advice(event: LogEvent) -> str:
    """Return what to do about an exception of which only its own words are known."""
    if _SERVER_IS_AWAY.search(event.get("message")):
        return (
            "the server that it waited for did not come up: read that server's own log or output from its first error on, or start"
            " it by hand with the same arguments"
        )
    remedy = remedy_of(event)
    if remedy:
        return f"do what the message says: {remedy}"
    where, library = event.get("where"), event.get("library")
    if not where:
        return "the lines above this one would have the traceback: its last frame of your own code is where to look"
    if library and library != STANDARD_LIBRARY and event.get("own"):
        return (
            f"correct what {where} passes to {library}: the message says what it refuses; if the call is right,"
            f" another version of {library} is wanted (pip show {library})"
        )
    if library == STANDARD_LIBRARY:
        return f"see which call of the program leads to {where}: the frames above it name the file and line"
    if library:
        return (
            f"the message is {library}'s own: correct the setting or input that it names, or install the version of"
            f" {library} that the program was written for (pip show {library})"
        )
    return f"correct {where}, or the option or input that the message names: no library is involved"
