"""All incidents under tests/logs: one half made the rules, the other says what they are worth."""

import re

import pytest

from torchmuster.diagnose.explain.causes import CAUSES
from unit.diagnose.explain.corpus import HEALTHY, ROOT, incidents, said, score, verdict_on

BUILD = [incident for incident in incidents() if not incident.is_held_out]
# Where users' files may lie; what is anywhere else would be a place of the machine that made the log.
TOPS = [
    "__w",
    "bert-base-uncased",
    "data",
    "ddpTest",
    "default_pg",
    "dev",
    "home",
    "lib",
    "lustre",
    "nfs",
    "none",
    "opt",
    "proc",
    "project",
    "pytorch",
    "scratch",
    "shared",
    "software",
    "tmp",
    "usr",
    "var",
    "workspace",
]
TOP = re.compile(r"(?:^|[^\w.<~/-])/([A-Za-z_][\w.-]*)/", re.MULTILINE)
TEMPORARY = re.compile(r"/tmp/(?!torchelastic_|train\.py|python|ckpt)\w")
BUILT = re.compile(r"__w/(?!pytorch)")
LARGEST_BYTES = 30_000


@pytest.mark.parametrize("incident", BUILD, ids=lambda incident: incident.name)
def test_incident_has_its_right_cause(incident):
    assert said(verdict_on(incident.name)) in incident.right


def test_at_least_nine_of_ten_unseen_incidents_are_right():
    right, total, _ = score(held_out=True)
    assert right >= 0.9 * total


def test_no_unseen_incident_has_a_confident_wrong_cause():
    _, _, sure = score(held_out=True)
    assert not sure


def test_no_incident_of_the_build_half_has_a_confident_wrong_cause():
    assert not score(held_out=False)[2]


def test_corpus_is_large_and_has_healthy_logs_and_really_made_ones():
    assert len(incidents()) >= 100
    assert sum(one.right[0] == HEALTHY for one in incidents()) >= 20
    assert sum("torchrun" in one.origin for one in incidents()) >= 40


def test_halves_are_about_equal():
    assert abs(len(BUILD) - len(incidents()) / 2) < 0.15 * len(incidents())


@pytest.mark.parametrize("incident", incidents(), ids=lambda incident: incident.name)
def test_incident_is_small_and_names_no_machine_of_ours(incident):
    assert incident.files
    for path in incident.files:
        text = path.read_text(errors="replace")
        assert len(text) < LARGEST_BYTES
        assert set(TOP.findall(text)) <= {*TOPS}
        assert "work" not in text.split("/")
        assert not TEMPORARY.search(text)
        assert not BUILT.search(text)
    assert set(incident.right) <= {*CAUSES, HEALTHY}


def test_docs_say_the_score_that_the_rules_have():
    text = (ROOT / "docs" / "explain.md").read_text()
    for half, held_out in (("build", False), ("held-out", True)):
        right, total, sure = score(held_out=held_out)
        line = f"| {half} | {right} of {total} | {len(sure)} |"
        assert line in text


def test_every_cause_of_the_corpus_has_a_cure():
    for incident in incidents():
        first = verdict_on(incident.name).first
        assert first is None or (first.hint and first.cause in CAUSES)


@pytest.mark.parametrize("name", ["eap-pbs-first-attempt", "eap-pbs-second-attempt"])
def test_torchrun_in_a_pbs_script_is_said_to_have_run_on_one_of_two_nodes(name):
    first = verdict_on(name).first
    assert first.cause == "launcher-on-too-few-nodes"
    assert first.confidence.value == "high"
    assert first.at == "blancapeak004"


def test_provider_of_another_network_is_named_as_what_fails_next():
    (following,) = verdict_on("eap-pbs-second-attempt").next_to_fail
    assert following.cause == "wrong-provider"
    assert "FI_PROVIDER=efa" in following.error
