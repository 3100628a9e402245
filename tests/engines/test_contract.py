"""What holds for every dialect; `tests/unit/engines` has what is each one's own."""

import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.engines.base import EngineError, NodeStart
from torchmuster.engines.registry import engine_entries, load_dialect
from torchmuster.errors import UsageError
from torchmuster.model.job import JobDependency, JobRequest, JobState, NodeChunk

DIALECTS = [load_dialect(name) for name in engine_entries(())]
EACH = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
JOB = JobRequest(
    name="train",
    chunks=(NodeChunk(num_nodes=2, cpus=4, gpus=1), NodeChunk(cpus=1)),
    head=("$PYTHON", "-I", "/opt/main.py", "it's a `path` $HOME"),
    log_path="/runs/job.log",
    time_limit_s=90,
)
ALL_TEXTS = ("queue", "account", "log_path", "python", "about")


def directives(script):
    return [line for line in script.splitlines() if line.startswith(("#SBATCH", "#PBS"))]


@EACH
def test_script_is_valid_shell(dialect):
    done = subprocess.run(["bash", "-n"], input=dialect.script(JOB), text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


@EACH
def test_directives_stand_before_the_first_command(dialect):
    lines = dialect.script(JOB).splitlines()
    blank = lines.index("")
    assert directives(dialect.script(JOB)) == lines[1:blank]


@EACH
@given(words=st.lists(st.text(st.characters(blacklist_categories=["Cc", "Cs"]), max_size=9)))
def test_head_gets_exactly_its_words(dialect, words):
    job = replace(JOB, head=("/bin/true", *words))
    assert shlex.split(dialect.script(job).splitlines()[-1])[2:] == words


@EACH
def test_script_runs_its_head_with_the_end_in_the_environment(dialect, tmp_path):
    job = replace(
        JOB,
        head=("$PYTHON", "-c", 'echo "$MUSTER_JOB_ENDS_AT" "$1" "$SITE"', "x", "it's"),
        python="/bin/bash",
        setup=("export SITE=yes",),
    )
    path = tmp_path / "job.sh"
    path.write_text(dialect.script(job))
    done = subprocess.run(["/bin/bash", str(path)], text=True, capture_output=True, timeout=60)
    assert re.fullmatch(r"\d{10} it's yes\n", done.stdout), done


@EACH
@pytest.mark.parametrize("key", ALL_TEXTS)
def test_newline_in_a_value_is_refused(dialect, key):
    with pytest.raises(UsageError, match=r"can't stand|newline"):
        dialect.script(replace(JOB, **{key: "/a\nrm -rf /b"}))


@EACH
@pytest.mark.parametrize("key", ["setup", "head", "directives"])
def test_newline_in_a_line_is_refused(dialect, key):
    with pytest.raises(UsageError, match="newline"):
        dialect.script(replace(JOB, **{key: ("-a\n#SBATCH --uid=0",)}))


@EACH
@pytest.mark.parametrize("value", ["a b", "a#b", "a'b", 'a"b', "a\\b", "a\tb"])
def test_value_that_a_directive_would_split_is_refused(dialect, value):
    with pytest.raises(UsageError):
        dialect.script(replace(JOB, queue=value))


@EACH
def test_line_of_the_site_that_is_no_option_is_refused(dialect):
    with pytest.raises(UsageError, match="no option"):
        dialect.script(replace(JOB, directives=("walltime=1",)))


@EACH
def test_relative_log_path_is_refused(dialect):
    with pytest.raises(UsageError, match="not absolute"):
        dialect.script(replace(JOB, log_path="job.log"))


@EACH
def test_log_path_of_any_form_reaches_the_scheduler_once(dialect):
    for path in ("/runs/a.log", "/my runs/a.log", "/r/#1.log"):
        job = replace(JOB, log_path=path)
        told = [line for line in directives(dialect.script(job)) if path in line]
        told += [word for word in dialect.submit_argv(job, "/r/job.sh") if path in word]
        assert len(told) == 1, (path, told)


@EACH
def test_whole_minutes_are_asked_for_rounded_up(dialect):
    script = dialect.script(replace(JOB, time_limit_s=3541))
    assert "--time=60\n" in script or "walltime=01:00:00\n" in script


@EACH
def test_dependencies_are_on_the_command_line(dialect):
    job = replace(JOB, after=(JobDependency(job_id="41"),))
    assert any("afterok:41" in word for word in dialect.submit_argv(job, "/r/job.sh"))
    assert dialect.script(job) == dialect.script(JOB)


@EACH
def test_script_path_is_never_an_option(dialect):
    assert dialect.submit_argv(JOB, "--wrap")[-1] == "./--wrap"


@EACH
@pytest.mark.parametrize("stdout", ["", "Welcome to the cluster\n", "error: 12 things\n"])
def test_output_without_a_job_id_is_an_error(dialect, stdout):
    with pytest.raises(EngineError, match="no job id"):
        dialect.job_id(stdout)


@EACH
def test_nothing_is_asked_about_no_jobs(dialect):
    assert dialect.status_argv([]) == []
    assert dialect.views("") == {}


@EACH
def test_one_command_asks_about_many_jobs(dialect):
    for argv in dialect.status_argv(["1", "2", "3"])[:1]:
        assert "2" in re.split(r"[ ,=]", " ".join(argv))


@EACH
def test_outside_of_a_job_there_is_no_allocation(dialect):
    assert dialect.allocation({"HOME": "/root", "HOSTNAME": "n1"}, Path.read_text) is None


@EACH
def test_command_for_another_node_starts_with_an_absolute_path(dialect):
    with pytest.raises(ValueError, match="absolute path"):
        dialect.node_argv(NodeStart(node="n2", command=("python3", "x")))


@EACH
def test_command_for_another_node_stands_at_the_end(dialect):
    command = ("/usr/bin/env", "A=b c", "x'y")
    argv = dialect.node_argv(NodeStart(node="n2", slot=1, command=command))
    assert tuple(argv[-3:]) == command


@EACH
def test_unknown_refusal_keeps_the_schedulers_words(dialect):
    report = dialect.explain_refusal("warning: a\nsubmit filter: your disk is full\n")
    assert "submit filter: your disk is full" in report.because


@EACH
def test_silent_refusal_is_said_to_be_silent(dialect):
    assert "printed nothing" in dialect.explain_refusal("").because[0]


@EACH
def test_no_table_makes_a_success_of_an_unknown_word(dialect):
    answers = {
        "slurm": "squeue|1|SPLENDID|None|N/A|\n",
        "pbs": '{"Jobs": {"1": {"job_state": "Z"}}}',
        "torque": "<Data><Job><Job_Id>1</Job_Id><job_state>Z</job_state></Job></Data>",
    }
    (view,) = dialect.views(answers[dialect.name]).values()
    assert (view.state, view.exit_code) == (JobState.UNKNOWN, None)
    assert "says" in view.reason
