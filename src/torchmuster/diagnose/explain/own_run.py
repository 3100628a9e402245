"""Verdicts with further evidence: muster's own record, the job's script; and a verdict as text.

The head saw every end in its order, so its first failing rank, signal or memory counter outweighs any guess and stays in the first
line. At the end of a run whose head knows only that a rank ended, or that one lost another, the beginnings and ends of the ranks'
logs are searched for the reason, within a time limit. What lint finds in a job's script is compared with what the logs show.
"""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from torchmuster.core.files.layout import RunDir, last_lines, short_id
from torchmuster.core.model.failure import EndKind, WorkerEnd
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import render_report
from torchmuster.core.model.verdict import Report, Result
from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.catalogue.index import CAUSES, ENDINGS, OBSERVED, TABLES, Weight
from torchmuster.diagnose.explain.events import JobOutcome, LogFinding, LogLine, LogVerdict
from torchmuster.diagnose.explain.judge import judge
from torchmuster.diagnose.explain.reading.ends import LogSource, first_and_last
from torchmuster.diagnose.explain.reading.patterns import match
from torchmuster.diagnose.explain.reading.scan import read_sources
from torchmuster.diagnose.explain.rules.rows import HIGH, MEDIUM
from torchmuster.diagnose.explain.rules.signals import meaning_of
from torchmuster.diagnose.finding import Confidence, Finding, Level
from torchmuster.errors import HeadLostError
from torchmuster.launcher.model.events import HangEvent
from torchmuster.launcher.model.run import RunRecord, fold_run

_MAKES_STORE = re.compile(r"_create_c10d_store|_tcp_rendezvous_handler|_env_rendezvous_handler")
_STACKS = re.compile(r"\bstacks-\d+\.txt:")
_BY_STATE = {
    RunState.PREEMPTED: (
        "preempted",
        "the scheduler took the nodes back, and the run stopped for it",
    ),
    RunState.TIMED_OUT: ("time-limit", "the time limit of the job was reached"),
    RunState.CANCELLED: ("cancelled", "the run was cancelled"),
    RunState.LOST: ("node-failed", "the run's head is gone and left no result"),
}


def with_own_result(
    verdict: LogVerdict,
    result: Result | None,
    record: RunRecord,
    *,
    state: RunState | None = None,
) -> LogVerdict:
    """Return a verdict on logs, corrected by the record of the run's own head.

    Args:
        verdict: From the logs.
        result: `result.json`; None when the run has none.
        record: `events.jsonl`.
        state: The state of the run, if there is no result.
    """
    final_state = result.state if result is not None else state
    if final_state is None or final_state is RunState.UNKNOWN:
        return verdict
    if final_state is RunState.SUCCEEDED:
        return replace(
            verdict,
            found=(),
            outcome=JobOutcome.ENDED_WELL,
            collect=(),
            notes=_notes(verdict, record),
        )
    if not final_state.is_final:
        hung = [moment.text for moment in record.moments if moment.kind == HangEvent.name]
        notes = (*verdict.notes, *(f"the head's last word on a hang: {text}" for text in hung[-1:]))
        sure = tuple(one for one in verdict.found if one.confidence is not Confidence.LOW)
        if sure:  # such as the end of an earlier attempt
            note = f"the run has not ended: it is {final_state.value}"
            return replace(verdict, found=sure, collect=(), notes=(*notes, note))
        return replace(verdict, found=(), outcome=JobOutcome.RUNNING, collect=(), notes=notes)
    own = finding_of(result, final_state)
    if own is None:
        return verdict
    first = _with_evidence(own, verdict)
    # The head saw who went first, and which hang lasted: lost connections and stacks say no more.
    rest = [one for one in verdict.found if one.cause not in (first.cause, "peer-lost")]
    rest = [one for one in rest if not _STACKS.search(one.at or "")]
    return replace(
        verdict,
        found=(first, *rest),
        outcome=JobOutcome.FAILED,
        collect=(),
        notes=_notes(verdict, record),
        num_files=max(verdict.num_files, 1),
    )


