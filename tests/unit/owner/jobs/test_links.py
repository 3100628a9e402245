"""Whether a run whose link was preempted is over."""

import pytest

from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.job import JobView
from torchmuster.model.links import Links
from torchmuster.model.states import JobState, RunState
from torchmuster.model.verdict import Result
from torchmuster.owner.jobs import links
from torchmuster.owner.jobs.links import mark_cancelled, settled_result, write_links

PREEMPTED = Result(
    run_id="r",
    state=RunState.PREEMPTED,
    exit_code=75,
    attempts=1,
    restarts_spent=0,
    elapsed_s=9.0,
)


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
        monkeypatch.setattr(links, "view_newest", lambda _: view)

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
