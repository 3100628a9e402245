"""The text of an event, its place in the user's code, and the remedy that it proposes."""

import re
from collections.abc import Callable, Iterable
from itertools import pairwise

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.events import LogEvent, LogLine

# Computes a value for advice; empty where the log does not show it.
Value = Callable[[Case, LogEvent], str]


def text_of(event: LogEvent) -> str:
    """Return the text of an event: for an exception, its type and all lines of its message."""
    if not event.get("type"):
        return event.line.text
    return f"{event.get('type')}: {event.get('message')}\n{event.get('more')}".strip()


def first_of(regex: re.Pattern[str], text: str, group: str | int = 0) -> str:
    """Return the first match of a regular expression, or an empty string."""
    found = regex.search(text)
    return (found[group] or "") if found is not None else ""


def line_with(case: Case, words: str) -> str:
    """Return the first kept line that contains these words; empty when there is none."""
    return next((line.text for line in lines_of(case) if words in line.text), "")


def lines_of(case: Case) -> Iterable[LogLine]:
    """Yield the kept lines of a job: the first and last of each log, and those of events."""
    for log in case.record.logs:
        yield from log.header
        yield from log.last
    yield from (event.line for event in case.events)


def place_in_code(event: LogEvent) -> str:
    """Return file, line and code of the innermost frame of the user's own code."""
    place = event.get("where") if event.get("own") else ""
    if not place:
        return ""
    code = code_at(event)
    name = place.rpartition("/")[2]
    return f"{name}, `{code}`" if code else name


def code_at(event: LogEvent) -> str:
    """Return the code at an event's place, as its traceback shows it."""
    path, _, number = event.get("where").rpartition(":")
    for frame, code in pairwise(event.detail):
        if f'"{path}", line {number}' in frame and not code.lstrip().startswith("File "):
            text = code.strip()
            return text if len(text) <= _CODE_SHOWN else f"{text[:_CODE_SHOWN]}..."
    return ""


_CODE_SHOWN = 100


_REMEDY = re.compile(
    r"(?:^|[.;:,!?]\s+|\n\s*)(?P<words>(?:(?:[Pp]lease|[Tt]ry|[Mm]ake sure|[Cc]onsider|[Ss]et|[Uu]se|[Rr]un|[Pp]ass|[Ii]nstall|[Uu]pgrade"
    r"|[Dd]id you mean|[Ee]nsure|[Ss]ee|[Ii]ncrease|[Dd]ecrease|[Rr]educe|[Dd]isable|[Ee]nable|[Yy]ou (?:can|should|must|need to|may want to))\b[:, ]"
    r"|(?:[Ii]f [^.\n]{5,120}, )(?:please |try |consider |increase |set |use |run )).{8,240}?)(?=\.(?:\s|$)|\n|$)"
)
_NO_REMEDY = re.compile(
    r"(?:full|complete|stack|C\+\+) ?(?:stack ?)?trace|_FULL_ERROR|STACKTRACES|NCCL_DEBUG|deprecated|will be removed|"
    r"[Pp]lease (?:report|file|open|contact|check (?:the|your) (?:log|stack))|[Ss]ee (?:above|the stack|stack|exceptions?)|issue|traceback|refer to|https?:|file a bug"
)


_BROKEN_SENTENCE = re.compile(r"(?<=[\w,])\n+(?=[a-z\"'`(])")
_ELSEWHERE = ("On Windows,", "on Windows,", "On macOS,", "on macOS,")


def remedy_of(event: LogEvent) -> str:
    """Return the remedy that a message proposes; empty when it proposes none."""
    text = _BROKEN_SENTENCE.sub(" ", text_of(event).partition(": ")[2])
    for found in _REMEDY.finditer(text):
        if text[: found.start("words")].rstrip().endswith(_ELSEWHERE):
            continue
        words = " ".join(found["words"].split())
        if not _NO_REMEDY.search(words):
            return words
    return ""
