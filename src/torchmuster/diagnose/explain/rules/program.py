"""Findings about the program itself: exceptions, exit codes, failed child programs."""

import re
from collections.abc import Iterator
from dataclasses import replace

from torchmuster.diagnose.explain.advice import remedy_of
from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.catalogue import index
from torchmuster.diagnose.explain.events import LineRole, LogEvent, LogFinding
from torchmuster.diagnose.explain.reading.patterns import file_errno
from torchmuster.diagnose.explain.reading.tracebacks import BETWEEN, STANDARD_LIBRARY
from torchmuster.diagnose.explain.rules import signals
from torchmuster.diagnose.explain.rules.collective import raised_by
from torchmuster.diagnose.explain.rules.node import row_of_number
from torchmuster.diagnose.explain.rules.rows import HIGH, LOW, MEDIUM, at, fits, found_by, words_of
from torchmuster.diagnose.explain.rules.said import strength
from torchmuster.diagnose.explain.rules.signals import code_of, ended_process, signal_of
from torchmuster.diagnose.finding import Confidence

# What the catalogue's messages argue: each message is a row, for lines and exceptions alike.


# Messages that name a cause, by the kind of their events.
ROWS: dict[str, index.Row] = {
    f"{index.MESSAGE_PREFIX}{row.name}": row
    for row in index.CATALOGUE.by_name.values()
    if row.cause
}


def messages_of_programs(case: Case) -> Iterator[LogFinding]:
    """Report each message that is a separate line; the rule of exceptions handles the others."""
    found: dict[str, list[LogEvent]] = {}
    for event in case.events:
        if event.kind in ROWS and not event.get("type"):
            found.setdefault(event.kind, []).append(event)
    findings = [found_by(case, ROWS[kind], events) for kind, events in found.items()]
    for finding in findings:
        # Only the first finding of a cause is shown, so it also names the others that are proved.
        also = [
            other.error
            for other in findings
            if other.cause == finding.cause and other is not finding and other.confidence is HIGH
        ]
        because = tuple(f"also: {error}" for error in dict.fromkeys(also) if error != finding.error)
        yield replace(finding, because=(*finding.because, *because))


def row_of_exception(event: LogEvent) -> index.Row | None:
    """Return the catalogue's row for an exception; None when its message is unknown."""
    row = ROWS.get(event.get("told"))
    if row is None:
        return None
    return replace(row, weight=max(row.weight, index.Weight.PROGRAM))


# Failed programs that a rank had started: their own messages are above the exception, which only
# has the exit code.


_OF_A_CHILD = re.compile(
    r"returned non-zero exit status|Error (?:building extension|compiling objects)|exited with (?:exit )?(?:code|status) [1-9]"
    r"|failed with exit (?:code|status)|[Cc]ommand .{0,200} failed"
)
_FAR = 150  # lines: what a compiler writes, and a traceback
_LEAST = 2


def with_words_of_child(case: Case, event: LogEvent, finding: LogFinding) -> LogFinding:
    """Return a finding on an exception; add the program's message if it only tells an exit code."""
    if not _OF_A_CHILD.search(words_of(event)):
        return finding
    said = [
        e
        for e in case.of("error_line")
        if e.line.path == event.line.path
        and 0 < event.line.order - e.line.order < _FAR
        and strength(e) >= _LEAST
        and not BETWEEN.match(e.line.text)
    ]
    if not said:
        return finding
    best = max(said, key=lambda e: (strength(e), -e.line.order))
    words = best.line.text.strip()[:300]
    because = (words, *finding.because)
    if finding.cause != "exception":
        error = f"{finding.error}: {words}"
        return replace(
            finding, error=error, because=because, evidence=(best.line, *finding.evidence)
        )
    row = row_of_number(file_errno(words))
    return replace(
        finding,
        cause=row.cause if row is not None else finding.cause,
        error=f"a program that {str(event.who) or 'the script'} started has failed: {words}",
        hint=f"{row.hint}"
        if row is not None
        else f"the message is that program's own; {finding.at} starts it",
        because=because,
        evidence=(best.line, *finding.evidence),
    )


# The meaning of exceptions by type and message, and advice for those with unknown messages.


# The meaning of a type or a message; the first row that fits wins.
EXCEPTIONS = index.rule_rows("raised.")


_SERVER_IS_AWAY = re.compile(
    r"(?i)\bservers?\b.{0,40}\b(?:launch failed|failed to (?:start|launch|come up)|(?:did|does|is|was) not (?:start|come up|ready|healthy|become))"
    r"|(?:failed to|could not|unable to) (?:start|launch) .{0,40}\bservers?\b|timed? ?out.{0,20} waiting for .{0,40}\bservers?\b"
)


