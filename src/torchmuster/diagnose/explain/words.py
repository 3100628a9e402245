"""A verdict in words, and as plain values for `--json`."""

from dataclasses import replace
from typing import Any

from torchmuster.core.model.text import render_report
from torchmuster.core.model.verdict import Report
from torchmuster.diagnose.explain.causes import CAUSES, OBSERVED
from torchmuster.diagnose.explain.events import JobOutcome, LogFinding, LogLine, LogVerdict
from torchmuster.diagnose.finding import Confidence

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
