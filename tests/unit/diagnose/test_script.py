"""What lint finds in the job's script is evidence for what the logs show."""

import pytest

from torchmuster.diagnose.explain.events import JobOutcome, LogFinding, LogVerdict
from torchmuster.diagnose.explain.own_run import with_script
from torchmuster.diagnose.finding import Confidence, Finding, Level


def found(cause, confidence=Confidence.LOW):
    return LogFinding(cause=cause, error="x", confidence=confidence, hint="from the logs")


def script(cause, level=Level.FAILURE):
    finding = Finding(cause=cause, error="torchrun runs on one node", hint="srun it", level=level)
    return [("job.sh", 7, finding)]


def test_a_mistake_of_the_script_that_leads_to_the_cause_makes_it_surer_and_gives_the_advice():
    verdict = with_script(
        LogVerdict(found=(found("launcher-on-too-few-nodes"),)), script("head-only")
    )
    assert verdict.first.confidence is Confidence.MEDIUM
    assert verdict.first.hint == "srun it"
    assert "job.sh:7: torchrun runs on one node" in verdict.first.because


def test_where_logs_name_nothing_the_script_does():
    verdict = with_script(LogVerdict(found=(), outcome=JobOutcome.UNKNOWN), script("head-only"))
    assert verdict.first.cause == "launcher-on-too-few-nodes"
    assert verdict.first.at == "job.sh:7"


def test_a_cause_that_the_logs_prove_stays():
    verdict = LogVerdict(found=(found("disk-full", Confidence.HIGH),))
    assert with_script(verdict, script("head-only")) == verdict


@pytest.mark.parametrize("outcome", [JobOutcome.ENDED_WELL, JobOutcome.RUNNING])
def test_a_job_that_did_not_fail_is_not_accused_by_its_script(outcome):
    verdict = LogVerdict(found=(), outcome=outcome)
    assert with_script(verdict, script("head-only")) == verdict


def test_a_warning_alone_is_no_cause():
    verdict = LogVerdict(found=(), outcome=JobOutcome.UNKNOWN)
    assert with_script(verdict, script("fixed-port", Level.WARNING)) == verdict