def row_of(event: LogEvent) -> index.Row:
    """Return an exception's row: a proved cause, else a type or message known here, else any."""
    known = row_of_exception(event)
    if known is not None and known.confidence is HIGH:
        return known
    special = next((row for row in EXCEPTIONS[:-1] if fits(row, event)), None)
    return special or known or EXCEPTIONS[-1]


def general_advice(event: LogEvent) -> str:
    """Return advice on an exception of which only its own message is known."""
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


_LOST = ("peer_lost", "gloo_timeout", "watchdog", "nccl_remote", "store_wait", "gloo_connect")
_CRASHES = ("signal_received", "fatal_python")
_RAISED = ("exception", "cuda_oom", "cuda_error", "fatal_python")
# Exceptions caused by something outside the program seldom say so.
_OF_ITS_SURROUNDINGS = re.compile(
    r"cuda|gpu\b|nccl|driver|out of memory|alloc|\bdisk|no space|quota|permission|denied|socket|address"
    r"|connect|resolve|network|time(?:d )?-?out|refused|\bmount|file ?system|shared memory|signal|/dev/|too many|rendezvous",
    re.IGNORECASE,
)
# They report that another process, thread or worker has failed: its own message says more, even if
# it comes later.
_WRAPS = re.compile(
    r"Caught \w+ in (?:DataLoader worker|replica|pin memory)|[Ss]ee (?:the )?(?:stack trace|root cause|above|inner|logs?)\b"
    r"|(?:[Ee]ngine|[Ww]orker|[Pp]rocess|[Ss]erver|[Aa]ctor)\b.{0,30}\b(?:failed to start|initialization failed|died|exited unexpectedly|has died)"
    r"|ActorDiedError|ActorUnavailable|RayTaskError|WorkerCrashed|ProcessRaisedException|Trials did not complete|terminated with the following error"
)
# Messages of any cause: an exception that names one says more, even if it comes later.
_NAMES_NOTHING = re.compile(
    r"NCCL error: |unhandled (?:cuda|system) error|internal error - please report"
)
_GUESSED = frozenset({"package-missing", "open-files", "system-error", "download-failed"})


_OWN_CONNECTION = index.RULE_ROWS["program.own-connection"]
_EXIT_CODE = index.RULE_ROWS["program.exit-code"]
# What torchmuster.train prints, with its exit code, when it ends as requested.
_STOPPED_AS_REQUESTED = "muster: stopped after step "


_AFTER_AN_EXCEPTION = (
    "Python ends with 1 after an exception: its traceback is above, or in that rank's own output"
    " (torchrun --log-dir LOGS --redirects 3 --tee 3 keeps it)"
)


def exceptions(case: Case) -> Iterator[LogFinding]:
    """Report the first exception that is not an echo."""
    found = [e for e in case.of(*_RAISED) if e.role is LineRole.CAUSE and not signal_of(e)]
    raised = [e for e in found if e.get("type") or e.kind != "exception"]
    raised = [e for e in raised if not _is_of_a_pipe(case, e)]
    if not raised:
        yield from _last_line_exceptions(case)
        yield from _own_connection(case)
        return
    event = _first_of(case, raised)
    if _WRAPS.search(words_of(event)) and any(signal_of(e) for e in case.of(*_CRASHES)):
        return  # the process that it means has reported its crash
    others = len({(e.who, e.line.path) for e in raised}) - 1
    later = (f"{others} other ranks raised too, later or at the same time",) if others > 0 else ()
    row, names = row_of(event), {"advice": general_advice(event)}
    if all_of_them := raised_by(case, event, raised):
        names["who"], later = all_of_them, (f"{all_of_them} raised it",)
        if not all_of_them.startswith("ranks"):  # then no rank was first
            row = replace(row, error=row.error.replace(" failed first:", " raised:"))
    finding = found_by(
        case,
        row,
        [event],
        names,
        confidence=_confidence(case, event, raised),
        at=event.get("where") or at(event),
        because=(*event.detail[-6:-1], *later),
        ruled_out=_echoes_ruled_out(case),
    )
    yield with_words_of_child(case, event, finding)


def _is_of_a_pipe(case: Case, event: LogEvent) -> bool:
    """Return whether a parent only lost the pipe to a crashed child: the crash is the cause."""
    if event.get("type") not in ("EOFError", "BrokenPipeError", "ConnectionResetError"):
        return False
    crashed = case.of("fatal_python", "signal_received", "killed_line", "loader_killed")
    return any(signal_of(e) and e.line.order < event.line.order for e in crashed)