def finding_of(result: Result | None, state: RunState) -> LogFinding | None:
    """Return the head's report as a finding; None when there is none."""
    report = result.report if result is not None else None
    if result is not None and result.cause is not None and report is not None:
        return LogFinding(
            cause=cause_of_end(result.cause),
            error=report.error,
            confidence=HIGH,
            weight=2 * Weight.SCHEDULER,
            at=report.at,
            because=report.because,
            ruled_out=("the other ranks' errors: the head saw this end first",),
            hint=report.hint,
            more=report.more,
        )
    if state not in _BY_STATE and report is None:
        return None
    cause, sentence = _BY_STATE.get(state, ("exit-code", "the run failed"))
    head_lost = result is not None and result.exit_code == HeadLostError.exit_code
    if head_lost or (result is not None and result.node_was_lost and state is RunState.PREEMPTED):
        cause = "node-failed"
    return LogFinding(
        cause=cause,
        error=report.error if report is not None else sentence,
        confidence=HIGH if report is not None and state in _BY_STATE else MEDIUM,
        weight=2 * Weight.SCHEDULER,
        at=report.at if report is not None else None,
        because=report.because if report is not None else (),
        hint=report.hint if report is not None else None,
        more=report.more if report is not None else (),
    )


def foreign_store(case: Case, result: Result, masters: Collection[str]) -> LogFinding | None:
    """Return the finding that a script connects to another store than the launcher's, or None.

    With torchrun and muster no rank hosts a store: a script that changes the address or the port
    waits until its timeout.
    """
    error = result.cause.error if result.cause is not None else None
    if error is None or not _MAKES_STORE.search(error.traceback):
        return None
    ports = {master.rpartition(":")[2] for master in masters}
    calls = [
        call for call in case.of("store_connect", "store_validate") if call.get("port") not in ports
    ]
    if not calls or not ports:
        return None
    called, own = f"{calls[0].get('host')}:{calls[0].get('port')}", ", ".join(sorted(masters))
    return LogFinding(
        cause="nobody-hosts-the-store",
        error=f"the script calls a store at {called}; the launcher's is at {own}, and no rank hosts another",
        confidence=HIGH,
        weight=2 * Weight.SCHEDULER,
        evidence=(calls[0].line,),
        hint='init_process_group() with its init_method "env://", and leave MASTER_ADDR and MASTER_PORT as they are',
        began=calls[0].line,
    )


def cause_of_end(end: WorkerEnd) -> str:
    """Return the cause word for an end that a head saw."""
    if end.memory_evidence:
        return "out-of-memory"
    if end.kind is EndKind.NODE_LOST:
        return "node-failed"
    if end.kind is EndKind.NOT_STARTED:
        return "launch-failed"
    if end.kind is EndKind.PREEMPTED:
        return "preempted"
    if end.kind is EndKind.SIGNAL and end.signum is not None:
        return meaning_of(end.signum)
    if end.kind is EndKind.HANG:
        # A rank that also waits is in another collective than the others; else it reached none.
        waits = re.match(r"rank \d+ waited in ", end.detail or "")
        return "collectives-differ" if waits else "rank-missing-in-collective"
    return "exception" if end.kind is EndKind.EXCEPTION else "exit-code"


def _with_evidence(own: LogFinding, verdict: LogVerdict) -> LogFinding:
    """Return the head's finding with evidence, and a better cause word, from the logs."""
    same = next((found for found in verdict.found if is_same(found, own)), None)
    if same is None:
        return own
    better = own.cause in ENDINGS and same.weight >= Weight.PROGRAM and same.confidence is HIGH
    theirs = same.hint if better or not own.hint else None
    return replace(
        own,
        cause=same.cause if better else own.cause,
        evidence=same.evidence,
        hint="; ".join(text for text in (theirs, own.hint) if text) or None,
        confirm=same.confirm,
    )


def is_same(found: LogFinding, own: LogFinding) -> bool:
    """Return whether a finding from the logs is about the end that the head names."""
    if found.cause == own.cause:
        return True
    head_words = " ".join((own.error, *own.because))
    return any(_words(line) in head_words for line in found.evidence if _words(line))


def _words(line: LogLine) -> str:
    """Return the text of a line that tells something, as a traceback's last line; else nothing."""
    text = line.text.strip()
    return text if match(text) is not None or ": " in text else ""


def _notes(verdict: LogVerdict, record: RunRecord) -> tuple[str, ...]:
    started = len(record.attempts)
    made = (f"the run made {started} attempts",) if started > 1 else ()
    return (*verdict.notes, *made, *record.slow.values())


