"""Whether a run whose link was preempted is over."""

from dataclasses import replace

import pytest

from kit.values import run_result
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.links import Links
from torchmuster.core.model.states import RunState
from torchmuster.core.proc import CommandOutput
from torchmuster.launcher.jobs import jobs
from torchmuster.launcher.jobs.jobs import (
    describe_lost_head,
    mark_cancelled,
    settled_result,
    write_links,
)
from torchmuster.launcher.model.job import JobState, JobView

PREEMPTED = run_result(RunState.PREEMPTED, 75, elapsed_s=9.0)


@pytest.fixture
def run_dir(tmp_path):
    made = RunDir(str(tmp_path))
    atomic.write_json(made.job, {"engine": "slurm", "job_id": "5"})
    atomic.write_json(made.result, codec.to_plain(PREEMPTED))
    write_links(made, Links(ended=RunState.PREEMPTED.value))
    return made


@pytest.fixture
def says(monkeypatch):
    """Let the scheduler say this of the job; None: it does not know it."""

    def say(state):
        view = None if state is None else JobView(job_id="5", state=state)
        monkeypatch.setattr(jobs, "view_newest", lambda _: view)

    return say


COMES_BACK = (JobState.PENDING, JobState.REQUEUED, JobState.ENDING, JobState.RUNNING)


@pytest.mark.parametrize("state", [*JobState, None])
def test_a_preempted_run_is_over_when_its_job_is(run_dir, says, state):
    says(state)
    assert (settled_result(run_dir) is None) is (state in COMES_BACK)


def test_a_cancelled_one_is_over_whatever_the_scheduler_says(run_dir, says):
    says(JobState.RUNNING)
    mark_cancelled(run_dir)
    assert settled_result(run_dir) == PREEMPTED


def test_one_whose_time_was_up_is_over_while_pbs_still_ends_its_job(run_dir, says):
    """PBS shows the job as running for its `kill_delay`, 10 s by default, and starts none again whose time was up."""
    result = replace(PREEMPTED, state=RunState.TIMED_OUT, exit_code=143)
    atomic.write_json(run_dir.result, codec.to_plain(result))
    write_links(run_dir, Links(ended=RunState.TIMED_OUT.value))
    says(JobState.RUNNING)
    assert settled_result(run_dir) == result


# Recorded from OpenPBS 23.06 (`state = free`); the states are those of `man pbsnodes`.
HOST = "n3\n     Mom = n3\n     ntype = PBS\n     state = {}\n     pcpus = 8\n"
LOST = "pbs says that n3 is lost, where the head of the run is: its state is {}"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("down", LOST.format("down")),
        ("offline,down", LOST.format("offline,down")),
        ("free", None),
        ("state-unknown", None),
    ],
)
def test_what_pbs_says_of_the_host_of_the_head_is_told(tmp_path, monkeypatch, said, words):
    made = RunDir(str(tmp_path))
    atomic.write_json(made.job, {"engine": "pbs", "job_id": "5.ctl"})
    asked = []

    def ask(argv):
        asked.append(argv)
        return CommandOutput(status=0, stdout=HOST.format(said).encode(), stderr=b"")

    monkeypatch.setattr(jobs, "ask_scheduler", ask)
    job = JobView(job_id="5.ctl", state=JobState.RUNNING, nodes=("n3", "n1"))

    assert describe_lost_head(made, job) == words
    assert describe_lost_head(made, replace(job, nodes=("n1", "n3"))) is None
    assert describe_lost_head(made, replace(job, state=JobState.PENDING)) is None
    assert asked == [["pbsnodes", "n3"], ["pbsnodes", "n1"]]


def test_where_a_job_lives_on_without_its_first_node_nothing_is_asked(run_dir, monkeypatch):
    monkeypatch.setattr(jobs, "ask_scheduler", pytest.fail)
    job = JobView(job_id="5", state=JobState.RUNNING, nodes=("n1", "n2"))

    assert describe_lost_head(run_dir, job) is None
