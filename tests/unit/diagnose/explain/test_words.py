"""What the user reads, and what a script reads."""

import json
from dataclasses import replace

import pytest

from torchmuster.diagnose.explain.own_run import as_values, render_verdict, report_of
from torchmuster.diagnose.finding import Confidence
from unit.diagnose.explain.logs import explain, traceback_of


def test_verdict_has_cause_place_evidence_cure_and_confidence(tmp_path):
    text = render_verdict(explain(tmp_path, n2=traceback_of("ValueError: bad label", rank=1)))
    for part in ("error: ", "  at: ", "  because: ", "hint: ", "confidence: medium", "n2.log:4"):
        assert part in text


@pytest.mark.parametrize(
    ("confidence", "begins"),
    [
        (Confidence.HIGH, "the "),
        (Confidence.MEDIUM, "probable cause: the "),
        (Confidence.LOW, "possible cause: the "),
    ],
)
def test_a_doubt_is_said_in_the_first_words(tmp_path, confidence, begins):
    found = explain(
        tmp_path, n1="RuntimeError: CUDA error: an illegal memory access was encountered\n"
    ).first
    doubted = replace(found, error="the GPU is broken", cause="gpu-hardware", confidence=confidence)
    assert report_of(doubted).error == f"{begins}GPU is broken"


def test_what_was_raised_is_a_fact_whatever_led_to_it(tmp_path):
    found = explain(tmp_path, n2=traceback_of("ValueError: bad label", rank=1)).first
    assert found.confidence is Confidence.MEDIUM
    assert report_of(found).error == found.error


def test_healthy_logs_are_said_to_be(tmp_path):
    text = render_verdict(explain(tmp_path, n1="step 1\nstep 2\ntraining finished\n"))
    assert "no failure was found in 3 lines in 1 file" in text


def test_unknown_failure_says_what_to_collect(tmp_path):
    text = render_verdict(
        explain(tmp_path, n1="srun: error: n1: task 0: Exited with exit code 1\n")
    )
    assert "look at" in text
    assert "look at" in text


def test_values_are_plain_json(tmp_path):
    values = as_values(explain(tmp_path, n1=traceback_of("ValueError: x")))
    assert json.loads(json.dumps(values))["found"][0]["cause"] == "exception"
