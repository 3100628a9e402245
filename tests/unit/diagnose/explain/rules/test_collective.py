"""A peer that has gone: whether it ended by itself, or was killed, and what can't be told."""

import pytest

from unit.diagnose.explain.logs import cause_of, traceback_of

FAILED = "E0314 09:00:00.000000 9 torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: 1) local_rank: 0 (pid: 9) of binary: python\n"
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.7.7.2]:197."
RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [10.7.7.2]:197: Connection reset by peer."
TELLS = "I0314 09:00:00.000000 9 torch/distributed/launcher/api.py:254]   min_nodes                : 2\n"
STEPS = "step 1 loss 0.5\nstep 2 loss 0.4\n"


@pytest.mark.parametrize(
    ("error", "told", "cause"),
    [
        (CLOSED, "", "peer-lost"),
        (CLOSED, TELLS, "peer-lost"),
        (RESET, "", "peer-lost"),
        (RESET, TELLS, "peer-lost"),
    ],
)
def test_peer_that_was_killed_is_not_taken_for_one_that_ended_by_itself(
    tmp_path, error, told, cause
):
    left = told + STEPS + traceback_of(error, rank=0) + FAILED
    assert cause_of(tmp_path, n1=left, n2=told + STEPS) == cause


def test_peer_that_says_that_it_has_finished_ended_by_itself(tmp_path):
    left = STEPS + traceback_of(CLOSED, rank=0) + FAILED
    assert cause_of(tmp_path, n1=left, n2=STEPS + "training finished\n") == "rank-ended-early"


TIMED_OUT = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 12000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("line", "size", "cause"),
    [
        (50, 2, "collectives-differ"),
        (9, 2, "peer-lost"),
        (50, 3, "rank-missing-in-collective"),
    ],
)
def test_all_ranks_that_wait_at_different_lines_make_different_collectives(
    tmp_path, line, size, cause
):
    one = f"world size {size}\n" + traceback_of(TIMED_OUT, rank=0)
    other = traceback_of(TIMED_OUT, rank=1, line=line)
    assert cause_of(tmp_path, n1=one, n2=other) == cause


TABLE = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  rank      : 2 (local_rank: 0)
  exitcode  : 1 (pid: 9)
"""
ENDED = "W0314 09:00:00.000000 9 torch/distributed/elastic/multiprocessing/api.py:1] Sending process 10 closing signal SIGTERM\n"


@pytest.mark.parametrize(
    ("teardown", "cause"), [("", "rank-ended-early"), (ENDED, "peer-lost")], ids=["none", "ended"]
)
def test_rank_that_its_launcher_neither_calls_failed_nor_had_to_end_had_ended_well(
    tmp_path, teardown, cause
):
    begin = "rank 2/4 ready\nrank 3/4 ready\n" + STEPS + traceback_of(CLOSED, rank=2)
    assert cause_of(tmp_path, job=begin + teardown + FAILED + TABLE) == cause
