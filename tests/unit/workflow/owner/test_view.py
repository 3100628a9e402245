"""Where the groups of a workflow stand whose heads are jobs, from what a scheduler says."""

import pytest

from kit.workflows import workflow_plan
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.states import RunState
from torchmuster.launcher.jobs.jobs import view_jobs
from torchmuster.launcher.model.job import JobState, JobView
from torchmuster.workflow.owner.view import view_job_workflow
from torchmuster.workflow.plan import GroupPlan, TaskPlan
from torchmuster.workflow.record import GroupOutcome, State


@pytest.fixture
def run_dir(tmp_path):
    """Return the directory of a workflow `a`, then `b`, then `c`."""
    groups = tuple(
        GroupPlan(name=name, tasks=(TaskPlan(name=f"t{name}", command=("true",)),), after=after)
        for name, after in (("a", ()), ("b", ("a",)), ("c", ("b",)))
    )
    plan = workflow_plan(*groups)
    found = RunDir(str(tmp_path))
    atomic.write_json(found.workflow, codec.to_plain(plan))
    for name in "abc":
        (tmp_path / "groups" / name).mkdir(parents=True)
    return found


def job(state, **more):
    return JobView(job_id="1", state=state, **more)


def ended(run_dir, name, state, code=0):
    outcome = GroupOutcome(group=name, state=state, exit_code=code, elapsed_s=1.0)
    atomic.write_json(run_dir.group(name).result, codec.to_plain(outcome))


def states(view):
    return {group.name: group.state for group in view.groups}


def test_a_pending_job_shows_the_schedulers_reason_and_others_what_they_wait_for(run_dir):
    pending = job(JobState.PENDING, reason="Resources", start_estimate="18:00")
    view = view_job_workflow(run_dir, dict.fromkeys("abc", pending))

    assert states(view) == {"a": State.SCHEDULING, "b": State.WAITING, "c": State.WAITING}
    assert view.groups[0].why == "job 1 is pending (Resources), expected to start 18:00"
    assert view.groups[1].why == "waits for the outputs of a"
    assert view.result is None


def test_a_result_counts_more_than_the_scheduler(run_dir):
    ended(run_dir, "a", State.COMPLETED)
    view = view_job_workflow(run_dir, {"b": job(JobState.RUNNING)})

    assert states(view)["a"] is State.COMPLETED
    assert states(view)["b"] is State.RUNNING
    assert view.state is RunState.RUNNING


def test_what_needs_a_failed_group_has_failed_with_it(run_dir):
    ended(run_dir, "a", State.FAILED, code=5)
    view = view_job_workflow(run_dir, {"b": job(JobState.CANCELLED), "c": job(JobState.CANCELLED)})

    assert states(view)["b"] is State.FAILED_UPSTREAM
    assert states(view)["c"] is State.FAILED_UPSTREAM
    assert (view.state, view.result.exit_code) == (RunState.FAILED, 5)


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (job(JobState.TIMED_OUT), State.FAILED_EXEC_TIMEOUT),
        (job(JobState.CANCELLED), State.FAILED_CANCELED),
        (job(JobState.PREEMPTED), State.FAILED_PREEMPTED),
        (job(JobState.SUCCEEDED), State.FAILED_BACKEND_ERROR),
        (None, State.FAILED_BACKEND_ERROR),
    ],
)
def test_a_job_that_left_no_result_is_never_a_success(run_dir, found, state):
    view = view_job_workflow(run_dir, {"a": found} if found is not None else {})

    assert states(view)["a"] is state


def test_all_that_have_ended_make_a_result(run_dir):
    for name in "abc":
        ended(run_dir, name, State.COMPLETED)
    view = view_job_workflow(run_dir, {})

    assert view.state is RunState.SUCCEEDED
    assert (view.result.exit_code, view.result.elapsed_s) == (0, 3.0)


def test_a_job_of_which_nobody_can_tell_has_not_ended(run_dir):
    view = view_job_workflow(run_dir, {"a": job(JobState.UNKNOWN)})

    assert not view.groups[0].state.is_final
    assert "is unknown" in view.groups[0].why
    assert view.result is None
    assert view.state is RunState.UNKNOWN


def test_a_failure_that_is_on_the_disk_is_told_while_the_scheduler_is_silent(run_dir):
    ended(run_dir, "a", State.FAILED, code=5)
    view = view_job_workflow(run_dir, {"b": job(JobState.UNKNOWN), "c": job(JobState.UNKNOWN)})

    assert states(view)["c"] is State.FAILED_UPSTREAM
    assert (view.state, view.result.exit_code) == (RunState.FAILED, 5)


def test_who_looks_ten_times_a_second_asks_the_scheduler_once():
    class Counting:
        name = "counting"
        asked = 0

        def status_argv(self, job_ids):
            self.asked += 1
            return [["true"]]

        def views(self, stdout):
            return {"1": job(JobState.RUNNING)}

    dialect = Counting()
    seen = [view_jobs(dialect, ["1"])["1"].state for _ in range(20)]

    assert seen == [JobState.RUNNING] * 20
    assert dialect.asked == 1
