"""Rows of the table: the special before the general, and none that a stem hides."""

import pytest

from torchmuster.diagnose.explain.reading.patterns import (
    STEMS,
    WordFilter,
    match,
    may_mean_something,
)

LINES = {
    "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***": "time_limit",
    "=>> PBS: job killed: walltime 3630 exceeded limit 3600": "time_limit",
    "=>> PBS: job killed: mem 1kb exceeded limit 0kb": "oom_proof",
    "=>> PBS: job killed: cput 66 exceeded limit 60": "time_limit",
    "=>> PBS: job killed: node 1 (n2) requested job die, code 15009": "node_failed",
    "=>> PBS: job killed: ncpus 9.1 exceeded limit 8 (sum)": "pbs_killed",
    "/opt/pbs/bin/pbsdsh: invalid option -- 'n'": "pbsdsh_usage",
    "mpiexec:  unexpected error - no non-PBS mpiexec in PBS_O_PATH": "pbs_mpiexec",
    "State: TIMEOUT (exit code 0)": "time_limit",
    "90113.0        python  NODE_FAIL      1:0": "node_failed",
    "slurmstepd: error: Some of your processes may have been killed by the cgroup out-of-memory handler.": "oom_proof",
    "mpirun noticed that process rank 5 with PID 4411 on node cn8 exited on signal 9 (Killed).": "signal_received",
    "Job was active longer than specified deadline": "time_limit",
    "NVRM: Xid (PCI:0000:4e:00): 79, pid=1": "told:kernel.xid-79",
    "bash: line 1: torchrun: command not found": "no_command",
    "sh: 1: torchrun: not found": "no_command",
    "/usr/bin/env: \u2018python3\u2019: No such file or directory": "no_command",
    "python: can't open file '/a.py': [Errno 2] No such file or directory": "no_script",
    "RuntimeError: wait timeout after 300000ms, keys: /default_pg/0//cpu//0/1": "store_wait",
    "(exitcode: -9)  failed (exitcode: -9) local_rank: 1 (pid: 7) of binary: python": "child_failed",
    "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError": "rdzv_timeout",
    "Connection closed by peer [10.0.0.2]:24805": "peer_lost",
    "train.py: error: unrecognized arguments: --lr-warmup 10": "bad_arguments",
    "export FI_PROVIDER=efa": "variable",
    "cp: x: No space left on device": "errno",
    "python: version `GLIBC_2.34' not found": "told:program.glibc-too-old",
}


@pytest.mark.parametrize(("line", "kind"), LINES.items())
def test_line_means_what_it_says(line, kind):
    assert may_mean_something(line)
    found = match(line)
    assert found is not None
    assert found.kind == kind


@pytest.mark.parametrize(
    "line", ["cat: notes.txt", "saved 7 images", "the weather is fine", "learning rate 0.1"]
)
def test_everyday_line_means_nothing(line):
    assert match(line) is None


@pytest.mark.parametrize("line", LINES)
def test_filter_of_words_lets_through_what_means_something_each_time(line):
    words = WordFilter()
    assert [words.has_no_meaning(line.encode()) for _ in range(2)] == [False, False]


def test_filter_of_words_learns():
    words = WordFilter()
    assert words.has_no_meaning(b"the weather is fine")
    assert words.has_no_meaning(b"is the weather fine")


def test_every_stem_survives_the_filter_of_words():
    for stem in STEMS:
        assert not WordFilter().has_no_meaning(f"x {stem} y".encode())
