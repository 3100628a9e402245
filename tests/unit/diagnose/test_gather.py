"""What a run with the long preflight has left to read, and what it means."""

import json
import os
from pathlib import Path

import pytest

from kit.records import event, lines
from kit.values import run_result
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.codec import moment_of
from torchmuster.core.model.events import RecordEvent, Stamped
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report
from torchmuster.diagnose.cli.doctor import render
from torchmuster.diagnose.finding import Level
from torchmuster.diagnose.gather import (
    as_values,
    describe_fit,
    fit_of,
    outcome_of_errors,
    phases,
    prepare_job,
    read_outcome,
    wait_for_job,
)
from torchmuster.errors import MusterError
from torchmuster.launcher.model.job import JobState, JobView

SIZES = (4, 1024, 1 << 20, 16 << 20)
NODES = [{"node": "n1"}, {"node": "n2"}]
PAIRS = [[0, 1, None, 100, 900.0], [1, 0, "connection refused", None, None]]


def job(*, right=True, sag=1.0):
    times = [2e-4 + size * 1e-9 for size in SIZES]
    times[-1] *= sag
    found = [
        {"bytes": size, "seconds": s, "cpu_seconds": 0.0, "repeats": 3, "right": right}
        for size, s in zip(SIZES, times, strict=True)
    ]
    return {"world_size": 2, "right": right, "between": found, "ranks_per_host": {"n1": 1, "n2": 1}}


def result(state=RunState.SUCCEEDED, report=None):
    return run_result(state, 0 if state is RunState.SUCCEEDED else 1, report=report)


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a run's folder."""

    def write(*, findings=(), said=None, ended=None, looked=True):
        run_dir = RunDir(str(tmp_path))
        if looked:
            seen = {"form": "long", "findings": list(findings), "num_nodes": 2, "took_s": 0.5}
            seen |= {"held_s": 0.0, "nodes": NODES, "pairs": PAIRS}
            lines(run_dir.events, [event(0, "preflight", **seen)])
        if said is not None:
            os.makedirs(os.path.dirname(run_dir.rank_log(0, 0)), exist_ok=True)
            text = said if isinstance(said, str) else json.dumps(said)
            Path(run_dir.rank_log(0, 0)).write_text(f"a warning of torch\n{text}\n")
        if ended is not None:
            (tmp_path / "result.json").write_text(json.dumps(codec.to_plain(ended)))
        return run_dir

    return write


@pytest.fixture
def outcome_of(written):
    """Return a function that writes a run's folder and reads what it comes to."""
    return lambda **given: read_outcome(written(**given), has_job=True)


NEEDED = {"agent_joined": {"node": "n1"}, "workers_started": {"attempt": 0}}


def test_phases_are_the_times_between_events():
    def at(second, name):
        time = f"2026-01-01T00:00:{second:06.3f}Z"
        return Stamped(time, moment_of(time), RecordEvent.kinds[name](**NEEDED.get(name, {})))

    joined = [at(1.5, "agent_joined"), at(2.0, "agent_joined"), at(2.25, "preflight")]
    events = [at(1.0, "run_started"), *joined, at(4.0, "workers_started"), at(5.5, "run_ended")]
    assert phases(events) == {"agents": 1.0, "nodes": 0.25, "workers": 1.75, "job": 1.5}
    assert phases(events[:1]) == {}


def test_a_good_run_has_no_findings(outcome_of):
    outcome = outcome_of(said=job(), ended=result())
    assert (outcome.findings, outcome.exit_code) == ((), 0)
    values = as_values(outcome)
    rate = {"why_not": None, "latency_s": 1e-4, "bytes_per_s": 9e8}
    assert values["pairs"][0] == {"from": "n1", "to": "n2", **rate}
    assert values["fit"]["r_squared"] > 0.99


def test_wrong_sums_are_a_failure(outcome_of):
    outcome = outcome_of(said=job(right=False), ended=result())
    assert [f.cause for f in outcome.findings] == ["wrong-sums"]
    assert outcome.exit_code == 2


def test_a_job_that_failed_is_a_finding_in_its_own_words(outcome_of):
    report = Report(error="rank 1 raised RuntimeError", because=("Gloo connectFullMesh failed",))
    outcome = outcome_of(ended=result(RunState.FAILED, report))
    assert outcome.findings[0].error == "rank 1 raised RuntimeError"
    assert outcome.exit_code == 2


def test_a_certain_failure_is_not_followed_by_a_complaint_about_the_job(outcome_of):
    certain = {"level": "failure", "cause": "port-blocked", "error": "e", "is_certain": True}
    outcome = outcome_of(findings=[certain], ended=result(RunState.FAILED))
    assert [f.cause for f in outcome.findings] == ["port-blocked"]
    assert (outcome.could_tell, outcome.exit_code) == (True, 2)


