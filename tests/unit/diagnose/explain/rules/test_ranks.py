"""Ranks held against each other."""

from unit.diagnose.explain.logs import explain, traceback_of

TIMED_OUT = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 12000ms for recv operation to complete"


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
    lost = (
        "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.7.7.2]:197."
    )
    failed = "E0314 09:00:00.000000 9 torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: 1) local_rank: 0 (pid: 9) of binary: python\n"
    ranks = traceback_of(lost, rank=0) + traceback_of(lost, rank=2)
    first = explain(tmp_path, job=ranks + failed + table(r0=1, r2=1)).first
    assert first.cause == "rank-ended-early"
    assert "rank 1" in first.error
