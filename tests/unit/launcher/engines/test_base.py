"""What dialects have in common, side by side: names, arrays, and when a job has to end."""

import contextlib
import json
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.errors import UsageError
from torchmuster.launcher.engines import base
from torchmuster.launcher.engines.base import EngineError, clock_seconds
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.model.job import JobArray, JobRequest, JobState, NodeChunk


def test_site_lines_come_last_and_replace_ours_by_option():
    ours = ["-l select=1", "-l place=scatter", "-q a", "--mem=1M"]
    site = ["#PBS -l place=excl", "-q b", "-l software=x", "--mem 2M"]
    assert base.assemble("PBS", ours, site) == [
        "#PBS -l select=1",
        "#PBS -l place=excl",
        "#PBS -q b",
        "#PBS -l software=x",
        "#PBS --mem 2M",
    ]


@pytest.mark.parametrize(
    ("seconds", "minutes"), [(0, 1), (1, 1), (60, 1), (60.5, 2), (3600, 60), (3601, 61)]
)
def test_minutes_are_rounded_up(seconds, minutes):
    assert base.minutes_up(seconds) == minutes


@pytest.mark.parametrize(("size", "mebibytes"), [(1, 1), (1 << 20, 1), ((1 << 20) + 1, 2)])
def test_mebibytes_are_rounded_up(size, mebibytes):
    assert base.mebibytes_up(size) == mebibytes


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("train", "train"),
        ("a b/c", "a_b_c"),
        ("7up", "m7up"),
        ("", "muster"),
        ("ü", "m_"),
        ("9" * 30, "m" + "9" * 14),
    ],
)
def test_name_is_one_that_every_scheduler_takes(name, clean):
    assert base.clean_name(name, 15) == clean


def test_line_of_the_site_that_is_no_option_says_how_to_write_it():
    with pytest.raises(UsageError) as caught:
        base.assemble("SBATCH", [], ["mem=3"])
    assert "#SBATCH" in caught.value.fix


@pytest.mark.parametrize("text", ["", "soon", "1e9", "-5", "9" * 13])
def test_end_that_is_no_time_is_no_end(text):
    assert base.ends_at({base.ENDS_AT: text}) is None


JOB = JobRequest(name="s", chunks=(NodeChunk(),), head=("/x",), log_path="/s/job.log")


@pytest.mark.parametrize(
    ("engine", "array", "words"),
    [
        ("slurm", JobArray(size=1000), ["--array=0-999"]),
        ("slurm", JobArray(size=1000, parallel=8), ["--array=0-999%8"]),
        ("pbs", JobArray(size=1000), ["-J", "0-999"]),
        ("pbs", JobArray(size=2, parallel=1), ["-J", "0-1%1"]),
    ],
)
def test_one_command_submits_all_elements(engine, array, words):
    dialect, job = load_dialect(engine), replace(JOB, array=array)
    plain, argv = (dialect.submit_argv(one, "/s/job.sh") for one in (JOB, job))
    log = {"slurm": "/s/job.log.%a", "pbs": "/s/job.log.^array_index^"}[engine]
    assert [word for word in argv if word not in (*plain, "-o", log)] == words
    told = "\n".join([dialect.script(job), *argv])
    assert log in told, "each element has an output of its own"
    assert "/s/job.log\n" not in told


def test_elements_that_wait_together_are_told_in_one_line():
    views = load_dialect("slurm").array_views(
        "squeue|7_[2-4,9%2]|PENDING|Priority|N/A|\nsqueue|7_1|RUNNING|None|x|n[1-2]\n"
        "8|7_0|COMPLETED|0:0|None|x|n1\nsqueue|5|RUNNING|None|x|n1\n"
    )
    assert {key: view.state for key, view in views.items()} == {
        ("7", 0): JobState.SUCCEEDED,
        ("7", 1): JobState.RUNNING,
        **{("7", number): JobState.PENDING for number in (2, 3, 4, 9)},
    }


@given(st.text() | st.text("0123456789-,%[]"))
def test_any_text_has_elements_or_is_an_error_of_the_scheduler(text):
    with contextlib.suppress(EngineError):
        views = load_dialect("slurm").array_views(f"squeue|7_{text}|RUNNING|None|x|n1")
        assert all(view.state is JobState.RUNNING for view in views.values())


@pytest.mark.parametrize(
    ("engine", "asked", "said", "limit"),
    [
        ("slurm", "scontrol show config", "MaxArraySize   = 1001\nMaxBatchRequeue = 5\n", 1001),
        ("slurm", "scontrol show config", "", None),
        ("pbs", "qstat -B -f", "Server: ctl\n    max_array_size = 500\n", 500),
        ("pbs", "qstat -B -f", "Server: ctl\n    server_state = Active\n", None),
    ],
)
def test_a_scheduler_says_how_large_an_array_may_be(engine, asked, said, limit):
    dialect = load_dialect(engine)
    assert " ".join(dialect.array_limit_argv()) == asked
    assert dialect.array_limit(said) == limit


@pytest.mark.parametrize(
    ("engine", "job_id", "element"), [("slurm", "12", "12_3"), ("pbs", "12[].ctl", "12[3].ctl")]
)
def test_one_element_can_be_cancelled(engine, job_id, element):
    dialect = load_dialect(engine)
    assert dialect.element_id(job_id, 3) == element
    assert element in dialect.cancel_argv(element)


NOW = 1_795_170_486.0
STARTED = time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(NOW - 60))
TWO_MINUTES = {"walltime": "00:02:00"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("39", 39),
        ("0:39", 39),
        ("01:02:03", 3723),
        ("1-00:00:00", 86400),
        ("2-03", 183600),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("-1:00", None),
        ("", None),
    ],
)
def test_clock_is_read(text, seconds):
    assert clock_seconds(text) == seconds


@pytest.mark.parametrize(
    ("engine", "said", "left_s"),
    [
        ("slurm", "left|1:30\n", 90),
        ("slurm", "left|1:30\nleft|0:30\n", 30),  # components of a heterogeneous job
        ("slurm", "left|INVALID\n", None),
        ("slurm", "JobId=7 JobName=x RunTime=00:01:00 TimeLimit=00:05:00 TimeMin=N/A", 240),
        ("slurm", "JobId=7 RunTime=00:01:00 TimeLimit=UNLIMITED", None),
        ("pbs", {"Resource_List": TWO_MINUTES}, 120),
        ("pbs", {"Resource_List": TWO_MINUTES, "stime": STARTED}, 60),
        ("pbs", {"Resource_List": TWO_MINUTES, "resources_used": {"walltime": "00:00:50"}}, 70),
        ("pbs", {"Resource_List": {"ncpus": 2}}, None),
        ("pbs", f"Job Id: 1\n    Resource_List.walltime = 00:02:00\n    stime = {STARTED}\n", 60),
    ],
)
def test_a_scheduler_tells_the_end_of_a_job(engine, said, left_s):
    text = said if isinstance(said, str) else json.dumps({"Jobs": {"1.ctl": said}})
    end = load_dialect(engine).job_end(text, NOW)
    assert end == (None if left_s is None else NOW + left_s)
