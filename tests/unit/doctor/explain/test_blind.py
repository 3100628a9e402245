"""The incidents under tests/logs-blind, written by somebody who had not seen the rules: the score of both halves."""

import pytest

from torchmuster.doctor.explain.case import Case
from torchmuster.doctor.explain.causes import CAUSES
from torchmuster.doctor.explain.judge import judge
from torchmuster.doctor.explain.scan import read_logs
from unit.doctor.explain.corpus import HEALTHY, ROOT, incidents_under, said

LOGS = ROOT / "tests" / "logs-blind"
INCIDENTS = incidents_under(LOGS)
LEAST = 0.9


def verdict_on(incident):
    return judge(Case(read_logs([str(path) for path in incident.files], year=2025)))


def wrong_of(half):
    """Return what is wrong: its name, the word that was expected, the word that was said, and how surely."""
    found = []
    for incident in half:
        verdict = verdict_on(incident)
        if said(verdict) not in incident.right:
            sure = verdict.first.confidence.value if verdict.first else "-"
            found.append((incident.name, incident.right[0], said(verdict), sure))
    return found


@pytest.mark.parametrize("held_out", [False, True], ids=["build", "held-out"])
def test_nine_of_ten_blind_incidents_are_right_and_no_wrong_one_is_sure(held_out):
    half = [incident for incident in INCIDENTS if incident.is_held_out == held_out]
    wrong = wrong_of(half)
    assert len(wrong) <= (1 - LEAST) * len(half), wrong
    assert not [one for one in wrong if one[3] == "high"], wrong


def test_blind_incidents_are_there_and_their_words_are_known():
    assert len(INCIDENTS) >= 70
    for incident in INCIDENTS:
        assert incident.files, incident.name
        assert set(incident.right) <= {*CAUSES, HEALTHY}, incident.name


def test_blind_incidents_that_made_the_rules_are_all_right():
    assert not wrong_of([incident for incident in INCIDENTS if not incident.is_held_out])