def _first_of(case: Case, raised: list[LogEvent]) -> LogEvent:
    """Return the exception that came first: an uncaught one ends a rank, a caught one need not."""
    uncaught = [e for e in raised if e.get("uncaught") or e.kind != "exception"]
    own_words = [e for e in uncaught if not _WRAPS.search(words_of(e))]
    own_words = own_words or [e for e in raised if not _WRAPS.search(words_of(e))]
    first = case.earliest(own_words or uncaught or raised)
    if _NAMES_NOTHING.search(words_of(first)):
        telling = [
            e for e in raised if (row := row_of_exception(e)) is not None and row.confidence is HIGH
        ]
        first = case.earliest(telling) if telling else first
    if first.kind == "fatal_python" or not first.get("type"):
        # The interpreter's last message and the watchdog's say less than an exception of the same
        # moment.
        named = [
            e for e in raised if e.get("type") and e.kind != "fatal_python" and e.who == first.who
        ]
        return case.earliest(named) if named else first
    return first


def _confidence(case: Case, event: LogEvent, raised: list[LogEvent]) -> Confidence:
    """Return how sure it is that an exception came first.

    Several files without times can't be ordered: then it is a guess, unless all say the same. It is
    also one where other nodes' logs are missing, or where its writer had lost a peer before.
    """
    if case.may_lack_logs or _had_lost_a_peer(case, event) or event.kind == "cuda_error":
        return MEDIUM
    if any(e.kind == "exception" and not e.get("type") for e in case.events):
        return MEDIUM  # a log was cut in the middle of another traceback
    row = row_of(event)
    cause = row.cause
    if event.get("told") and row.confidence is not HIGH and cause != "exception":
        return MEDIUM  # a message with more than one reading
    if cause in _GUESSED:
        return MEDIUM  # a module of the program's own that is missing from the path looks the same
    if cause == "exception" and _OF_ITS_SURROUNDINGS.search(words_of(event)):
        return MEDIUM  # the surroundings may be what is wrong
    if cause == "exception":
        return MEDIUM  # what was raised is certain; what led to it is not
    timed = all(e.line.when is not None for e in raised)
    same = len({(e.get("type"), e.get("message")[:60]) for e in raised}) == 1
    ordered = timed or same or len({e.line.path for e in raised}) == 1
    if not ordered or event.kind == "fatal_python":
        return MEDIUM
    return (
        HIGH if event.get("own") or event.get("uncaught") or event.kind != "exception" else MEDIUM
    )


def _had_lost_a_peer(case: Case, event: LogEvent) -> bool:
    return any(
        lost.line.path == event.line.path
        and lost.line.order < event.line.order
        and (lost.who == event.who or lost.who.rank is None)
        for lost in case.of(*_LOST)
    )


def _last_line_exceptions(case: Case) -> Iterator[LogFinding]:
    """Report an exception of which only the last line is known.

    Its log was cut, or something else drew the frames.
    """
    failed = {e.line.path: e.line.order for e in case.of("child_failed", "task_exit", "final")}
    ends = {line.order for log in case.record.logs for line in log.last[-3:]}
    found = [
        e
        for e in case.of("raised_line")
        if e.line.order in ends or e.line.order < failed.get(e.line.path, 0)
    ]
    if not found:
        return
    event = case.earliest(found)
    had_lost = _had_lost_a_peer(case, event)
    yield found_by(
        case,
        replace(row_of(event), error=_OWN_CONNECTION.error),
        [event],
        {"advice": general_advice(event)},
        confidence=LOW if had_lost else MEDIUM,
        weight=index.Weight.ENVELOPE - 1 if had_lost else index.Weight.SIGNAL + 2,
    )


def cut_traceback(case: Case) -> Iterator[LogFinding]:
    """Report a log that ends within a traceback: the place is known, the exception is not."""
    found = [e for e in case.of("exception", "cut_traceback") if not e.get("type")]
    found = [e for e in found if e.get("where") and not case.of("success")]
    if found:
        event = case.earliest(found)
        yield found_by(
            case,
            index.RULE_ROWS["program.cut"],
            [event],
            at=event.get("where"),
            because=event.detail[-4:-1],
        )


