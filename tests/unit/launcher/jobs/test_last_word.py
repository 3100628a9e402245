"""Why a scheduler ended a job, from what it has written into the job's output; the lines of PBS are recorded ones."""

import pytest

from kit.values import run_result
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.jobs.conduct import with_scheduler_reason
from torchmuster.launcher.jobs.jobs import mark_cancelled

PBS = load_dialect("pbs")
MEMORY = "=>> PBS: job killed: mem 799544kb exceeded limit 716800kb"
CPUS = "=>> PBS: job killed: ncpus 1.8 exceeded limit 1 (burst)"
MOM = "=>> PBS: job killed: node 1 (n2) requested job die, code 15009"
PREEMPTED = (
    "slurmstepd: error: *** JOB 405 ON n1 CANCELLED AT 2026-11-27T10:11:12 DUE TO PREEMPTION ***"
)


def stopped(state=RunState.CANCELLED, code=143):
    report = Report(error="the run was stopped with SIGTERM", because=("the system asked for it",))
    return run_result(state, code, elapsed_s=9.0, report=report)


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(str(tmp_path))


def write(run_dir, *lines):
    with open(run_dir.job_log, "a") as log:
        log.writelines(f"{line}\n" for line in lines)


@pytest.mark.parametrize(
    ("line", "state", "code", "error", "goes_on"),
    [
        (MEMORY, RunState.FAILED, 137, "the job used more memory than it has", False),
        (CPUS, RunState.FAILED, 143, "the job used more CPUs than it has", False),
        (MOM, RunState.PREEMPTED, 75, "PBS ended the job: it has lost a node", True),
        (PREEMPTED, RunState.PREEMPTED, 75, "Slurm preempted the job", False),
    ],
)
@pytest.mark.parametrize("before", [stopped(), stopped(RunState.PREEMPTED, 75)])
def test_the_schedulers_own_line_is_the_first_cause(
    run_dir, line, state, code, error, goes_on, before
):
    write(run_dir, "step 7", line, "Terminated")
    engine = "slurm" if line is PREEMPTED else "pbs"
    told = with_scheduler_reason(before, run_dir, load_dialect(engine), run_dir.job_log, 0)
    assert (told.state, told.exit_code, told.node_was_lost) == (state, code, goes_on)
    assert (told.report.error, told.report.because) == (error, (line,))
    assert told.report.hint


def test_a_line_of_an_earlier_job_of_the_run_says_nothing_of_this_one(run_dir):
    write(run_dir, MEMORY)
    since = len(MEMORY) + 1
    write(run_dir, "step 8")
    assert with_scheduler_reason(stopped(), run_dir, PBS, run_dir.job_log, since) == stopped()


@pytest.mark.parametrize("text", ["", f"rank 0: I have read {MEMORY}"])
def test_what_a_script_prints_of_it_is_no_word_of_the_scheduler(run_dir, text):
    write(run_dir, text)
    assert with_scheduler_reason(stopped(), run_dir, PBS, run_dir.job_log, 0) == stopped()
    assert with_scheduler_reason(stopped(), run_dir, PBS, f"{run_dir.path}/none", 0) == stopped()


def test_what_the_user_has_cancelled_is_cancelled(run_dir):
    write(run_dir, MEMORY)
    mark_cancelled(run_dir)
    assert with_scheduler_reason(stopped(), run_dir, PBS, run_dir.job_log, 0) == stopped()


def test_a_run_that_has_ended_otherwise_keeps_its_end(run_dir):
    write(run_dir, MEMORY)
    over = stopped(RunState.TIMED_OUT)
    assert with_scheduler_reason(over, run_dir, PBS, run_dir.job_log, 0) == over


def test_who_deleted_the_job_is_asked_where_the_output_says_nothing(run_dir):
    comment = "Job run at Sat Nov 28 at 09:24 on (n3:ncpus=1) and terminated by lab@ctl"
    saved = stopped(RunState.PREEMPTED, 75)
    told = with_scheduler_reason(saved, run_dir, PBS, run_dir.job_log, 0, lambda: comment)
    assert (told.state, told.exit_code) == (RunState.CANCELLED, 143)
    assert told.report.error == "the job was deleted, as by qdel"
    assert told.report.because == (comment,)
    runs = comment.partition(" and ")[0]
    assert with_scheduler_reason(saved, run_dir, PBS, run_dir.job_log, 0, lambda: runs) == saved
    write(run_dir, MEMORY)
    told = with_scheduler_reason(saved, run_dir, PBS, run_dir.job_log, 0, lambda: comment)
    assert told.state is RunState.FAILED


def test_scancel_is_a_cancel(run_dir):
    slurm = load_dialect("slurm")
    line = "slurmstepd: error: *** JOB 6 ON n1 CANCELLED AT 2026-11-28T02:11:20 ***"
    write(run_dir, line)
    told = with_scheduler_reason(
        stopped(RunState.PREEMPTED, 75), run_dir, slurm, run_dir.job_log, 0
    )
    assert (told.state, told.exit_code, told.report.because) == (RunState.CANCELLED, 143, (line,))
