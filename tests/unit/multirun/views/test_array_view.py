"""A sweep of job arrays, from what its members have left and what the scheduler says."""

import json
import os

import pytest

from kit.values import run_plan, run_result
from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.states import RunState
from torchmuster.launcher.model.job import JobRequest, NodeChunk
from torchmuster.multirun.sweep.arrays import MemberArray, SweepArrays
from torchmuster.multirun.sweep.plan import MetricChoice, SweepPlan
from torchmuster.multirun.views.sweep_view import view_arrays

REQUEST = JobRequest(name="s", chunks=(NodeChunk(),), head=("x",), log_path="/s/job.log")
RUN = run_plan(run_id="s")
ALL = MemberArray(job_id="7", members=(0, 1, 2, 3, 4))


@pytest.fixture
def sweep(tmp_path):
    run_dir = RunDir(str(tmp_path / "s"))
    os.makedirs(run_dir.members)
    values = tuple((str(n),) for n in range(5))
    plan = SweepPlan(run=RUN, names=("x",), members=values, metric=MetricChoice(name="loss"))
    atomic.write_json(run_dir.sweep, codec.to_plain(plan))
    return run_dir


def note(run_dir, *arrays, engine="slurm"):
    noted = SweepArrays(engine=engine, request=REQUEST, arrays=arrays)
    atomic.write_json(run_dir.arrays, codec.to_plain(noted))


def end(run_dir, number, state, text=""):
    folder = RunDir(os.path.join(run_dir.members, f"s.{number}"))
    os.makedirs(folder.attempt_logs(0), exist_ok=True)
    with open(folder.rank_log(0, 0), "w") as log:
        log.write(text)
    result = run_result(state, run_id=f"s.{number}", elapsed_s=2.0)
    atomic.write_json(folder.result, codec.to_plain(result))


def succeed(run_dir, *numbers):
    for number in numbers:
        end(run_dir, number, RunState.SUCCEEDED)


class Scheduler:
    """Answers with these texts, one after the other, and counts the questions."""

    def __init__(self, *answers, status=0, stderr=b""):
        self.answers, self.status, self.stderr = list(answers), status, stderr
        self.asked = []

    def __call__(self, argv):
        self.asked.append(list(argv))
        text = self.answers.pop(0) if self.answers else ""
        return proc.CommandOutput(status=self.status, stdout=text.encode(), stderr=self.stderr)


def states(view):
    return [member.state for member in view.members]


def test_one_question_tells_of_all_elements(sweep):
    note(sweep, ALL)
    end(sweep, 0, RunState.SUCCEEDED, "loss=3\n")
    scheduler = Scheduler(
        "squeue|7_1|RUNNING|None|2026-11-23T10:00:00|n1\n"
        "squeue|7_2|FAILED|NonZeroExitCode|2026-11-23T10:00:00|n1\n"
        "squeue|7_[3-4%2]|PENDING|Resources|N/A|\n"
    )
    view = view_arrays(sweep, scheduler)
    assert len(scheduler.asked) == 1
    names = [member.state.name for member in view.members]
    assert names == ["SUCCEEDED", "RUNNING", "LOST", "WAITING", "WAITING"]
    assert view.members[2].why == "its job left no result: it is failed"
    assert view.members[3].why == "Resources"
    assert view.best.value == 3.0
    assert (view.state, view.result) == (RunState.RUNNING, None)


def test_when_all_have_ended_nobody_is_asked(sweep):
    note(sweep, ALL)
    succeed(sweep, *range(1, 5))
    end(sweep, 0, RunState.FAILED)
    scheduler = Scheduler()
    view = view_arrays(sweep, scheduler)
    assert scheduler.asked == []
    assert (view.result.state, view.result.exit_code) == (RunState.FAILED, 1)


def test_the_newest_array_of_a_member_counts(sweep):
    note(sweep, ALL, MemberArray(job_id="9", members=(3, 1)))
    succeed(sweep, 0, 2, 4)
    scheduler = Scheduler("squeue|9_0|RUNNING|None|x|n1\nsqueue|9_1|PENDING|Priority|N/A|\n")
    view = view_arrays(sweep, scheduler)
    assert "--jobs=9" in scheduler.asked[0]
    assert (view.members[3].state, view.members[1].state) == (RunState.RUNNING, RunState.WAITING)


def test_an_array_of_one_is_a_plain_job(sweep):
    note(sweep, MemberArray(job_id="9", members=(4,)))
    succeed(sweep, *range(4))
    view = view_arrays(sweep, Scheduler("squeue|9|RUNNING|None|x|n1\n"))
    assert view.members[4].state is RunState.RUNNING


def test_a_scheduler_that_does_not_answer_proves_no_loss(sweep):
    note(sweep, ALL)
    view = view_arrays(sweep, Scheduler(status=1, stderr=b"slurm_load_jobs error: timed out"))
    assert set(states(view)) == {RunState.UNKNOWN}
    assert view.members[0].why == "slurm_load_jobs error: timed out"
    forgotten = view_arrays(sweep, Scheduler())
    assert set(states(forgotten)) == {RunState.LOST}


def test_a_preempted_member_that_waits_again_waits(sweep):
    note(sweep, ALL)
    succeed(sweep, *range(4))
    end(sweep, 4, RunState.PREEMPTED)
    view = view_arrays(sweep, Scheduler("squeue|7_4|PENDING|BeginTime|N/A|\n"))
    assert view.members[4].state is RunState.WAITING
    view = view_arrays(sweep, Scheduler("squeue|7_4|COMPLETED|None|x|n1\n"))
    assert view.members[4].state is RunState.PREEMPTED


def test_elements_of_pbs(sweep):
    note(sweep, MemberArray(job_id="12[].ctl", members=(0, 1, 2, 3, 4)), engine="pbs")
    succeed(sweep, *range(3))
    jobs = {
        "12[].ctl": {"job_state": "B"},
        "12[3].ctl": {"job_state": "R"},
        "12[4].ctl": {"job_state": "Q", "comment": "Not Running: no room"},
    }
    scheduler = Scheduler(json.dumps({"Jobs": jobs}))
    view = view_arrays(sweep, scheduler)
    assert scheduler.asked == [["qstat", "-t", "-x", "-f", "-F", "json", "12[].ctl"]]
    assert [m.state for m in view.members[3:]] == [RunState.RUNNING, RunState.WAITING]