def _own_connection(case: Case) -> Iterator[LogFinding]:
    """Report an exception like an echo from code that is not torch's: from an own server."""
    found = [
        e
        for e in case.of("exception", "errno", "peer_lost")
        if e.role is LineRole.ECHO
        and re.match(r"(?:Connection|BrokenPipe|Timeout|EOF)\w*Error$", e.get("type"))
    ]
    if not found:
        return
    event = case.earliest(found)
    yield found_by(
        case,
        _OWN_CONNECTION,
        [event],
        cause="connection-refused" if "efused" in event.get("message") else "exception",
        at=event.get("where") or at(event),
        because=event.detail[-6:-1],
    )


def _echoes_ruled_out(case: Case) -> tuple[str, ...]:
    lost = case.of("peer_lost", "nccl_remote", "watchdog", "gloo_timeout")
    if not lost:
        return ()
    return (
        f"the network: {len(lost)} lines of lost connections came from ranks that had lost their peer",
    )


def exit_codes(case: Case) -> Iterator[LogFinding]:
    """Report a rank that ended with an exit code and without a message."""
    first = _first_without_words(case)
    if first is not None:
        yield first
        return
    # 126 and 127 are the shell's, 128 and more are signals.
    raisers = [e for e in case.events if e.kind != "final"]  # a launcher only reports them
    raised = {e.line.path for e in raisers if e.get("uncaught")}
    failed = [e for e in case.of("child_failed", "exit_code") if 0 < _code(e) < 126]
    failed = [e for e in failed if _STOPPED_AS_REQUESTED not in e.line.text]
    # Python ends with 1 after an exception: one about a lost peer is no silent end, even where a
    # log is cut.
    raised |= {e.line.path for e in raisers if e.role is LineRole.ECHO and e.get("type")}
    raised |= {e.line.path for e in case.of(*_LOST)}
    failed = [e for e in failed if _code(e) != 1 or e.line.path not in raised]
    failed += [
        e for e in case.of("task_exit") if re.search(r"exit code (?!0\b|1[3-9]\d)\d+", e.get("how"))
    ]
    if not failed:
        return
    event = case.earliest(failed)
    code = _code(event)
    ended = ended_process(event)
    if not ended and event.get("tasks"):
        ended = f"task {event.get('tasks')} on {event.get('host')}"
    yield found_by(
        case,
        _EXIT_CODE,
        [event],
        {"ended": ended or "a process", "how": f"exit code {code}" if code else "a failure"},
        hint=_AFTER_AN_EXCEPTION if code == 1 else _EXIT_CODE.hint,
        weight=_EXIT_CODE.weight if code not in (0, 1) else index.Weight.ENVELOPE + 5,
        # Python ends with 1 after an exception: it is not in these logs.
        confidence=MEDIUM if event.kind == "child_failed" and code != 1 else LOW,
        because=_last_words(case, event),
        ruled_out=_echoes_ruled_out(case),
    )


def _first_without_words(case: Case) -> LogFinding | None:
    """Return the finding on the rank that torchrun's only table names first, if nothing else is known of it."""
    tables = signals.first_in_tables(case)
    rows = tables[0] if len(tables) == 1 else []
    ranks = [e for e in rows if e.get("key") == "rank"]
    # Of other codes the launcher's line just after the last words says more.
    most = 1 if case.of("child_failed") else 125
    codes = [e for e in rows if 0 < _code(e) <= most]
    if not ranks or not codes:
        return None
    rank, code = ranks[0].get("value").split()[0], _code(codes[0])
    said = [e for e in case.events if e.get("type") or e.kind in _LOST]
    said = [e for e in said if not e.get("type").endswith("ChildFailedError")]
    if any(str(e.who.rank) in ("None", rank) for e in said):
        return None  # these may be the words of this rank
    return found_by(
        case,
        index.RULE_ROWS["program.first-in-table"],
        [ranks[0], codes[0]],
        {"rank": rank, "code": str(code)},
        weight=_EXIT_CODE.weight if code != 1 else index.Weight.ENVELOPE + 5,
        confidence=LOW if code == 1 else MEDIUM,
        ruled_out=_echoes_ruled_out(case),
    )


def _code(event: LogEvent) -> int:
    word = code_of(event)
    return int(word) if re.fullmatch(r"-?\d{1,9}", word) else 0


def _last_words(case: Case, event: LogEvent) -> tuple[str, ...]:
    """Return the lines just before an event."""
    for log in case.record.logs:
        if log.path == event.line.path:
            before = [line for line in (*log.header, *log.last) if line.order < event.line.order]
            found = [line.text.strip() for line in before[-3:] if line.text.strip()]
            return tuple(f"before it: {text[:160]}" for text in found)
    return ()
