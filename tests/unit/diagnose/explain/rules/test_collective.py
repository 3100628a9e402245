"""A peer that has gone: whether it ended by itself, or was killed, and what can't be told."""

import pytest

from unit.diagnose.explain.logs import PEER, TIMED_OUT, cause_of, explain, failed, traceback_of

RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [10.7.7.2]:197: Connection reset by peer."
TELLS = "I0314 09:00:00.000000 9 torch/distributed/launcher/api.py:254]   min_nodes                : 2\n"
STEPS = "step 1 loss 0.5\nstep 2 loss 0.4\n"


@pytest.mark.parametrize("error", [PEER, RESET])
@pytest.mark.parametrize("told", ["", TELLS])
def test_peer_that_was_killed_is_not_taken_for_one_that_ended_by_itself(tmp_path, error, told):
    left = told + STEPS + traceback_of(error, rank=0) + failed()
    assert cause_of(tmp_path, n1=left, n2=told + STEPS) == "peer-lost"


def test_peer_that_says_that_it_has_finished_ended_by_itself(tmp_path):
    left = STEPS + traceback_of(PEER, rank=0) + failed()
    assert cause_of(tmp_path, n1=left, n2=STEPS + "training finished\n") == "rank-ended-early"


@pytest.mark.parametrize(
    ("line", "size", "cause"),
    [(50, 2, "collectives-differ"), (9, 2, "peer-lost"), (50, 3, "rank-missing-in-collective")],
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
    begin = "rank 2/4 ready\nrank 3/4 ready\n" + STEPS + traceback_of(PEER, rank=2)
    assert cause_of(tmp_path, job=begin + teardown + failed() + TABLE) == cause


# Formats: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp of torch 2.4 (`[PG 0 (default_pg)`), 2.5 (`PG ID`), 2.6 to 2.15.
ALL_4, ALL_5 = "PG 0 (default_pg)", "PG ID 0 PG GUID 0(default_pg)"
ALL, TP = "PG ID 0 PG GUID 0", "PG ID 1 PG GUID 3(tp)"


def fired(rank, number, enqueued, group=ALL_5, *, of_group=None, op="ALLREDUCE", old=False):
    """Return what a rank prints whose own watchdog saw the timeout."""
    mark, of_group = f"[rank{rank}]:[E1127 10:00:00.1 ProcessGroupNCCL.cpp:1] ", of_group or rank
    work, completed = f"WorkNCCL(SeqNum={number}, OpType={op}, NumelIn=4)", number - 1
    told = (
        f"Exception (either an error or timeout) detected by watchdog at work: {number}, "
        f"last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}."
        if old
        else f" failure detected by watchdog at work sequence id: {number} "
        f"PG status: last enqueued work: {enqueued}, last completed work: {completed}"
    )
    return (
        f"{mark}[Rank {of_group}] Watchdog caught collective operation timeout: {work} ran for 600010 milliseconds\n"
        f"{mark}[{group} Rank {of_group}] {told}\n"
    )


def heard(rank, enqueued, completed, group=ALL_5):
    """Return what a rank prints, of the group of all ranks, that another one has woken."""
    return (
        f"[rank{rank}]:[E1127 10:00:01.1 ProcessGroupNCCL.cpp:1] [{group} Rank {rank}] Received a dump signal due to a "
        "collective timeout from  rank 3 and we will try our best to dump the debug info. "
        f"Last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.This is most likely caused by\n"
    )


@pytest.mark.parametrize(
    ("log", "names", "sure"),
    [
        (fired(3, 9, 9) + heard(1, 9, 8) + heard(2, 9, 8) + heard(0, 8, 8), "rank 0", "high"),
        (fired(3, 9, 9, ALL) + heard(1, 9, 8, ALL) + heard(0, 8, 8, ALL), "rank 0", "medium"),
        ("".join(fired(r, 9, 9, ALL_4, old=True) for r in (0, 1, 3)), "rank 2", "medium"),
        ("".join(fired(r, 9, 12, old=True) for r in (0, 1, 3)) + heard(2, 8, 8), "rank 2", "high"),
        (
            fired(3, 9, "9, last started work: 9 (ALLREDUCE)") + heard(1, 9, 8) + heard(2, 9, 8) + heard(0, 8, 8),
            "rank 0",
            "high",
        ),
        # Rank 2 has put in the next one already; it came to number 9 as the others did.
        ("".join(fired(r, 9, 9) for r in (0, 1)) + fired(2, 9, 10) + heard(3, 7, 7), "rank 3", "high"),
        # One of a smaller group: the numbers of the group of all say nothing of it.
        (fired(2, 40, 40, TP, of_group=1) + heard(0, 8, 8) + heard(1, 9, 8), "a rank", "low"),
        # Another group of ranks waits for the same rank later.
        (
            fired(0, 40, 41, TP) + fired(1, 17, 17, "PG ID 2 PG GUID 5(dp)", op="BROADCAST"),
            "a rank",
            "low",
        ),
        # Each pair of ranks counts its own sends.
        (fired(3, 9, 9, op="SEND") + heard(0, 8, 8) + heard(1, 9, 8) + heard(2, 9, 8), "a rank", "low"),
    ],
)  # fmt: skip
def test_the_numbers_of_the_group_that_timed_out_say_who_did_not_come(tmp_path, log, names, sure):
    verdict = explain(tmp_path, job="world size 4\n" + log)

    assert verdict.first.cause == "rank-missing-in-collective"
    assert verdict.first.error.endswith(f"a collective waited for {names} until its timeout")
    assert verdict.first.confidence.value == sure


def test_no_rank_is_blamed_where_all_have_put_in_the_work_that_timed_out(tmp_path):
    log = fired(3, 9, 9) + heard(0, 9, 8) + heard(1, 9, 8) + heard(2, 9, 8)
    verdict = explain(tmp_path, job="world size 4\n" + log)

    assert verdict.first.cause == "peer-lost"
    assert "all 4 ranks waited in the same call" in verdict.first.error


# Ranks held against each other.


def table(**codes):
    """Return torchrun's table of failures: table(r0=1, r2=-15)."""
    rows = [
        f"  rank      : {name[1:]} (local_rank: {name[1:]})\n  exitcode  : {code} (pid: 9)\n"
        for name, code in codes.items()
    ]
    return "Failures:\n" + "Root Cause (first observed failure):\n".join(
        ("".join(rows[1:]), rows[0])
    )


def test_all_ranks_that_raise_the_same_are_named_as_all(tmp_path):
    ranks = "".join(
        traceback_of(f"ValueError: layer {rank} is missing", rank=rank) for rank in range(3)
    )
    first = explain(tmp_path, job="world size: 3\n" + ranks).first
    assert first.error.startswith("all 3 ranks raised: ValueError: layer 0")


def test_the_ranks_that_lack_a_file_are_named(tmp_path):
    error = "FileNotFoundError: [Errno 2] No such file or directory: '/local/train.idx'"
    ranks = traceback_of(error, rank=2) + traceback_of(error, rank=3)
    first = explain(tmp_path, job="world size: 4\n" + ranks).first
    assert first.cause == "file-missing"
    assert "ranks 2 and 3 raised it" in first.because


def test_ranks_without_labels_that_wait_in_different_lines_differ(tmp_path):
    waits = traceback_of(TIMED_OUT, line=9) + traceback_of(TIMED_OUT, line=50)
    first = explain(tmp_path, job=waits + table(r0=1, r1=1)).first
    assert first.cause == "collectives-differ"
    assert "train.py:9" in first.error
    assert "train.py:50" in first.error


def test_nobody_is_missing_where_all_wait_in_the_same_collective(tmp_path):
    waits = traceback_of(TIMED_OUT, rank=0) + traceback_of(TIMED_OUT, rank=1)
    first = explain(tmp_path, job=waits + table(r0=1, r1=1)).first
    assert first.cause == "peer-lost"
    assert first.error.startswith("all 2 ranks waited")


def test_the_rank_that_torchrun_had_to_end_is_the_one_that_did_not_come(tmp_path):
    waits = traceback_of(TIMED_OUT) + traceback_of(TIMED_OUT)
    first = explain(tmp_path, job=waits + table(r0=1, r1=1, r2=-15)).first
    assert first.cause == "rank-missing-in-collective"
    assert "rank 2" in first.error


def test_ranks_that_all_receive_wait_for_what_nobody_sends(tmp_path):
    def receives(rank):
        text = traceback_of(TIMED_OUT, rank=rank)
        frame = '  File "/e/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2, in recv'
        return text.replace("    step()\n", f"    step()\n[rank{rank}]: {frame}\n")

    first = explain(tmp_path, job=receives(0) + receives(1) + table(r0=1, r1=1)).first
    assert first.cause == "collectives-differ"
    assert "`recv`" in first.error


def test_a_rank_that_torchrun_does_not_list_has_ended_well(tmp_path):
    ranks = traceback_of(PEER, rank=0) + traceback_of(PEER, rank=2)
    first = explain(tmp_path, job=ranks + failed() + table(r0=1, r2=1)).first
    assert first.cause == "rank-ended-early"
    assert "rank 1" in first.error
