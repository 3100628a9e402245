"""The job's script as evidence: compares lint's findings about it with what the logs show."""

from collections.abc import Sequence
from dataclasses import replace

from torchmuster.diagnose.explain.catalogue.index import Weight, names_in
from torchmuster.diagnose.explain.events import JobOutcome, LogFinding, LogVerdict
from torchmuster.diagnose.finding import Confidence, Finding, Level

# The causes that a script's mistake leads to, by the name of lint's rule.
_LEADS_TO = {
    rule: tuple(causes.split(", ")) for rule, causes in names_in("script-leads-to").items()
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
            return replace(verdict, found=(_joined(first, name, line, finding), *verdict.found[1:]))
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


def _joined(first: LogFinding, name: str, line: int, finding: Finding) -> LogFinding:
    """Return a cause on which logs and script agree, with the script's line and its fix."""
    sure = Confidence.MEDIUM if first.confidence is Confidence.LOW else first.confidence
    because = (*first.because, f"{name}:{line}: {finding.error}")
    return replace(first, because=because, confidence=sure, hint=finding.hint or first.hint)