def test_a_run_that_never_looked_says_why(outcome_of):
    report = Report(error="only 1 of 2 nodes came within 8 s", at="n2")
    outcome = outcome_of(looked=False, ended=result(RunState.FAILED, report))
    assert outcome.findings[0].error == "only 1 of 2 nodes came within 8 s"
    assert not outcome.could_tell


@pytest.mark.parametrize(
    ("why", "cause"),
    [("Network is unreachable", "network-unreachable"), ("no answer within 3 s", "port-blocked")],
)
def test_a_node_that_called_the_head_in_vain_is_named_with_its_reason(written, why, cause):
    report = Report(error="only 1 of 3 nodes came within 8 s", at="n2, n3")
    run_dir = written(looked=False, ended=result(RunState.FAILED, report))
    lines(run_dir.events, [event(0, "agent_joined", node="n1")])
    os.makedirs(os.path.dirname(run_dir.agent_log("n1")))
    for node in ("n1", "n2"):
        said = f"muster: waiting for the head at 10.0.0.1:4711 ({why}); 5 s left\n"
        Path(run_dir.agent_log(node)).write_text(said)
    (finding,) = read_outcome(run_dir, has_job=True).findings
    assert (finding.cause, finding.at) == (cause, "n2")
    assert finding.error == f"n2 can't reach the head at 10.0.0.1:4711: {why}"
    assert finding.because == ("only 1 of 3 nodes came within 8 s",)


@pytest.mark.parametrize("said", [None, "", "{broken", "[1]", "no json"])
def test_a_job_that_said_nothing_readable_is_a_warning(outcome_of, said):
    outcome = outcome_of(said=said, ended=result())
    assert [f.level for f in outcome.findings] == [Level.WARNING]
    assert outcome.job is None


def test_a_fit_is_described_in_a_line():
    fit = fit_of(job())
    assert "all-reduce over 2 ranks: alpha" in describe_fit(fit)
    assert fit_of({"world_size": 1, "between": []}) is None
    assert fit_of({"world_size": 2, "between": [{"no": "sizes"}] * 3}) is None


def test_the_tiny_job_is_put_where_hosts_can_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    folder = prepare_job()
    assert os.listdir(folder) == ["tiny_job.py"]
    before = os.stat(os.path.join(folder, "tiny_job.py")).st_ino
    assert prepare_job() == folder
    assert os.stat(os.path.join(folder, "tiny_job.py")).st_ino == before


def test_what_kept_the_nodes_from_starting_is_a_finding_each():
    first = MusterError("a can't be used", where="a", why="no route", fix="ping a")
    outcome = outcome_of_errors([first, MusterError("b can't be used")])
    told = [(f.error, f.at, f.because, f.hint) for f in outcome.findings]
    assert told[0] == ("a can't be used", "a", ("no route",), "ping a")
    assert told[1][0] == "b can't be used"
    assert outcome.findings[0].cause == "not-started"
    assert (outcome.exit_code, outcome.could_tell) == (2, False)


def test_the_folder_of_a_doctor_in_a_job_is_kept_until_the_job_has_ended(tmp_path, monkeypatch):
    run_dir = RunDir(str(tmp_path))
    atomic.write_json(run_dir.job, {"engine": "pbs", "job_id": "7.ctl"})
    states = [JobState.RUNNING, JobState.ENDING, JobState.SUCCEEDED]

    def view(_):
        return JobView(job_id="7.ctl", state=states.pop(0))

    monkeypatch.setattr("torchmuster.launcher.jobs.jobs.view_newest", view)
    wait_for_job(run_dir)
    assert states == []


def test_the_traceback_of_a_job_that_failed_is_kept_apart_from_the_findings(outcome_of):
    reason = ("GLOO_SOCKET_IFNAME names no interface",)
    traceback = ("Traceback (most recent call last):", "  x", "RuntimeError: no")
    report = Report(error="rank 1 raised RuntimeError", because=reason + traceback)
    outcome = outcome_of(ended=result(RunState.FAILED, report))
    assert (outcome.findings[0].because, outcome.traceback) == (reason, traceback)

    text = render(outcome)
    places = [text.index(one) for one in ("rank 1 raised", "the test job:", "RuntimeError: no")]
    assert places == sorted(places)


@pytest.mark.parametrize("hosts", [{"n1": 2}, {"n1": 1, "n2": 1}])
def test_times_that_scatter_are_never_a_poor_fit_above_nothing_is_wrong(outcome_of, hosts):
    said = job() | {"ranks_per_host": hosts}
    for one, seconds in zip(said["between"], (9e-2, 1e-4, 8e-2, 1e-2), strict=True):
        one["seconds"] = seconds
    outcome = outcome_of(said=said, ended=result())
    text = render(outcome)
    assert "scatter" in text
    assert "poor" not in text
    assert text.endswith("1 note\n" if len(hosts) > 1 else "nothing is wrong\n")
