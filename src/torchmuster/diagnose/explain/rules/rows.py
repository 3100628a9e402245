"""How a row argues a cause: its evidence, when it applies, and the finding.

Most rules are only rows of `catalogue/rules.txt`. Rules that compare lines with each other are
functions in this folder; they too get the cause and the advice from a row. A cause with a line as
evidence is worth more than one that rests on an absence; a mere echo is never a cause.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from string import Formatter
from typing import Any

from torchmuster.diagnose.explain.advice import VALUES, place_in_code
from torchmuster.diagnose.explain.case import ANYWHERE, Case
from torchmuster.diagnose.explain.catalogue.index import TABLES, Row, Weight, rule_rows
from torchmuster.diagnose.explain.events import LineRole, LogEvent, LogFinding
from torchmuster.diagnose.explain.reading.prefix import INFO
from torchmuster.diagnose.explain.reading.tracebacks import opens_a_list
from torchmuster.diagnose.finding import Confidence

Rule = Callable[[Case], Iterator[LogFinding]]
HIGH, MEDIUM, LOW = Confidence.HIGH, Confidence.MEDIUM, Confidence.LOW


def fits(row: Row, event: LogEvent) -> bool:
    """Return whether an event is evidence of a row."""
    is_of_kind = not row.evidence or event.kind in row.evidence
    return is_of_kind and re.search(row.words, words_of(event)) is not None


def evidence_of(row: Row, case: Case) -> list[LogEvent]:
    """Return the events that are the evidence of a row."""
    return [
        e
        for e in case.of(*row.evidence)
        if fits(row, e) and not is_notice(e) and not _was_typed(case, e)
    ]


def argue(row: Row, case: Case) -> Iterator[LogFinding]:
    """Yield the finding of a row, if its evidence is there and nothing rules it out."""
    found = evidence_of(row, case)
    if not found or case.of(*row.unless) or (row.also_needs and not case.of(*row.also_needs)):
        return
    finding = found_by(case, row, found)
    if all(was_survived(case, e) for e in found):
        finding = replace(finding, confidence=LOW, weight=Weight.ENVELOPE - 2)
    elif row.proof and any(re.search(row.proof, e.line.text) for e in found):
        finding = replace(finding, confidence=HIGH)
    yield finding


def rules_of(prefix: str) -> tuple[Rule, ...]:
    """Return a rule for each row of `rules.txt` whose name begins with a prefix."""
    return tuple(partial(argue, row) for row in rule_rows(prefix))


_TWO_CAUSES = re.compile(r"[,:][^,:]*\bor\b (?:a|an|the|its|of|no|other|another|several)\b")


def found_by(
    case: Case,
    row: Row,
    events: Sequence[LogEvent],
    names: Mapping[str, str] | None = None,
    **changes: Any,
) -> LogFinding:
    """Return the finding of a row that rests on these events.

    Args:
        case: The facts of the job.
        row: Cause and advice.
        events: At least one; the finding began with the earliest.
        names: More values for the row's placeholders.
        **changes: Fields of the finding that the rule knows better.
    """
    event = case.earliest(events)
    fields = _Fields(case, event, names or {})
    shown = events[: row.lines] if row.lines > 1 else (event,)
    error = row.error.format_map(fields)
    # A sentence that names two causes proves neither.
    sure = MEDIUM if row.confidence is HIGH and _TWO_CAUSES.search(row.error) else row.confidence
    finding = LogFinding(
        cause=row.cause,
        error=error,
        confidence=sure,
        weight=row.weight,
        evidence=tuple(e.line for e in shown),
        at=row.at.format_map(fields) or at(event),
        because=row.because,
        ruled_out=row.ruled_out,
        rivals=row.rivals,
        hint=_advice_of(case, row, event, fields),
        confirm=case.confirm(row.confirm.format_map(fields)) if row.confirm is not None else None,
        began=event.line,
    )
    return replace(finding, **changes)


# Causes that are cured in the line that raised, if that is the user's own.
_CURED_IN_CODE = TABLES["cured-in-code"].words


_MUSTER_FAILED = (
    "torchmuster itself failed here, not the script: please report this, with its traceback"
)


def _advice_of(case: Case, row: Row, event: LogEvent, fields: "_Fields") -> str:
    """Return the advice for the surroundings of the event, else of the job, else in general.

    Advice with a value in it is given only where the log shows the value.
    """
    is_said_by_us = event.get("type").startswith("torchmuster.")
    if event.get("ours") and row.cause in _CURED_IN_CODE and not is_said_by_us:
        return _MUSTER_FAILED
    places = (case.surroundings_of(event), case.surroundings, frozenset({ANYWHERE}))
    special = (
        words
        for shown in places
        for name, choices in row.hint_in.items()
        if name in shown
        for words in choices
        if fields.knows(words)
    )
    advice = next(special, row.hint).format_map(fields)
    place = place_in_code(event) if row.cause in _CURED_IN_CODE else ""
    return advice if not place or place.partition(",")[0] in advice else f"{advice} (at {place})"


class _Fields(dict[str, str]):
    """The values of a row's placeholders; what an event does not name is computed, or empty."""

    # The first of these that an event has names what was missing.
    _NAMES = (
        *("path", "command", "other", "module", "name", "variable", "library", "symbol"),
        *("version", "host", "why"),
    )

    def __init__(self, case: Case, event: LogEvent, names: Mapping[str, str]) -> None:
        self._case, self._event = case, event
        named = next((event.get(name) for name in self._NAMES if event.get(name)), "")
        pair = f" (ranks {event.get('rank_a')} and {event.get('rank_b')})"
        super().__init__(
            {
                "who": str(event.who) or "a process",
                "here": event.who.host or "a node",
                "named": f": {named}" if named else "",
                "pair": pair if event.get("rank_a") else "",
                "words": words_of(event),
                **event.fields,
                **names,
            }
        )

    def __missing__(self, name: str) -> str:
        self[name] = VALUES[name](self._case, self._event) if name in VALUES else ""
        return self[name]

    def knows(self, words: str) -> bool:
        """Return whether every placeholder of a text has a value."""
        return all(self[name] for _, name, _, _ in Formatter().parse(words) if name)


