"""A run inside a job: what it finds out for its agents, and why a scheduler ended it; the lines of PBS are recorded ones."""

import os
import sys

import pytest

from kit.values import command_output, run_plan, run_result
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report
from torchmuster.launcher.engines.allocation import OwnJob
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.facts.collect import ALLOCATION_ENDS_AT
from torchmuster.launcher.jobs import conduct
from torchmuster.launcher.jobs.conduct import describe_difference, elf_machine, fit_interpreter
from torchmuster.launcher.jobs.jobs import mark_cancelled
from torchmuster.launcher.model.job import Allocation


def job_of(engine):
    return OwnJob(dialect=load_dialect(engine), allocation=Allocation(job_id="7", nodes=()))


@pytest.mark.parametrize(
    ("engine", "answer", "ends_at"),
    [
        ("slurm", command_output("left|10:00\n"), "1600"),
        ("pbs", command_output("qstat: cannot connect", status=111), ""),
    ],
    ids=["it tells", "it does not"],
)
def test_the_end_that_a_scheduler_tells_is_left_to_the_agents(monkeypatch, engine, answer, ends_at):
    monkeypatch.setenv(ALLOCATION_ENDS_AT, "")
    monkeypatch.setattr(conduct.time, "time", lambda: 1000.0)
    conduct.note_the_end(job_of(engine), lambda argv: answer)
    assert os.environ[ALLOCATION_ENDS_AT] == ends_at


@pytest.mark.parametrize(("mode", "is_the_end"), [("CANCEL", True), ("REQUEUE", False)])
def test_the_partition_says_whether_a_preempted_job_comes_back(monkeypatch, mode, is_the_end):
    def ask(argv):
        job = "JobId=7 Requeue=1 Partition=main"
        rules = f"PartitionName=main PreemptMode={mode} State=UP"
        return command_output(job if "job" in argv else rules)

    monkeypatch.setattr(conduct, "ask_quickly", ask)
    assert conduct.is_preempted_for_good(job_of("slurm")) is is_the_end
    assert not conduct.is_preempted_for_good(job_of("pbs"))  # it is not asked


MEMORY = "=>> PBS: job killed: mem 799544kb exceeded limit 716800kb"
CPUS = "=>> PBS: job killed: ncpus 1.8 exceeded limit 1 (burst)"
MOM = "=>> PBS: job killed: node 1 (n2) requested job die, code 15009"
PREEMPTED = (
    "slurmstepd: error: *** JOB 405 ON n1 CANCELLED AT 2026-11-27T10:11:12 DUE TO PREEMPTION ***"
)


SCANCELLED = "slurmstepd: error: *** JOB 6 ON n1 CANCELLED AT 2026-11-28T02:11:20 ***"


def stopped(state=RunState.CANCELLED, code=143):
    report = Report(error="the run was stopped with SIGTERM", because=("the system asked for it",))
    return run_result(state, code, elapsed_s=9.0, report=report)


SAVED = stopped(RunState.PREEMPTED, 75)


def write(run_dir, *lines):
    with open(run_dir.job_log, "a") as log:
        log.writelines(f"{line}\n" for line in lines)


def told(run_dir, before, *, engine="pbs", output=None, since=0, comment=""):
    """Return the result of the run with what the scheduler has said."""
    output = output or run_dir.job_log
    dialect = load_dialect(engine)
    return conduct.with_scheduler_reason(before, run_dir, dialect, output, since, lambda: comment)


