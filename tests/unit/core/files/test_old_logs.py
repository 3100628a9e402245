"""Of very many attempts the logs of the first and of the last ones are kept."""

import os

from torchmuster.core.files.disk import MOST_FILES, attempts_kept, remove_old, too_old
from torchmuster.core.files.layout import RunDir


def make(tmp_path, attempts, ranks):
    run_dir = RunDir(str(tmp_path))
    for attempt in range(attempts):
        os.makedirs(run_dir.attempt_logs(attempt))
        for rank in range(ranks):
            with open(run_dir.rank_log(attempt, rank), "w") as log:
                log.write("x")
    return run_dir


def kept(run_dir):
    return sorted(int(name.removeprefix("attempt-")) for name in os.listdir(run_dir.logs))


def test_small_runs_keep_what_nobody_would_miss():
    assert attempts_kept(2) == MOST_FILES // 2
    assert attempts_kept(4096) == 24
    assert attempts_kept(10**6) == 20


def test_each_node_removes_what_its_ranks_have_left(tmp_path):
    run_dir, world = make(tmp_path, attempts=30, ranks=4), MOST_FILES // 20
    for newest in range(30):
        old = too_old(newest, world)
        for node in ((0, 1), (2, 3)) if old is not None else ():
            remove_old(run_dir, old, node)
    assert kept(run_dir) == [0, *range(10, 30)]


def test_what_others_have_written_there_stays(tmp_path):
    run_dir, world = make(tmp_path, attempts=22, ranks=4), MOST_FILES // 20
    assert too_old(21, world) == 1
    remove_old(run_dir, 1, (0, 1))
    assert sorted(os.listdir(run_dir.attempt_logs(1))) == ["rank-2.log", "rank-3.log"]
    remove_old(run_dir, 1, (2, 3))
    assert 1 not in kept(run_dir)
    remove_old(run_dir, 1, (0, 1))  # again, and of a node that never wrote
