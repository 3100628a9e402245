"""What holds for every dialect; `tests/unit/launcher/engines` has what is each one's own.

An engine of another package goes through it too: pytest tests/engines --dialect PACKAGE.MODULE
(docs/writing-an-engine.md).
"""

import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.command import ran
from torchmuster.core.model.links import ResubmitMethod
from torchmuster.errors import UsageError
from torchmuster.launcher.engines.base import EngineError, NodeStart
from torchmuster.launcher.model.job import AfterKind, JobDependency, JobRequest, JobState, NodeChunk

JOB = JobRequest(
    name="train",
    chunks=(NodeChunk(num_nodes=2, cpus=4, gpus=1), NodeChunk(cpus=1)),
    head=("$PYTHON", "-I", "/opt/main.py", "it's a `path` $HOME"),
    log_path="/runs/job.log",
    time_limit_s=90,
)
ALL_TEXTS = ("queue", "account", "log_path", "python", "about")


def job_id(contract, number="41"):
    """Return a job's id in the form that this engine gives."""
    return contract.get("job", "{}").format(number)


def directives(script, contract):
    return [line for line in script.splitlines() if line.startswith(contract["directive"])]


def test_script_is_valid_shell(of_scripts):
    done = ran(["bash", "-n"], input=of_scripts.script(JOB))
    assert (done.returncode, done.stderr) == (0, "")


def test_directives_stand_before_the_first_command(of_scripts, contract):
    lines = of_scripts.script(JOB).splitlines()
    blank = lines.index("")
    assert directives(of_scripts.script(JOB), contract) == lines[1:blank]


@given(words=st.lists(st.text(st.characters(blacklist_categories=["Cc", "Cs"]), max_size=9)))
def test_head_gets_exactly_its_words(of_scripts, words):
    job = replace(JOB, head=("/bin/true", *words))
    assert shlex.split(of_scripts.script(job).splitlines()[-1])[2:] == words


def test_script_runs_its_head_with_the_end_in_the_environment(of_scripts, tmp_path):
    job = replace(
        JOB,
        head=("$PYTHON", "-c", 'echo "$MUSTER_JOB_ENDS_AT" "$1" "$SITE"', "x", "it's"),
        python="/bin/bash",
        setup=("export SITE=yes",),
    )
    path = tmp_path / "job.sh"
    path.write_text(of_scripts.script(job))
    done = subprocess.run(["/bin/bash", str(path)], text=True, capture_output=True, timeout=60)
    assert re.fullmatch(r"\d{10} it's yes\n", done.stdout), done


@pytest.mark.parametrize("key", ALL_TEXTS)
def test_newline_in_a_value_is_refused(of_scripts, key):
    with pytest.raises(UsageError, match=r"can't be used|newline"):
        of_scripts.script(replace(JOB, **{key: "/a\nrm -rf /b"}))


@pytest.mark.parametrize("key", ["setup", "head", "directives"])
def test_newline_in_a_line_is_refused(of_scripts, key):
    with pytest.raises(UsageError, match="newline"):
        of_scripts.script(replace(JOB, **{key: ("-a\n#SBATCH --uid=0",)}))


@pytest.mark.parametrize("value", ["a b", "a#b", "a'b", 'a"b', "a\\b", "a\tb"])
def test_value_that_a_directive_would_split_is_refused(of_scripts, value):
    with pytest.raises(UsageError):
        of_scripts.script(replace(JOB, queue=value))


def test_line_of_the_site_that_is_no_option_is_refused(of_scripts):
    with pytest.raises(UsageError, match="is not an option"):
        of_scripts.script(replace(JOB, directives=("walltime=1",)))


def test_relative_log_path_is_refused(of_scripts):
    with pytest.raises(UsageError, match="not absolute"):
        of_scripts.script(replace(JOB, log_path="job.log"))


def test_log_path_of_any_form_reaches_the_scheduler_once(of_scripts, contract):
    for path in ("/runs/a.log", "/my runs/a.log", "/r/#1.log"):
        job = replace(JOB, log_path=path)
        told = [line for line in directives(of_scripts.script(job), contract) if path in line]
        told += [word for word in of_scripts.submit_argv(job, "/r/job.sh") if path in word]
        assert len(told) == 1, (path, told)


