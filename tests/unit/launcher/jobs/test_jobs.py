"""Jobs of runs: what the next one asks for, when a run is over, and what a scheduler says to a cancel."""

from dataclasses import replace

import pytest
from tests.unit.launcher.model.jobs import request

from kit.values import command_output, run_result
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.links import Link, Links, ResubmitMethod
from torchmuster.core.model.states import RunState
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.jobs import jobs
from torchmuster.launcher.model.job import JobState, JobView

PROGRAM = ("$PYTHON", "/opt/muster/programs/__main__.py", "conduct")


def renamed(job, path):
    again = jobs.RecordedRequest(dialect=load_dialect("slurm"), request=job, num_more=0)
    return again.renamed(RunDir(path))


@pytest.mark.parametrize(
    "words",
    [
        ("--run-dir=/runs/old", "--engine=slurm", "--warn=60"),
        ("/runs/old", "--engine", "slurm", "--warn", "60"),  # of an earlier version
    ],
)
def test_the_next_job_conducts_the_new_run(words):
    job = request(name="old", head=(*PROGRAM, *words), log_path="/runs/old/job.log")
    new = renamed(job, "/runs/20270115-080000-new-3f2a")
    own = ("--run-dir=/runs/20270115-080000-new-3f2a", "--engine=slurm", "--warn=60")
    assert new.head == (*PROGRAM, *own)
    assert (new.name, new.chunks) == ("new-3f2a", job.chunks)
    assert new.log_path.startswith("/runs/20270115-080000-new-3f2a/")


def test_a_job_of_pods_has_no_words_of_ours():
    assert renamed(request(name="old", head=()), "/runs/new").head == ()


PREEMPTED = run_result(RunState.PREEMPTED, 75, elapsed_s=9.0)


def leave(run_dir, result):
    """Leave what a run has of its last job and its end."""
    atomic.write_json(run_dir.job, {"engine": "slurm", "job_id": "5"})
    atomic.write_json(run_dir.result, codec.to_plain(result))
    jobs.write_links(run_dir, Links(ended=result.state.value))


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
    leave(run_dir, PREEMPTED)
    says(state)
    assert (jobs.settled_result(run_dir) is None) is (state in COMES_BACK)


@pytest.mark.parametrize("way", [ResubmitMethod.SUBMIT, ResubmitMethod.REQUEUE])
def test_a_link_that_follows_while_the_scheduler_is_asked_is_no_end(run_dir, monkeypatch, way):
    leave(run_dir, PREEMPTED)
    links = Links(most=3, links=(Link(job_id="5"),))
    jobs.write_links(run_dir, links)

    def view_while_the_next_link_follows(_):
        job_id = "6" if way is ResubmitMethod.SUBMIT else "5"
        following = Link(job_id=job_id, way=way, first_attempt=1)
        jobs.write_links(run_dir, replace(links, links=(*links.links, following)))
        return JobView(job_id="5", state=JobState.SUCCEEDED)

    monkeypatch.setattr(jobs, "view_newest", view_while_the_next_link_follows)
    assert jobs.settled_result(run_dir) is None


def test_the_last_link_is_the_end_when_its_job_is_though_its_head_said_nothing(run_dir, says):
    leave(run_dir, PREEMPTED)
    jobs.write_links(run_dir, Links(most=3))
    says(JobState.FAILED)
    assert jobs.settled_result(run_dir) == PREEMPTED


def test_a_cancelled_one_is_over_whatever_the_scheduler_says(run_dir, says):
    leave(run_dir, PREEMPTED)
    says(JobState.RUNNING)
    jobs.mark_cancelled(run_dir)
    assert jobs.settled_result(run_dir) == PREEMPTED


def test_one_whose_time_was_up_is_over_while_pbs_still_ends_its_job(run_dir, says):
    """PBS shows the job as running for its `kill_delay`, 10 s by default, and starts none again whose time was up."""
    result = replace(PREEMPTED, state=RunState.TIMED_OUT, exit_code=143)
    leave(run_dir, result)
    says(JobState.RUNNING)
    assert jobs.settled_result(run_dir) == result


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
def test_what_pbs_says_of_the_host_of_the_head_is_told(run_dir, monkeypatch, said, words):
    atomic.write_json(run_dir.job, {"engine": "pbs", "job_id": "5.ctl"})
    asked, answer = [], command_output(HOST.format(said))
    monkeypatch.setattr(jobs, "ask_scheduler", lambda argv: asked.append(argv) or answer)
    job = JobView(job_id="5.ctl", state=JobState.RUNNING, nodes=("n3", "n1"))

    assert jobs.describe_lost_head(run_dir, job) == words
    assert jobs.describe_lost_head(run_dir, replace(job, nodes=("n1", "n3"))) is None
    assert jobs.describe_lost_head(run_dir, replace(job, state=JobState.PENDING)) is None
    assert asked == [["pbsnodes", "n3"], ["pbsnodes", "n1"]]


def test_where_a_job_lives_on_without_its_first_node_nothing_is_asked(run_dir, monkeypatch):
    leave(run_dir, PREEMPTED)
    monkeypatch.setattr(jobs, "ask_scheduler", pytest.fail)
    job = JobView(job_id="5", state=JobState.RUNNING, nodes=("n1", "n2"))

    assert jobs.describe_lost_head(run_dir, job) is None


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("qdel: Server could not connect to MOM 10.ctl", "qdel -W force JOB"),  # recorded
        ("qdel: something new", None),
    ],
)
def test_a_job_whose_first_host_is_dead_is_taken_from_the_server_by_force(monkeypatch, said, hint):
    monkeypatch.setattr(jobs, "_ask", lambda *_: command_output("", f"{said}\n", 1))
    with pytest.raises(EngineError) as caught:
        jobs.cancel_job(load_dialect("pbs"), "10.ctl")
    assert caught.value.why == said
    assert caught.value.fix is None if hint is None else hint in caught.value.fix