# A verdict as text, and as plain values for `--json`.


_SLOW = "slow: "
_EVIDENCE = 6
_SHOWN = 160
# How the sentence of a doubtful finding begins: many readers stop there.
_DOUBT = {
    Confidence.HIGH: "",
    Confidence.MEDIUM: "probable cause: ",
    Confidence.LOW: "possible cause: ",
}
_ENDS = {
    JobOutcome.ENDED_WELL: "the job ended well",
    JobOutcome.RUNNING: "its steps go on to the last line",
}


def render_verdict(verdict: LogVerdict, own_run: str | None = None) -> str:
    """Return the text of a verdict: the first cause in full, others in a line each.

    `own_run` is the state of a run of muster, which then need not be guessed.
    """
    size = f"{_count(verdict.num_lines, 'line')} in {_count(verdict.num_files, 'file')}"
    lines = [f"note: {note}" for note in verdict.notes if not note.startswith(_SLOW)]
    slow = [note for note in verdict.notes if note.startswith(_SLOW)]
    if verdict.healthy:
        lines.append(f"no failure was found in {size}: {own_run or _ENDS[verdict.outcome]}")
        return "\n".join([*lines, *(f"next: {what}" for what in verdict.collect), ""])
    first = verdict.first
    if first is None and verdict.outcome is JobOutcome.UNKNOWN:
        lines.append(f"neither a failure nor an end is in {size}")
        return "\n".join([*lines, *_collect(verdict), ""])
    if first is None:
        lines.append(f"it failed, and the cause is not in {size}")
        return "\n".join([*lines, *_collect(verdict), ""])
    text = render_report(report_of(first))
    parts = [f"confidence: {first.confidence.value}"]
    parts += [f"could also be: {CAUSES[rival]} ({rival})" for rival in first.rivals[:3]]
    parts += [f"ruled out: {text}" for text in first.ruled_out]
    parts += [f"confirm: {first.confirm}"] if first.confirm else []
    parts += [f"next to fail: {other.error}; {other.hint}" for other in verdict.next_to_fail]
    parts += slow
    rest = verdict.found[1:4]
    parts += [f"also seen: {other.error} ({_place(other)})" for other in rest]
    head = "".join(f"{line}\n" for line in lines)
    return "\n".join([head + text + "\n".join(parts), *_collect(verdict), ""])


def report_of(finding: LogFinding) -> Report:
    """Return a finding in the four parts of every message."""
    because = [*finding.because, *(evidence_of(line) for line in finding.evidence[:_EVIDENCE])]
    return replace(finding.report, error=sentence_with_doubt(finding), because=tuple(because))


def sentence_with_doubt(finding: LogFinding) -> str:
    """Return a finding's sentence, introduced by how sure it is."""
    if finding.cause in OBSERVED:
        return finding.error
    return _DOUBT[finding.confidence] + finding.error


def as_values(verdict: LogVerdict) -> dict[str, Any]:
    """Return a verdict as plain values; the keys are part of the command's interface."""
    return {
        "healthy": verdict.healthy,
        "outcome": verdict.outcome.value,
        "found": [_finding(finding) for finding in verdict.found],
        "next_to_fail": [_finding(finding) for finding in verdict.next_to_fail],
        "collect": list(verdict.collect),
        "notes": list(verdict.notes),
        "num_lines": verdict.num_lines,
        "num_files": verdict.num_files,
    }


def _finding(finding: LogFinding) -> dict[str, Any]:
    return {
        "cause": finding.cause,
        "sentence": finding.error,
        "confidence": finding.confidence.value,
        "at": finding.at,
        "because": list(finding.because),
        "evidence": [
            {"file": line.path, "line": line.number, "text": line.text} for line in finding.evidence
        ],
        "rivals": list(finding.rivals),
        "ruled_out": list(finding.ruled_out),
        "cure": finding.hint,
        "confirm": finding.confirm,
    }


def _collect(verdict: LogVerdict) -> list[str]:
    if not verdict.collect:
        return []
    return ["to find it, look at:", *(f"  {what}" for what in verdict.collect)]


def evidence_of(line: LogLine) -> str:
    """Return a line with its place, as one line of a message."""
    text = line.text.strip()
    shown = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    return f"{line.place}: {shown}"


