"""Signals: who sent them, and whom they only tore down."""

import pytest

from unit.diagnose.explain.logs import (
    PEER,
    TIMED_OUT,
    TOLD_TO_END,
    cause_of,
    explain,
    failed,
    traceback_of,
)

TABLE = "  traceback : Signal 15 (SIGTERM) received by PID 8\n"


def test_rank_that_its_launcher_ended_after_another_had_failed_was_not_cancelled(tmp_path):
    text = traceback_of(PEER, rank=0) + failed(1) + TABLE
    assert cause_of(tmp_path, job=text) == "peer-lost"


def test_launcher_that_was_told_to_end_was_cancelled(tmp_path):
    assert cause_of(tmp_path, job="step 1\n" + TOLD_TO_END) == "cancelled"


@pytest.mark.parametrize("said", ["Out of memory:", "Memory cgroup out of memory:"])
def test_kernel_s_word_on_memory_is_certain_only_if_something_was_killed(tmp_path, said):
    kernel = f"{said} Killed process 9 (python)\n"
    assert explain(tmp_path, dmesg=kernel).first.confidence.value == "medium"
    both = explain(tmp_path, dmesg=kernel, job=failed(-9)).first
    assert (both.cause, both.confidence.value) == ("out-of-memory", "high")


def test_exit_code_one_after_a_lost_peer_is_no_silent_end(tmp_path):
    cut = f"[rank0]: {PEER}\n" + failed(1)
    assert cause_of(tmp_path, n1=cut) == "peer-lost"
    assert cause_of(tmp_path, n1=cut, n2="step 1\n" + failed(17)) == "exit-code"


def test_job_that_was_ended_after_its_ranks_had_waited_in_vain_was_stuck(tmp_path):
    text = "world size 4\n" + traceback_of(TIMED_OUT, rank=0) + TOLD_TO_END
    assert cause_of(tmp_path, job=text) == "rank-missing-in-collective"


@pytest.mark.parametrize(("rank", "cause"), [(3, "aborted"), (2, "peer-lost")])
def test_abort_of_another_rank_than_that_which_lost_its_peer_is_the_cause(tmp_path, rank, cause):
    table = "Root Cause (first observed failure):\n  rank      : 2 (local_rank: 0)\n  exitcode  : -6 (pid: 9)\n"
    assert cause_of(tmp_path, job=traceback_of(PEER, rank=rank) + failed(-6) + table) == cause


def row(rank, code, words):
    return (
        f"[{rank}]:\n  time      : 2026-11-30_14:05:37\n  host      : localhost\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: {rank + 20})\n"
        f"  error_file: <N/A>\n  traceback : {words}\n"
    )


def ended_by_torchrun(rank):
    return row(rank, -15, f"Signal 15 (SIGTERM) received by PID {rank + 20}")


ROOT_CAUSE = "-----\nRoot Cause (first observed failure):\n"
SEE = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
SILENT = "=====\ntrain.py FAILED\n-----\nFailures:\n" + ended_by_torchrun(0) + ended_by_torchrun(1)
END_OF_JOB = SILENT + ROOT_CAUSE + row(2, 1, SEE) + "=====\n"


@pytest.mark.parametrize("num_lines", [9, 12, 17, 24, 99])
@pytest.mark.parametrize("before", ["", traceback_of(PEER, rank=0), failed(1)])
def test_end_of_a_log_names_the_rank_that_torchrun_names_and_nobody_outside(
    tmp_path, num_lines, before
):
    tail = "".join((before + END_OF_JOB).splitlines(keepends=True)[-num_lines:])
    verdict = explain(tmp_path, tail=tail)
    assert verdict.first.cause == "exit-code"
    assert verdict.first.error.startswith("torchrun's table names rank 2 first (exit code 1)")
    assert "rank 2 above" in verdict.first.hint
    assert len(verdict.found) == 1


def test_rank_whose_words_are_there_is_not_said_to_lack_them(tmp_path):
    text = traceback_of("KeyError: 'y'", rank=2) + traceback_of(PEER, rank=0) + END_OF_JOB
    verdict = explain(tmp_path, job=text)
    assert verdict.first.error == "rank 2 failed first: KeyError: 'y'"
    assert len(verdict.found) == 1  # why the connections went is in these logs
    assert cause_of(tmp_path, n1=traceback_of(PEER, rank=2) + END_OF_JOB) == "peer-lost"


def test_other_exit_code_says_more_than_one(tmp_path):
    first = explain(tmp_path, tail=SILENT + ROOT_CAUSE + row(2, 17, SEE)).first
    assert first.error.startswith("torchrun's table names rank 2 first (exit code 17)")
    assert first.confidence.value == "medium"


def test_table_without_its_first_failure_proves_no_end_from_outside(tmp_path):
    assert cause_of(tmp_path, job=SILENT) != "cancelled"


def test_first_failure_by_sigterm_is_a_rank_s_end_not_its_launcher_s(tmp_path):
    first = explain(tmp_path, job=SILENT + ROOT_CAUSE + ended_by_torchrun(2)).first
    assert first.error == "the job was ended from outside: a rank got SIGTERM"
