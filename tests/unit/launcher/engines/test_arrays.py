"""Job arrays: how they are asked for, and how their elements are read."""

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.model.job import JobArray, JobRequest, JobState, NodeChunk

JOB = JobRequest(name="s", chunks=(NodeChunk(),), head=("/x",), log_path="/s/job.log")


@pytest.mark.parametrize(
    ("engine", "array", "words"),
    [
        ("slurm", JobArray(size=1000), ["--array=0-999"]),
        ("slurm", JobArray(size=1000, parallel=8), ["--array=0-999%8"]),
        ("slurm", None, []),
        ("pbs", JobArray(size=1000), ["-J", "0-999"]),
        ("pbs", JobArray(size=2, parallel=1), ["-J", "0-1%1"]),
        ("pbs", None, []),
    ],
)
def test_one_command_submits_all_elements(engine, array, words):
    dialect = load_dialect(engine)
    plain = dialect.submit_argv(JOB, "/s/job.sh")
    argv = dialect.submit_argv(replace(JOB, array=array), "/s/job.sh")
    log = {"slurm": "/s/job.log.%a", "pbs": "/s/job.log.^array_index^"}[engine]
    assert [word for word in argv if word not in (*plain, "-o", log)] == words
    script = dialect.script(replace(JOB, array=array))
    if array is None:
        assert script == dialect.script(JOB)
    else:  # each element has an output of its own
        assert log in "\n".join([script, *argv])
        assert "/s/job.log\n" not in "\n".join([script, *argv])


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
    ("engine", "argv", "said", "limit"),
    [
        (
            "slurm",
            ["scontrol", "show", "config"],
            "MaxArraySize            = 1001\nMaxBatchRequeue = 5\n",
            1001,
        ),
        ("slurm", ["scontrol", "show", "config"], "", None),
        ("pbs", ["qstat", "-B", "-f"], "Server: ctl\n    max_array_size = 500\n", 500),
        ("pbs", ["qstat", "-B", "-f"], "Server: ctl\n    server_state = Active\n", None),
    ],
)
def test_a_scheduler_says_how_large_an_array_may_be(engine, argv, said, limit):
    dialect = load_dialect(engine)
    assert dialect.array_limit_argv() == argv
    assert dialect.array_limit(said) == limit


@pytest.mark.parametrize(
    ("engine", "job_id", "element"), [("slurm", "12", "12_3"), ("pbs", "12[].ctl", "12[3].ctl")]
)
def test_one_element_can_be_cancelled(engine, job_id, element):
    dialect = load_dialect(engine)
    assert dialect.element_id(job_id, 3) == element
    assert element in dialect.cancel_argv(element)
