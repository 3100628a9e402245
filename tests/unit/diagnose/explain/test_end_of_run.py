"""What the logs add to the head's report: a reason where it has none, soon, or nothing."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kit.records import lines, start
from kit.values import run_result, worker_end
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.failure import EndKind, PythonError
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report
from torchmuster.diagnose.explain import own_run
from unit.diagnose.explain.logs import traceback_of

DISK = "cp: error writing '/scratch/x': No space left on device\n"
PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:197."
STORE = "torch.distributed.DistNetworkError: The client socket has timed out after 3000ms while trying to connect to (n1, 29400)."


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Let the reading take more time than any machine needs."""
    monkeypatch.setattr(own_run, "_READ_LIMIT_S", 3600.0)


def explained(result, folder, *, limit_s=60.0):
    return own_run.explained(result, folder, limit_s=limit_s)


def end(kind=EndKind.EXIT_CODE, *, rank=1, error=None, **more):
    return worker_end(kind, rank=rank, node="n2", elapsed_s=9.0, error=error, **more)


def raised(words, traceback="Traceback"):
    name, _, message = words.partition(": ")
    error = PythonError(type_name=name, message=message, where="train.py:9", traceback=traceback)
    return end(EndKind.EXCEPTION, error=error)


def result_of(cause, *, state=RunState.FAILED, because=("its last lines:",)):
    report = Report(error="rank 1 ended with exit code 3", because=because, hint="see the logs")
    return run_result(state, 3, run_id="r-1", elapsed_s=9.0, report=report, cause=cause)


@pytest.fixture
def run_dir(tmp_path):
    def make(*logs, master="10.0.0.1:4000"):
        folder = RunDir(str(tmp_path))
        os.makedirs(os.path.join(folder.logs, "attempt-0"))
        for rank, text in enumerate(logs):
            with open(os.path.join(folder.logs, "attempt-0", f"rank-{rank}.log"), "w") as file:
                file.write(text)
        lines(folder.events, [{**start(0, 0), "master": master}])
        return folder

    return make


def test_first_line_stays_the_head_s_and_the_reason_comes_next(run_dir):
    report = explained(result_of(end(exit_code=3)), run_dir("step 1\n", "step 1\n" + DISK))
    assert report.error == "rank 1 ended with exit code 3"
    assert "disk is full" in report.because[0]
    assert "rank-1.log:2: cp: error writing" in report.because[1]
    assert report.because[-1] == "its last lines:"
    assert report.hint.endswith("see the logs")
    assert "make room" in report.hint


def test_line_behind_a_long_log_has_its_own_number(run_dir):
    text = "".join(f"step {k} of a long run without any news\n" for k in range(60_000))
    report = explained(result_of(end(exit_code=3)), run_dir("", text + DISK))
    assert "rank-1.log:60001: cp: error" in report.because[1]


def test_of_a_very_long_log_the_end_is_read_and_said_to_be_the_end(run_dir):
    folder = run_dir("", "")
    path = os.path.join(folder.logs, "attempt-0", "rank-1.log")
    with open(path, "w") as file:
        file.truncate(3 << 30)  # with a hole: no such room is taken
        file.seek(0)
        file.write("step 1\n" * 20_000)
        file.seek(0, os.SEEK_END)
        file.write("\n" + DISK)
    before = bytes_read()
    report = explained(result_of(end(exit_code=3)), folder)
    assert bytes_read() - before < 16 << 20
    assert "rank-1.log, last 512 KiB:" in report.because[1]


def bytes_read():
    """Return how much this process has read so far. Source: proc(5), rchar."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_report_comes_in_time_and_plain_when_the_disk_does_not_answer(run_dir, monkeypatch):
    released = threading.Event()

    def hang(*_):
        released.wait(30.0)
        return iter(())

    monkeypatch.setattr(own_run, "first_and_last", hang)
    result = result_of(end(exit_code=3))
    try:
        assert explained(result, run_dir("", DISK), limit_s=0.05) is result.report
    finally:
        released.set()


def test_bug_of_ours_leaves_the_report_and_one_line(run_dir, monkeypatch):
    def broken(*_):
        raise KeyError("oops")

    monkeypatch.setattr(own_run, "first_and_last", broken)
    report = explained(result_of(end(exit_code=3)), run_dir("", DISK))
    assert report.because == (
        "its last lines:",
        "the logs could not be explained (KeyError: 'oops')",
    )


@pytest.mark.parametrize(
    "cause",
    [
        end(EndKind.SIGNAL, signum=9, memory_evidence="oom_kill rose by 1"),
        end(EndKind.NODE_LOST),
        end(EndKind.HANG),
        raised("ValueError: bad label"),
        None,
    ],
)
def test_what_the_head_knows_better_is_left_as_it_is(run_dir, cause):
    result = result_of(cause)
    assert explained(result, run_dir("", DISK)) is result.report


@pytest.mark.parametrize("state", [RunState.SUCCEEDED, RunState.CANCELLED, RunState.PREEMPTED])
def test_run_that_did_not_fail_is_not_explained(run_dir, state):
    result = result_of(end(exit_code=3), state=state)
    assert explained(result, run_dir("", DISK)) is result.report


def test_victim_of_another_rank_gets_that_rank_s_reason(run_dir):
    logs = run_dir(traceback_of("ValueError: bad label 7", rank=0), traceback_of(PEER, rank=1))
    report = explained(result_of(raised(PEER), because=(PEER,)), logs)
    assert report.because[0] == "rank 0 failed first: ValueError: bad label 7"
    assert "rank-0.log:4" in report.because[1]


def test_ranks_that_only_say_that_others_have_gone_give_no_reason(run_dir):
    result = result_of(raised(PEER), because=(PEER,))
    assert explained(result, run_dir(PEER + "\n", PEER + "\n")) is result.report


def test_call_of_another_store_is_named_with_the_right_one(run_dir):
    cause = raised(STORE, "in _create_c10d_store")
    report = explained(result_of(cause, because=(STORE,)), run_dir("", STORE + "\n"))
    assert "calls a store at n1:29400; the launcher's is at 10.0.0.1:4000" in report.because[0]


def test_call_of_the_right_store_is_not_taken_for_another(run_dir):
    cause = raised(STORE, "in _create_c10d_store")
    logs = run_dir("", STORE + "\n", master="n1:29400")
    report = explained(result_of(cause, because=(STORE,)), logs)
    assert not any("the launcher's is at" in line for line in report.because)


def test_run_without_logs_keeps_its_report(tmp_path):
    result = result_of(end(exit_code=3))
    assert explained(result, RunDir(str(tmp_path))) is result.report


def test_logs_that_were_not_read_in_time_are_counted(run_dir, monkeypatch):
    monkeypatch.setattr(own_run, "MAX_RANKS", 2)
    report = explained(result_of(end(exit_code=3)), run_dir("step 1\n", DISK, "step 1\n"))
    assert "disk is full" in report.because[0]
    assert report.because[-1] == "2 of 3 logs were looked at; `muster explain r-1` reads all"


def test_a_report_that_a_job_has_explained_is_not_explained_again(run_dir):
    folder, result = run_dir("step 1\n", "step 1\n" + DISK), result_of(end(exit_code=3))
    once = explained(result, folder)
    assert once != result.report
    assert explained(replace(result, report=once), folder) == once
