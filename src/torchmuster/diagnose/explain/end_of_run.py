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

from torchmuster.core.files.layout import RunDir, last_lines
from torchmuster.core.model.failure import EndKind, WorkerEnd
from torchmuster.core.model.run import fold_run
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report, Result
from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.causes import ENDINGS
from torchmuster.diagnose.explain.events import LogFinding, LogLine, LogVerdict
from torchmuster.diagnose.explain.judge import judge
from torchmuster.diagnose.explain.own_run import foreign_store, is_same, own_finding
from torchmuster.diagnose.explain.reading.ends import LogSource, first_and_last
from torchmuster.diagnose.explain.reading.scan import read_sources
from torchmuster.diagnose.explain.words import as_sure, evidence_of
from torchmuster.diagnose.finding import Confidence

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