def at(event: LogEvent) -> str:
    """Return the place of an event: its writer, file and line."""
    who = str(event.who)
    return f"{who}, {event.line.place}" if who else event.line.place


def words_of(event: LogEvent) -> str:
    """Return the text of an event: an exception with its type, else its line."""
    if not event.get("type"):
        return event.line.text
    message = event.get("message")
    if opens_a_list(message):
        lines = [line for line in event.get("more").split("\n") if _SAYS_SOMETHING.search(line)]
        message = f"{message} {'; '.join(lines)}"[:_MAX_WORDS].strip()
    message = message or _asserted(event)
    return f"{event.get('type')}: {message}" if message else event.get("type")


def _asserted(event: LogEvent) -> str:
    """Return the assertion that failed without a message, from its traceback's innermost frame."""
    if not event.get("type").endswith("AssertionError"):
        return ""
    code = (line.strip() for line in reversed(event.detail[:-1]))
    return next((text for text in code if text.startswith("assert ")), "")


_MAX_WORDS = 500
_SAYS_SOMETHING = re.compile(r"^(?!For further information visit|Set the environment variable).*\w")
# What a line may mention in passing: a library that is tried and not needed, a probe of a job
# script.
_MENTIONED_IN_PASSING = frozenset(
    {
        *("library", "no_module_main", "module_load", "no_command", "not_permitted"),
        *("no_gpu", "cuda_ordinal", "nccl_lo", "xid", "nccl_plugin", "shm"),
    }
)
# Libraries try these and continue without them.
_OPTIONAL = TABLES["optional-modules"].words
_MAY_LACK = frozenset({"library", "no_module_main", "no_command"})
# Commands that job scripts only probe for.
_PROBES = TABLES["probes"].words
_FEW_LINES = 3
_NOTICE = re.compile(r"NCCL INFO|\bWARNING\b|[Ww]arning: |^W | dynamic library ")
# Without one of these nothing starts; a script may continue without any other command.
_STARTS_TRAINING = re.compile(r"python|torchrun|accelerate|deepspeed|mpi|srun|pbsdsh|muster|sh$")
_LAUNCHER_SPEAKS = (
    *("launch_config", "rdzv_timeout", "rdzv_connection", "rdzv_closed", "rdzv_complete"),
)
_NEEDS_WHAT_WAS_MISSING = re.compile(r"ImportError|ModuleNotFoundError")


def is_notice(event: LogEvent) -> bool:
    """Return whether a line only warns about something optional, or a script only probed for it."""
    command = event.get("command") or event.get("other")
    if command.rpartition("/")[2] in _PROBES or command.startswith("-"):
        return True  # the latter: a line of a script that lost its beginning
    if (
        event.kind == "no_module_main"
        and not event.get("type")
        and _named_module(event) in _OPTIONAL
    ):
        return True
    if event.kind not in _MENTIONED_IN_PASSING or event.kind == "nccl_lo" or event.get("type"):
        return False
    return event.line.level == INFO or _NOTICE.search(event.line.text) is not None


def _named_module(event: LogEvent) -> str:
    return (event.get("module") or event.get("name")).partition(".")[0]


def was_survived(case: Case, event: LogEvent) -> bool:
    """Return whether a line ended nothing: steps or an unrelated exception followed it."""
    if event.kind not in _MENTIONED_IN_PASSING or event.get("type"):
        return False
    line = event.line
    if _script_continued(case, event):
        return True
    for log in case.record.logs:
        if log.path == line.path and any(
            step.line.order > line.order and _is_same(step, event)
            for step in log.last_progress.values()
        ):
            return True
    return any(
        later.line.path == line.path
        and later.line.order > line.order
        and later.role is LineRole.CAUSE
        and later.get("uncaught")
        and _is_same(later, event)
        and not _NEEDS_WHAT_WAS_MISSING.search(later.get("type"))
        for later in case.events
        if later.get("type") and (later.kind in ("exception", "errno") or event.kind in _MAY_LACK)
    )


def _was_typed(case: Case, event: LogEvent) -> bool:
    """Return whether the log copies a terminal in which somebody had just typed the command."""
    command = event.get("command") or event.get("other") or event.get("name")
    if event.kind != "no_command" or _STARTS_TRAINING.search(command):
        return False
    return any(
        prompt.line.path == event.line.path
        and 0 < event.line.order - prompt.line.order <= _FEW_LINES
        for prompt in case.of("prompt")
    )


def _script_continued(case: Case, event: LogEvent) -> bool:
    """Return whether a script lacked a command, e.g. ping, and still started the launcher."""
    command = event.get("command") or event.get("other") or event.get("name")
    if event.kind != "no_command" or not command or _STARTS_TRAINING.search(command):
        return False
    line = event.line
    return any(
        later.line.path == line.path and later.line.order > line.order
        for later in case.of(*_LAUNCHER_SPEAKS)
    )


def _is_same(one: LogEvent, other: LogEvent) -> bool:
    """Return whether two lines may have one writer; exceptions often lack the host."""
    hosts = {one.who.host, other.who.host} - {None}
    return len(hosts) < 2 and one.who.task == other.who.task
