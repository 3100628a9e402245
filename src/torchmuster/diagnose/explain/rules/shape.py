"""Messages that nothing here knows: they are still told from others by their shape, and shown instead of nothing."""

import re
from collections.abc import Iterator, Sequence

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.events import LogEvent, LogFinding
from torchmuster.diagnose.explain.rules.rows import LOW, Row, Weight, found_by

# A program speaks of its own end: its name or its level comes first.
_SPEAKS_OF_FAILURE = re.compile(
    r"^[\W\d]*(?:[\w.+@/\[\]()-]+(?::|\]|\s-)\s*){0,4}(?:\w+ )?(?:fatal|error|panic|critical|exception|abort\w*|failed)\b",
    re.IGNORECASE,
)
_NAMES_WHAT = re.compile(
    r"denied|refused|not permitted|invalid|no such|not found|does not exist|timed out|exceed|unreachable"
    r"|corrupt|rejected|revoked|unsupported|not supported|unrecognized|missing|\bfull\b|\blost\b|fallen off"
    r"|unable to|can(?:no|')t\b|could(?: no|n')t\b|illegal|mismatch|too (?:long|many|large|small|old)",
    re.IGNORECASE,
)
# They tell that something has failed, not what.
_WRAPS_ANOTHER = re.compile(
    r"exit(?:ed)?(?: with)?(?: \w+)? ?(?:code|status)|non-?zero|Terminat|aborting|root cause|ChildFailed|see (?:the )?(?:log|inner|above)"
    r"|torch\.distributed\.elastic|child process|step aborted|worker.* (?:exit|die)|job failed|run failed|CalledProcess",
    re.IGNORECASE,
)
_IS_MILD = re.compile(
    r"\bwarn|\bINFO\b|\bDEBUG\b|\bretr(?:y|ies|ying)\b|ignor(?:ed|ing)|skipp(?:ed|ing)|fall(?:ing)? ?back|deprecat|optional"
    r"|missing\W{0,3}[:=] ?(?:0\b|\[\]|None)|\bif you\b|\bin case\b",
    re.IGNORECASE,
)
_MILD_LEVELS = ("info", "warning")
# Numbers that only bear such a name.
_METRIC = re.compile(
    r"\b(?:0|no|zero|without(?: any)?) (?:[\w-]+ ){0,2}?(?:errors?|fail\w*|exceptions?|killed|aborted)\b"
    r"|(?:error|fail|kill|exception|abort)\w*(?: \w+){1,2}\W{0,2}[:=] ?0\b"
    r"|[\w/-]*(?:error|fail|kill|exception|abort)\w*(?: (?:rate|ratio|count)s?)?\W{0,3}[:= ]\s*[\d.]+",
    re.IGNORECASE,
)
_LEAST = 2
_REPORTED = Row(
    cause="reported",
    error="the last error that the log reports: {text:.300}",
    hint="no rule knows this message: search the program's documentation for its words",
    confidence=LOW,
    weight=Weight.ENVELOPE - 5,
    num_lines=3,
)


def reported(case: Case, least: int = _LEAST) -> Iterator[LogFinding]:
    """The line that tells most among those that sound like a failure, after the last sign that all was well."""
    found = unanswered(case)
    scored = [(strength(event), -number, event) for number, event in enumerate(found)]
    scored = [one for one in scored if one[0] >= least]
    if not scored:
        return
    best = max(scored, key=lambda one: one[:2])[2]
    near = [event for event in found if 0 <= event.line.order - best.line.order <= 2]
    yield found_by(case, _REPORTED, [best, *near[1:]], {"text": best.line.text.strip()})


def unanswered(case: Case) -> Sequence[LogEvent]:
    """Return the lines that sound like a failure and after which their log shows no more progress."""
    told = ("error_line", "raised_line", "exit_code", "exception")
    return [
        event
        for event in case.of(*told)
        if event.line.order > case.last_good.get(event.line.path, 0)
    ]


def strength(event: LogEvent) -> int:
    """Return how much a line tells by its shape alone: 0 is nothing, 4 names program, failure and reason."""
    if event.kind == "raised_line" or (event.kind == "exception" and event.get("type")):
        return 4
    if event.kind == "exception":
        return 0  # the log ends within it
    text = _METRIC.sub("", event.line.text)
    speaks = event.line.level == "error" or _SPEAKS_OF_FAILURE.search(text) is not None
    points = 2 * speaks
    points += 2 * (_NAMES_WHAT.search(text) is not None)
    points -= 2 * (_WRAPS_ANOTHER.search(text) is not None)
    points -= 3 * _is_mild(event, text)
    return max(0, points)


def wraps(event: LogEvent) -> bool:
    """Say whether a line tells that something has failed, but not what."""
    text = event.line.text
    return _WRAPS_ANOTHER.search(text) is not None and not _is_mild(event, text)


def _is_mild(event: LogEvent, text: str) -> bool:
    """Say whether a line is a warning or less, by the level of its logger or by its words."""
    return event.line.level in _MILD_LEVELS or _IS_MILD.search(text) is not None
