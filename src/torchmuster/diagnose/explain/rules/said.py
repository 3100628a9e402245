"""Lines that need a second look: unknown messages by their shape, what a node lacked, NCCL's warnings, what is slow.

An unknown message of a failure is recognized by its shape, and shown instead of nothing. Notes say what slows a job but does not
end it, and what it costs; they are shown with the verdict.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchmuster.diagnose.explain.case import Case, short
from torchmuster.diagnose.explain.catalogue.index import RULE_ROWS, Weight, rule_rows, signs
from torchmuster.diagnose.explain.events import LineRole, LogEvent, LogFinding, LogLine
from torchmuster.diagnose.explain.rules.rows import LOW, argue, evidence_of, found_by

# A program reports its own end: its name or its level comes first.
_SPEAKS_OF_FAILURE = re.compile(
    r"^[\W\d]*(?:[\w.+@/\[\]()-]+(?::|\]|\s-)\s*){0,4}(?:\w+ )?(?:fatal|error|panic|critical|exception|abort\w*|failed)\b",
    re.IGNORECASE,
)
_NAMES_WHAT = re.compile(
    r"denied|refused|not permitted|invalid|no such|not found|does not exist|timed out|exceed|unreachable"
    r"|corrupt|rejected|revoked|unsupported|not supported|unrecognized|missing|\bfull\b|\blost\b|fallen off"
    r"|unable to|can(?:no|')t\b|could(?: no|n')t\b|illegal|mismatch|too (?:long|many|large|small|old|few)"
    r"|out of (?:space|range|bounds|memory|resources)|inconsistent|violat(?:es|ed|ion)|\bnull\b|None. value",
    re.IGNORECASE,
)
# What programs print when they give up, in words that are harmless elsewhere: searched in the last
# lines of a log only.
_GIVES_UP = re.compile(
    r"\bg(?:iv(?:es?|ing)|ave) up\b|\bcan(?:no|')t (?:go on|continue|proceed)|\bno (?:reply|response|answer|heartbeat)"
    r"|not (?:respond(?:ing|ed)?|answer(?:ing|ed)?|reached|alive)\b|unresponsive|unhealthy|\bstalled\b|\bdeadlock"
    r"|\b(?:has |have |is |are )?(?:died|dead|crashed|hung|lame)\b|unknown signal|killed by|panicked|\bpanic:"
    r"|\blost \d+ of|disagrees?\b|differs? from|below the (?:minimum|required)|check failed|assertion .{1,300}failed|not enough|insufficient"
    # A shell and Perl name the line of their script.
    r"|^\S+: line \d+: \S+: \S| at \S+ line \d+\.$"
    r"|ended (?:abnormally|prematurely|unexpectedly)|unexpected(?:ly)? (?:end|exit|eof|termination)\w*|diverged\b",
    re.IGNORECASE,
)
# They report that something has failed, not what.
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
_HAS_GIVEN_UP = re.compile(r"\bg(?:iv(?:es?|ing)|ave) up\b", re.IGNORECASE)
_MILD_LEVELS = ("info", "warning")
# Numbers that only have such a name.
_METRIC = re.compile(
    r"\b(?:0|no|zero|without(?: any)?) (?:[\w-]+ ){0,2}?(?:errors?|fail\w*|exceptions?|killed|aborted|lame|dead|lost|crash\w*|unhealthy)\b"
    r"|(?:error|fail|kill|exception|abort)\w*(?: \w+){1,2}\W{0,2}[:=] ?0\b"
    r"|[\w/-]*(?:error|fail|kill|exception|abort)\w*(?: (?:rate|ratio|count)s?)?\W{0,3}[:= ]\s*[\d.]+",
    re.IGNORECASE,
)
_LEAST = 2
_NUM_LAST_LINES = 10  # lines


def reported(case: Case, least: int = _LEAST) -> Iterator[LogFinding]:
    """Report the most telling line that sounds like a failure, after the last sign of progress."""
    found = failures_without_progress(case)
    scored = [(strength(event), -number, event) for number, event in enumerate(found)]
    scored = [one for one in scored if one[0] >= least]
    if not scored:
        return
    best = max(scored, key=lambda one: one[:2])[2]
    near = [event for event in found if 0 <= event.line.order - best.line.order <= 2]
    yield found_by(
        case, RULE_ROWS["shape.reported"], [best, *near[1:]], {"text": _whole(case, best.line)}
    )


def _whole(case: Case, line: LogLine) -> str:
    """Return the text of a line, with the next line if it ends in a colon."""
    text = line.text.strip()
    if not text.endswith(":"):
        return text
    following = (
        other
        for log in case.record.logs
        for other in log.last
        if log.path == line.path and other.order == line.order + 1
    )
    return f"{text} {next((other.text.strip() for other in following), '')}".strip()


def failures_without_progress(case: Case) -> Sequence[LogEvent]:
    """Return the lines that sound like a failure and after which their log shows no progress."""
    errors = case.of("error_line", "raised_line", "exit_code", "exception")
    found = [e for e in errors if e.line.order > case.last_good.get(e.line.path, 0)]
    return sorted([*found, *_last_words(case)], key=lambda event: event.line.order)


def _last_words(case: Case) -> Iterator[LogEvent]:
    """Yield last lines that have no known meaning, and yet show that a program gave up."""
    known = {event.line.order for event in case.events}
    ended_well = {event.line.path for event in case.of("success")}
    for log in case.record.logs:
        if log.path in ended_well:
            continue
        good = case.last_good.get(log.path, 0)
        for line in log.last[-_NUM_LAST_LINES:]:
            if line.order > good and line.order not in known and _GIVES_UP.search(line.text):
                yield LogEvent(kind="error_line", role=LineRole.CONTEXT, line=line)


def strength(event: LogEvent) -> int:
    """Return how much a line's shape tells, from 0 to 4 (program, failure and reason)."""
    if event.kind == "raised_line" or (event.kind == "exception" and event.get("type")):
        return 4
    if event.kind == "exception":
        return 0  # the log ends within it
    text = _METRIC.sub("", event.line.text)
    speaks = event.line.level == "error" or _SPEAKS_OF_FAILURE.search(text) is not None
    points = 2 * speaks
    points += 2 * any(regex.search(text) is not None for regex in (_NAMES_WHAT, _GIVES_UP))
    points -= 2 * (_WRAPS_ANOTHER.search(text) is not None)
    points -= 3 * _is_mild(event, text)
    return max(0, points)


