"""Failure or not: what was said in the middle of a training that went on, and who went first without a word."""

import pytest

from unit.diagnose.explain.logs import cause_of, explain, traceback_of

FAILED = "E0314 09:00:00.000000 9 torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: {code}) local_rank: 0 (pid: 9) of binary: python\n"
PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.7.7.2]:197."
BARRIER = "E0314 09:00:01.000000 9 torch/distributed/elastic/agent/server/api.py:1] Error waiting on exit barrier. Elapsed: 0.01 seconds\n"
STORE = (
    "[W314 09:00:01.1 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=3): Broken pipe\n"
)


def steps(first, last):
    return "".join(f"step {number} loss 2.000\n" for number in range(first, last))


def test_exception_after_which_steps_go_on_was_caught(tmp_path):
    log = steps(0, 3) + traceback_of("ZeroDivisionError: x") + "skipping\n" + steps(3, 8)
    assert cause_of(tmp_path, n1=log, n2=log) == "healthy"


@pytest.mark.parametrize("last", [3, 4, 5])
def test_exception_after_which_others_end_their_step_was_not_caught(tmp_path, last):
    log = steps(0, 3) + traceback_of("ZeroDivisionError: x") + steps(3, last)
    assert cause_of(tmp_path, job=log) == "exception"


def test_frightening_word_before_further_steps_is_no_failure(tmp_path):
    assert (
        cause_of(tmp_path, job="ERROR tracker failed, will try again\n" + steps(0, 5)) == "healthy"
    )
    assert cause_of(tmp_path, job=steps(0, 5) + "ERROR tracker failed\n") == "reported"


def test_launcher_at_its_exit_barrier_shows_that_its_ranks_ended_first(tmp_path):
    head = steps(0, 5) + traceback_of(PEER, rank=0) + FAILED.format(code=1)
    verdict = explain(tmp_path, n1=head, n2=steps(0, 5) + STORE + BARRIER + STORE)
    assert verdict.first.cause == "rank-ended-early"
    assert "exit barrier" in verdict.first.evidence[1].text


def test_abort_of_who_had_not_lost_its_peer_is_the_cause(tmp_path):
    head = traceback_of(PEER, rank=0) + FAILED.format(code=1)
    other = steps(0, 3) + FAILED.format(code=-6) + STORE
    assert cause_of(tmp_path, n1=head, n2=other) == "aborted"


def test_abort_after_a_lost_peer_is_an_echo(tmp_path):
    head = traceback_of(PEER, rank=0) + FAILED.format(code=-6)
    assert cause_of(tmp_path, n1=head, n2=steps(0, 3)) != "aborted"


@pytest.mark.parametrize(
    "why", ["file too short", "invalid ELF header", "cannot open shared object file: No such file"]
)
def test_library_that_the_loader_refuses_is_no_missing_package(tmp_path, why):
    error = f"ImportError: /opt/lib/libstdc++.so.6: {why}"
    assert cause_of(tmp_path, job=traceback_of(error)) == "wrong-library"


def test_models_of_other_shape_are_told_from_any_exception(tmp_path):
    error = "RuntimeError: [1]: params[0] in this process with sizes [2, 5] appears not to match sizes of the same param in process 0."
    log = traceback_of(error, rank=1)
    assert cause_of(tmp_path, n1=traceback_of(PEER, rank=0), n2=log) == "models-differ"


@pytest.mark.parametrize("labelled", [True, False])
def test_trouble_that_its_writer_outlived_by_far_is_not_the_cause(tmp_path, labelled):
    busy = "OSError: [Errno 98] Address already in use\n"
    text = busy + steps(0, 30) + traceback_of("ValueError: x")
    if labelled:
        text = "".join(f"0: {line}\n" for line in text.splitlines())
    assert cause_of(tmp_path, job=text) == "exception"


@pytest.mark.parametrize(
    "word", ["0 errors, 0 failed shards, killed=0", "no errors found", "error rate: 0.12"]
)
def test_frightening_words_of_nothing_are_no_failure(tmp_path, word):
    assert cause_of(tmp_path, job=steps(0, 5) + word + "\n") == "healthy"


def test_exception_of_one_node_s_log_alone_is_not_certain(tmp_path):
    error = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x784 and 512x10)"
    text = "world size 4\n" + traceback_of(error, rank=1)
    assert explain(tmp_path, n1=text).first.confidence.value == "medium"
    whole = explain(tmp_path, job=text)
    assert whole.first.confidence.value == "high"


def test_exception_after_the_same_rank_had_lost_a_peer_is_not_certain(tmp_path):
    text = f"[rank0]: {PEER}\n" + traceback_of("TrainerError: x", rank=0)
    assert explain(tmp_path, job=text).first.confidence.value != "high"


@pytest.mark.parametrize(
    "line",
    [
        "wandb: Network error (ConnectionError), entering retry loop.",
        "failed samples: 0",
        (
            "Exception ignored in: <function Pool.__del__>\nTraceback (most recent call last):\n"
            '  File "/v/pool.py", line 3, in __del__\nAttributeError: closed'
        ),
        (
            "--- Logging error ---\nTraceback (most recent call last):\n"
            '  File "/v/logging.py", line 3, in emit\nValueError: I/O operation on closed file'
        ),
    ],
)
def test_last_line_that_is_no_end_of_the_job_makes_no_failure(tmp_path, line):
    assert cause_of(tmp_path, job=steps(0, 30) + line + "\n") == "healthy"


def test_a_second_launcher_of_a_node_that_was_sent_away_is_no_failure_of_a_run_that_succeeded(
    tmp_path,
):
    sent_away = (
        "muster: joined run 20261122-162144-loop-a48d as n2\n"
        "muster: refused an agent from n1: the run has all its 2 nodes; the run continues\n"
        "error: this agent is not needed: the run has all its 2 nodes\n"
        "/opt/pbs/bin/pbsdsh: task 0x00000001 exit status 8\n"
        "[rank 0] rank 0 of 4\n"
    )
    assert (
        cause_of(tmp_path, job=sent_away + "muster: succeeded after 7.0 s (1 attempt)\n")
        == "healthy"
    )
    assert (
        cause_of(tmp_path, job=sent_away + "muster: failed after 7.0 s (1 attempt)\n")
        == "exit-code"
    )