@pytest.mark.parametrize(
    ("line", "state", "code", "error", "goes_on"),
    [
        (MEMORY, RunState.FAILED, 137, "the job used more memory than it has", False),
        (CPUS, RunState.FAILED, 143, "the job used more CPUs than it has", False),
        (MOM, RunState.PREEMPTED, 75, "PBS ended the job: it has lost a node", True),
        (PREEMPTED, RunState.PREEMPTED, 75, "Slurm preempted the job", False),
        (SCANCELLED, RunState.CANCELLED, 143, "the job was cancelled, as by scancel", False),
    ],
)
@pytest.mark.parametrize("before", [stopped(), SAVED])
def test_the_schedulers_own_line_is_the_first_cause(
    run_dir, line, state, code, error, goes_on, before
):
    write(run_dir, "step 7", line, "Terminated")
    found = told(run_dir, before, engine="slurm" if line.startswith("slurmstepd") else "pbs")
    assert (found.state, found.exit_code, found.node_was_lost) == (state, code, goes_on)
    assert (found.report.error, found.report.because) == (error, (line,))
    assert found.report.hint


def test_a_line_of_an_earlier_job_of_the_run_says_nothing_of_this_one(run_dir):
    write(run_dir, MEMORY, "step 8")
    assert told(run_dir, stopped(), since=len(MEMORY) + 1) == stopped()


@pytest.mark.parametrize("text", ["", f"rank 0: I have read {MEMORY}"])
def test_what_a_script_prints_of_it_is_no_word_of_the_scheduler(run_dir, text):
    write(run_dir, text)
    assert told(run_dir, stopped()) == stopped()
    assert told(run_dir, stopped(), output=f"{run_dir.path}/none") == stopped()


def test_a_run_that_has_ended_otherwise_or_was_cancelled_by_the_user_keeps_its_end(run_dir):
    write(run_dir, MEMORY)
    over = stopped(RunState.TIMED_OUT)
    assert told(run_dir, over) == over
    mark_cancelled(run_dir)
    assert told(run_dir, stopped()) == stopped()


def test_who_deleted_the_job_is_asked_where_the_output_says_nothing(run_dir):
    comment = "Job run at Sat Nov 28 at 09:24 on (n3:ncpus=1) and terminated by lab@ctl"
    found = told(run_dir, SAVED, comment=comment)
    assert (found.state, found.exit_code) == (RunState.CANCELLED, 143)
    assert found.report.error == "the job was deleted, as by qdel"
    assert found.report.because == (comment,)
    assert told(run_dir, SAVED, comment=comment.partition(" and ")[0]) == SAVED
    write(run_dir, MEMORY)
    assert told(run_dir, SAVED, comment=comment).state is RunState.FAILED


def elf(path, number):
    path.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00" + number.to_bytes(2, "little"))
    path.chmod(0o755)
    return str(path)


def test_another_processor_is_said():
    line = describe_difference("x86_64", "n1", "aarch64")
    assert line == "login node is x86_64, n1 is aarch64: the job uses Python from its own PATH"
    assert describe_difference("x86_64", "n1", "x86_64") is None
    assert describe_difference(None, "n1", "x86_64") is None


def test_a_programs_processor_is_read_from_it(tmp_path):
    assert elf_machine(os.path.realpath(sys.executable)) == os.uname().machine
    assert elf_machine(elf(tmp_path / "arm", 183)) == "aarch64"
    (tmp_path / "script").write_text("#!/bin/sh\n")
    assert elf_machine(str(tmp_path / "script")) is None
    assert elf_machine(str(tmp_path / "missing")) is None


def test_an_interpreter_of_another_processor_gives_way_to_the_nodes_own(tmp_path):
    foreign, own = elf(tmp_path / "foreign", 183), elf(tmp_path / "own", 62)
    which = {foreign: foreign, "python3": own}.get
    plan = fit_interpreter(run_plan(python=(foreign, "-u")), "x86_64", which)
    assert plan.program.python == (own, "-u")


def test_an_interpreter_that_fits_or_can_not_be_told_stays(tmp_path):
    own = elf(tmp_path / "own", 62)
    (tmp_path / "uv").write_text("#!/bin/sh\n")
    for words in ((own,), (str(tmp_path / "uv"), "run"), ("/missing/python",)):
        plan = run_plan(python=words)
        assert fit_interpreter(plan, "x86_64", {own: own, "python3": "/p3"}.get) == plan