def wraps(event: LogEvent) -> bool:
    """Return whether a line reports that something has failed, but not what."""
    text = event.line.text
    return _WRAPS_ANOTHER.search(text) is not None and not _is_mild(event, text)


def _is_mild(event: LogEvent, text: str) -> bool:
    """Return whether a line is a warning or less, by the level of its logger or by its words."""
    if _HAS_GIVEN_UP.search(text) is not None:
        return False  # after retries
    return event.line.level in _MILD_LEVELS or _IS_MILD.search(text) is not None


_SOUNDS_FAILED = frozenset({"error_line", "raised_line", "exit_code", "exception", "cut_traceback"})
_FEW_LINES = 10  # what others may still write while NCCL fails


def nccl_warning(case: Case) -> Iterator[LogFinding]:
    """Report a warning of NCCL that no rule knows, unless the work continued as in healthy runs."""
    if not all(_work_continued(case, event) for event in case.of("nccl_warn")):
        yield from argue(RULE_ROWS["said.nccl-warning"], case)


def _work_continued(case: Case, warned: LogEvent) -> bool:
    """Return whether a program wrote much after a warning, and nothing that sounds failed."""
    for event in case.events:
        if event.line.path == warned.line.path and event.line.order <= warned.line.order:
            continue
        if event.kind != "nccl_warn" and event.role in (LineRole.CAUSE, LineRole.ECHO):
            return False
        if event.kind in _SOUNDS_FAILED and (strength(event) or wraps(event)):
            return False
    after = [
        line
        for log in case.record.logs
        for line in log.last
        if line.path == warned.line.path and line.order > warned.line.order
    ]
    return len([line for line in after if line.text and "NCCL" not in line.text]) > _FEW_LINES


def could_not_start(case: Case) -> Iterator[LogFinding]:
    """Report what a node lacked before any training; other nodes may lack it too, or only wait."""
    waited = case.of("rdzv_timeout", "store_wait", "store_clients", "rdzv_connection")
    ruled_out = ("the network: the other nodes only waited for this one",) if waited else ()
    for row in rule_rows("missing."):
        hosts = sorted({short(e.who.host) for e in evidence_of(row, case) if e.who.host})
        same = (f"the same on {', '.join(hosts)}",) if len(hosts) > 1 else ()
        for finding in argue(row, case):
            found = replace(finding, because=same, ruled_out=ruled_out)
            if _had_failed_before(case, finding):
                found = replace(found, confidence=LOW, weight=Weight.ENVELOPE - 1)
            yield found


def _had_failed_before(case: Case, finding: LogFinding) -> bool:
    """Return whether training had failed before: what a script lacks after that is no cause."""
    began = finding.began
    return began is not None and any(
        event.line.path == began.path and event.line.order < began.order
        for event in case.of("root_cause_table", "child_failed", "exception")
        if event.kind != "exception" or event.get("uncaught")
    )


_SLINGSHOT = re.compile(r"\bhsn\d|\bcxi\b|cray", re.IGNORECASE)
_OWN_PLUGIN = re.compile(r"aws[-_]ofi", re.IGNORECASE)
_WRONG_PROVIDER = RULE_ROWS["said.wrong-provider"]


def wrong_provider(case: Case) -> Iterator[LogFinding]:
    """Report a libfabric provider for another kind of network than this machine's."""
    asked = case.variable("FI_PROVIDER")
    headers = [line for log in case.record.logs for line in log.header]
    plugin = [line for line in headers if _OWN_PLUGIN.search(line.text)]
    if not any(_SLINGSHOT.search(line.text) for line in headers):
        return
    if asked is not None and asked.get("value") == "efa":
        yield found_by(case, _WRONG_PROVIDER, [asked], at=None)
    elif asked is None and plugin:
        yield LogFinding(
            cause="wrong-provider",
            error=(
                "an own aws-ofi-nccl is used on a Cray: with FI_PROVIDER=efa, as recipes for Amazon set it,"
                " NCCL would find no network here"
            ),
            confidence=LOW,
            weight=_WRONG_PROVIDER.weight,
            evidence=(plugin[0],),
            hint=_WRONG_PROVIDER.hint,
            confirm=_WRONG_PROVIDER.confirm,
            began=plugin[0],
        )


_MAX_NOTES = 3


def slow_notes(case: Case) -> tuple[str, ...]:
    """Return what could make the job faster, as its logs show."""
    lines = [line.text for log in case.record.logs for line in (*log.header, *log.last)]
    lines += [event.line.text for event in case.events]
    found = [row.error for row in signs("slow.").values() if any(map(row.find, lines))]
    return tuple(found[:_MAX_NOTES])
