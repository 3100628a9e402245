"""Adds what the logs show to the head's report on a failed run, within a time limit.

The head saw every end in its order, so its first failing rank, signal or memory counter stays in
the first line. If it knows only that a rank ended, or that one lost another, the beginnings and
ends of the ranks' logs are searched for the reason.
"""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from torchmuster.core.files.layout import RunDir, last_lines, short_id
from torchmuster.core.model.failure import EndKind, WorkerEnd
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import render_report
from torchmuster.core.model.verdict import Report, Result
from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.catalogue.entry import ENDINGS, OBSERVED
from torchmuster.diagnose.explain.catalogue.index import CAUSES
from torchmuster.diagnose.explain.events import JobOutcome, LogFinding, LogLine, LogVerdict
from torchmuster.diagnose.explain.judge import judge
from torchmuster.diagnose.explain.own_run import foreign_store, is_same, own_finding
from torchmuster.diagnose.explain.reading.ends import LogSource, first_and_last
from torchmuster.diagnose.explain.reading.scan import read_sources
from torchmuster.diagnose.finding import Confidence
from torchmuster.launcher.model.run import fold_run

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
    finding = finding or _reason(judge(reading.case), own_finding(result), cause)
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