def test_whole_minutes_are_asked_for_rounded_up(of_scripts):
    script = of_scripts.script(replace(JOB, time_limit_s=3541))
    assert "--time=60\n" in script or "walltime=01:00:00\n" in script


def test_dependencies_are_on_the_command_line(of_scripts):
    job = replace(JOB, after=(JobDependency(job_id="41"),))
    assert any("afterok:41" in word for word in of_scripts.submit_argv(job, "/r/job.sh"))
    assert of_scripts.script(job) == of_scripts.script(JOB)


def test_script_path_is_never_an_option(dialect):
    argv = dialect.submit_argv(JOB, "--wrap")
    assert "./--wrap" in argv
    assert "--wrap" not in argv


@pytest.mark.parametrize("stdout", ["", "Welcome to the cluster\n", "error: 12 things\n"])
def test_output_without_a_job_id_is_an_error(dialect, stdout):
    with pytest.raises(EngineError, match=r"no job id|can't be read"):
        dialect.job_id(stdout)


def test_nothing_is_asked_about_no_jobs(dialect):
    assert dialect.status_argv([]) == []
    assert dialect.views("") == {}


def test_one_command_asks_about_many_jobs(dialect, contract):
    jobs = [job_id(contract, number) for number in ("1", "2", "3")]
    for argv in dialect.status_argv(jobs)[:1]:
        assert "2" in re.split(r"[ ,=]", " ".join(argv))


def test_outside_of_a_job_there_is_no_allocation(dialect):
    assert dialect.allocation({"HOME": "/root", "HOSTNAME": "n1"}, Path.read_text) is None


def test_command_for_another_node_starts_with_an_absolute_path(of_scripts):
    with pytest.raises(ValueError, match="absolute path"):
        of_scripts.node_argv(NodeStart(node="n2", command=("python3", "x")))


def test_command_for_another_node_stands_at_the_end(of_scripts):
    command = ("/usr/bin/env", "A=b c", "x'y")
    argv = of_scripts.node_argv(NodeStart(node="n2", slot=1, command=command))
    assert tuple(argv[-3:]) == command


def test_unknown_refusal_keeps_the_schedulers_words(dialect):
    report = dialect.explain_refusal("warning: a\nsubmit filter: your disk is full\n")
    assert "submit filter: your disk is full" in report.because
    assert "muster run --dry-run" in report.hint, "most jobs are runs"


def test_silent_refusal_is_said_to_be_silent(dialect):
    assert "printed nothing" in dialect.explain_refusal("").because[0]


def test_no_table_makes_a_success_of_an_unknown_word(dialect, contract):
    (view,) = dialect.views(contract["unknown"]).values()
    if contract["directive"] is None:
        # An object may have any further condition: its ends have names of their own.
        assert (view.state, view.exit_code) == (JobState.PENDING, None)
        return
    assert (view.state, view.exit_code) == (JobState.UNKNOWN, None)
    assert "says" in view.reason


def test_every_engine_has_a_way_to_go_on(of_scripts):
    assert of_scripts.resubmit_methods
    assert ResubmitMethod.CHAIN not in of_scripts.resubmit_methods, "that is the client's"


def test_a_job_is_started_again_by_its_own_id(dialect):
    if ResubmitMethod.REQUEUE in dialect.resubmit_methods:
        assert dialect.requeue_argv("41")[-1] == "41"


def test_the_next_link_waits_for_any_end_of_the_one_before(of_scripts):
    job = replace(JOB, after=(JobDependency(job_id="41", kind=AfterKind.ANY),))
    assert any("afterany:41" in word for word in of_scripts.submit_argv(job, "/r/job.sh"))


def test_the_end_of_a_job_is_asked_by_its_id(dialect, contract):
    for argv in dialect.end_argv(job_id(contract)):
        assert any("41" in word for word in argv)


@pytest.mark.parametrize("stdout", ["", "Welcome\n", "{}", "left|UNLIMITED", '{"Jobs": {"1": 7}}'])
def test_an_answer_without_an_end_has_none(dialect, stdout):
    assert dialect.job_end(stdout, 100.0) is None
