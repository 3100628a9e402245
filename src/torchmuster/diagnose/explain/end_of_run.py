"""What the logs add to the head's own report when a run has failed: bounded in time, and never in the way.

The head saw every end in its order, so its first failing rank, signal or memory counter stays in the first line. Where
it knows only that a rank ended, or that one lost another, the heads and the ends of the ranks' logs are read for why.
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

from torchmuster.core.files.layout import RunDir, last_lines
from torchmuster.core.model.failure import EndKind, WorkerEnd
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import render_report
from torchmuster.core.model.verdict import Report, Result
from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.causes import CAUSES, ENDINGS, OBSERVED
from torchmuster.diagnose.explain.events import JobOutcome, LogFinding, LogLine, LogVerdict
from torchmuster.diagnose.explain.judge import judge
from torchmuster.diagnose.explain.own_run import foreign_store, is_same, own_finding
from torchmuster.diagnose.explain.reading.ends import LogSource, first_and_last
from torchmuster.diagnose.explain.reading.scan import read_sources
from torchmuster.diagnose.finding import Confidence
from torchmuster.launcher.model.run import fold_run

# A verdict in words, and as plain values for `--json`.


_SLOW = "slow: "
_EVIDENCE = 6
_SHOWN = 160
# What a doubtful finding is said with, in the first words: many read no further.
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
    """Return what the user reads: the first cause whole, others in a line each.

    `own_run` says how a run of ours stands: then nobody has to guess.
    """
    size = f"{_count(verdict.num_lines, 'line')} in {_count(verdict.num_files, 'file')}"
    lines = [f"note: {note}" for note in verdict.notes if not note.startswith(_SLOW)]
    slow = [note for note in verdict.notes if note.startswith(_SLOW)]
    if verdict.healthy:
        return "\n".join(
            [*lines, f"no failure was found in {size}: {own_run or _ENDS[verdict.outcome]}", ""]
        )
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
    return replace(finding.report, error=as_sure(finding), because=tuple(because))


def as_sure(finding: LogFinding) -> str:
    """Return a finding's sentence, said as surely as it is known."""
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
    """Return a line with its place, in one line of a message."""
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
# What only says that somebody has gone, or how a process ended.
_NO_REASON = ENDINGS | {"peer-lost", "rank-missing-in-collective", "rank-ended-early", "cancelled"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """What was read, and of how many of the logs."""

    case: Case
    num_read: int
    num_all: int


def explained(result: Result, run_dir: RunDir, *, limit_s: float = LIMIT_S) -> Report | None:
    """Return the report on a run's end with what the logs add to it; as it is when they add nothing.

    Args:
        result: Of the run.
        run_dir: Where the ranks' logs are.
        limit_s: No later than this, also where the disk hangs.
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
    """Say whether the logs could know more than the head: not where it saw the exception itself."""
    if cause.memory_evidence or cause.kind in (EndKind.NODE_LOST, EndKind.HANG):
        return False
    if cause.kind is EndKind.EXCEPTION:
        return True  # what it means, and what cures it, may be known
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
    """Return the ranks' logs, that of the first failing rank first."""
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
    """Return the addresses of the run's stores, as the end of its record names them."""
    found: list[dict[str, object]] = []
    for line in last_lines(path, _MAX_RECORD_LINES, _MAX_RECORD_BYTES):
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            found += [event] if isinstance(event, dict) else []
    return fold_run(found).masters


def _reason(verdict: LogVerdict, own: LogFinding | None, cause: WorkerEnd) -> LogFinding | None:
    """Return what the logs give as the reason; None when they only repeat what is known."""
    # A rank that was ended by us may have told its own exception in its log.
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
    if as_sure(finding) in report.because or (finding.hint and finding.hint in (report.hint or "")):
        return report  # its job has done this already
    lines = _telling(finding.evidence)
    # The head saw the exception itself: what is not certain is only what led to it.
    sure = finding.confidence is Confidence.HIGH or finding.cause == "exception"
    because: list[str] = []
    if sure or not all(_is_said(line, report) for line in lines):  # no guess about what is shown
        because = [as_sure(finding)]
        because += [evidence_of(line) for line in lines]
    because += report.because
    if reading.num_read < reading.num_all:
        because.append(
            f"{reading.num_read} of {reading.num_all} logs were looked at; `muster explain {run_id}` reads all"
        )
    hint = "; ".join(text for text in (finding.hint, report.hint) if text) or None
    return replace(report, because=tuple(because), hint=hint)


def _is_said(line: LogLine, report: Report) -> bool:
    """Say whether the head's own report shows this line, e.g. the end of the traceback that it has."""
    text = line.text.strip()
    return any(text.endswith(said.strip()) for said in report.because if said.strip())


def _telling(lines: Sequence[LogLine]) -> list[LogLine]:
    """Return a few lines, each text once."""
    once = {line.text: line for line in reversed(lines)}
    return sorted(once.values(), key=lambda line: line.order)[:_MAX_EVIDENCE]