def _place(finding: LogFinding) -> str:
    return finding.evidence[0].place if finding.evidence else finding.at or "no line"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


LIMIT_S = 1.0
_READ_LIMIT_S = 0.7
_ALL_BYTES = 8 << 20  # of all logs together
_LEAST_BYTES, _MOST_BYTES = 16 << 10, 512 << 10  # of one log's end
_HEAD_BYTES = 16 << 10
MAX_RANKS = 512
_MAX_EVIDENCE = 3
_MAX_RECORD_LINES, _MAX_RECORD_BYTES = 20_000, 4 << 20
_RANK_LOG = re.compile(r"rank-(\d+)\.log$")
# Causes that say only that a rank has gone, or how a process ended.
_NO_REASON = ENDINGS | {"peer-lost", "rank-missing-in-collective", "rank-ended-early", "cancelled"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """The logs that were read, and how many of all."""

    case: Case
    num_read: int
    num_all: int


def explained(result: Result, run_dir: RunDir, *, limit_s: float = LIMIT_S) -> Report | None:
    """Return the report on a run's end with what the logs add, if anything.

    Args:
        result: The run's result.
        run_dir: The folder with the ranks' logs.
        limit_s: Return after this time at the latest, even if the disk hangs.
    """
    report, cause = result.report, result.cause
    if report is None or cause is None or result.state is not RunState.FAILED:
        return report
    if not _may_say_more(cause):
        return report
    found: list[Report] = []

    def look() -> None:
        try:
            found.append(_with_logs(report, cause, result, run_dir, limit_s))
        except Exception as error:  # noqa: BLE001 - a bug here must not hide what is known
            word = type(error).__name__
            note = f"the logs could not be explained ({word}: {error})"
            found.append(replace(report, because=(*report.because, note)))

    looking = threading.Thread(target=look, name="explain", daemon=True)
    looking.start()
    looking.join(limit_s)
    return found[0] if found else report


def _may_say_more(cause: WorkerEnd) -> bool:
    """Return whether the logs may tell more than the head: not about memory, nodes or hangs."""
    if cause.memory_evidence or cause.kind in (EndKind.NODE_LOST, EndKind.HANG):
        return False
    if cause.kind is EndKind.EXCEPTION:
        return True  # the catalogue may know its meaning and remedy
    return cause.kind in (EndKind.EXIT_CODE, EndKind.SIGNAL)


def _with_logs(
    report: Report, cause: WorkerEnd, result: Result, run_dir: RunDir, limit_s: float
) -> Report:
    logs = _logs_of(os.path.join(run_dir.logs, f"attempt-{cause.attempt}"), cause.rank)
    if not logs:
        return report
    reading = _read(logs, time.monotonic() + min(_READ_LIMIT_S, 0.7 * limit_s))
    finding = foreign_store(reading.case, result, _masters(run_dir.events))
    finding = finding or _reason(judge(reading.case), finding_of(result, result.state), cause)
    return report if finding is None else _joined(report, finding, reading, result.run_id)


def _logs_of(folder: str, first_rank: int) -> list[str]:
    """Return the ranks' logs; the first failing rank's comes first."""
    try:
        names = [name for name in os.listdir(folder) if _RANK_LOG.match(name)]
    except OSError:
        return []
    names.sort(key=lambda name: int(name[5:-4]))
    names.sort(key=lambda name: name != f"rank-{first_rank}.log")
    return [os.path.join(folder, name) for name in names]


def _read(logs: Sequence[str], until: float) -> _Reading:
    num_read = 0
    last_bytes = min(_MOST_BYTES, max(_LEAST_BYTES, _ALL_BYTES // len(logs)))

    def sources() -> Iterator[LogSource]:
        nonlocal num_read
        for path in logs[:MAX_RANKS]:
            if time.monotonic() > until:
                return
            yield from first_and_last(path, _HEAD_BYTES, last_bytes)
            num_read += 1

    record = read_sources(sources(), year=datetime.now(tz=UTC).year)
    return _Reading(case=Case(record), num_read=num_read, num_all=len(logs))


def _masters(path: str) -> set[str]:
    """Return the addresses of the run's stores, read from the end of its record."""
    found: list[dict[str, object]] = []
    for line in last_lines(path, _MAX_RECORD_LINES, _MAX_RECORD_BYTES):
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            found += [event] if isinstance(event, dict) else []
    return fold_run(found).masters


def _reason(verdict: LogVerdict, own: LogFinding | None, cause: WorkerEnd) -> LogFinding | None:
    """Return the reason that the logs give; None when they only repeat the head's report."""
    # A rank that muster ended may have logged its own exception.
    useless = _NO_REASON - {"exception"} if cause.looks_like_echo else _NO_REASON
    telling = [
        found
        for found in verdict.found
        if found.cause not in useless and found.confidence is not Confidence.LOW
    ]
    if own is not None:
        same = [found for found in telling if is_same(found, own)]
        if same or (cause.kind is EndKind.EXCEPTION and not cause.looks_like_echo):
            return same[0] if same else None
    return telling[0] if telling else None


def _joined(report: Report, finding: LogFinding, reading: _Reading, run_id: str) -> Report:
    if sentence_with_doubt(finding) in report.because or (
        finding.hint and finding.hint in (report.hint or "")
    ):
        return report  # its job has done this already
    lines = _distinct_lines(finding.evidence)
    # The head saw the exception itself: only what led to it is uncertain.
    sure = finding.confidence is Confidence.HIGH or finding.cause == "exception"
    because: list[str] = []
    if sure or not all(_is_shown(line, report) for line in lines):  # no guess about shown lines
        because = [sentence_with_doubt(finding)]
        because += [evidence_of(line) for line in lines]
    because += report.because
    if reading.num_read < reading.num_all:
        because.append(
            f"{reading.num_read} of {reading.num_all} logs were looked at; `muster explain {short_id(run_id)}` reads all"
        )
    hint = "; ".join(text for text in (finding.hint, report.hint) if text) or None
    return replace(report, because=tuple(because), hint=hint)


def _is_shown(line: LogLine, report: Report) -> bool:
    """Return whether the head's report shows this line, e.g. as the end of its traceback."""
    text = line.text.strip()
    return any(text.endswith(said.strip()) for said in report.because if said.strip())


def _distinct_lines(lines: Sequence[LogLine]) -> list[LogLine]:
    """Return the first few lines, each text once."""
    once = {line.text: line for line in reversed(lines)}
    return sorted(once.values(), key=lambda line: line.order)[:_MAX_EVIDENCE]


# The causes that a script's mistake leads to, by the name of lint's rule.
_LEADS_TO = {
    rule: tuple(causes.split(", ")) for rule, causes in TABLES["script-leads-to"].table.items()
}


def with_script(verdict: LogVerdict, found: Sequence[tuple[str, int, Finding]]) -> LogVerdict:
    """Return a verdict with the evidence of the job's script.

    Args:
        verdict: From the logs.
        found: Lint's findings: the script's name, the line, the finding.
    """
    if verdict.outcome in (JobOutcome.ENDED_WELL, JobOutcome.RUNNING):
        return verdict
    first = verdict.first
    for name, line, finding in found:
        if first is not None and first.cause in _LEADS_TO.get(finding.cause, ()):
            return replace(verdict, found=(_agreed(first, name, line, finding), *verdict.found[1:]))
    errors = [one for one in found if one[2].level is Level.FAILURE]
    if not errors or (first is not None and first.confidence is not Confidence.LOW):
        return verdict
    name, line, finding = errors[0]
    own = LogFinding(
        cause=_LEADS_TO.get(finding.cause, ("bad-arguments",))[0],
        error=finding.error,
        confidence=Confidence.MEDIUM,
        weight=Weight.LAUNCH,
        at=f"{name}:{line}",
        because=(*finding.because, "the logs name no other cause"),
        hint=finding.hint,
    )
    return replace(verdict, found=(own, *verdict.found), outcome=JobOutcome.FAILED)


def _agreed(first: LogFinding, name: str, line: int, finding: Finding) -> LogFinding:
    """Return a cause on which logs and script agree, with the script's line and its fix."""
    sure = Confidence.MEDIUM if first.confidence is Confidence.LOW else first.confidence
    because = (*first.because, f"{name}:{line}: {finding.error}")
    return replace(first, because=because, confidence=sure, hint=finding.hint or first.hint)
