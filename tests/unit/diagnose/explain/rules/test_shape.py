"""Lines that no rule knows: told by their shape, shown as they are, and never more than a guess."""

import pytest

from torchmuster.diagnose.explain.events import JobOutcome
from torchmuster.diagnose.finding import Confidence
from unit.diagnose.explain.logs import explain

STEPS = "".join(f"step {number}/400 loss {3 - number / 200:.3f}\n" for number in range(1, 40))
MORE = "".join(f"step {number}/400 loss {2 - number / 400:.3f}\n" for number in range(40, 99))
SACCT = "       JobID      State ExitCode\n------------ ---------- --------\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("worker 3 (pid 8123) killed by unknown signal", "unknown signal"),
        ("arena.cc:211] Failed to allocate 34359738368 bytes for a pool", "Failed to allocate"),
        ("E0101 12:00:01.1234  7712 reader.cc:88] shard 17: checksum differs", "checksum differs"),
        ("F0101 12:00:01.1234  7712 slots.cc:53] Check failed: n > 0 (0 vs. 0)", "Check failed"),
        ("panic: runtime error: index out of range [5] with length 3", "index out of range"),
        ("thread 'main' panicked at src/shard.rs:210:14:\ncalled unwrap on None", "unwrap"),
        ("data service: no reply from shard server 10.0.0.7 in 300 s", "no reply"),
        ("coordinator: lost 4 of 8 members, below the minimum of 6", "lost 4 of 8"),
        ("loader: wanted 4096 records, got 12; cannot continue", "cannot continue"),
        ("5 retries are over, giving up", "giving up"),
        ("worker 5 is lame", "lame"),
        ("run.sh: line 14: DATA_DIR: unbound variable", "DATA_DIR"),
        ("Can't locate JSON/XS.pm in @INC at collect.pl line 3.", "JSON/XS.pm"),
        ("Job 8812 ended with status 9.", "exit code 9"),
        ("train.sh: python returned 1, stopping here", "exit code 1"),
        ("make: *** [Makefile:12: train] Error 3", "exit code 3"),
        ("Command exited with non-zero status 3", "exit code 3"),
        ("[supervisor] child train.py ended rc=3", "exit code 3"),
        ("JobState=FAILED Reason=NonZeroExitCode Dependency=(null)", "Slurm says"),
        (f"{SACCT}4711        FAILED      1:0", "Slurm says"),
        (
            "    Last State:     Terminated\n      Reason:       Error\n      Exit Code:    3",
            "code 3",
        ),
    ],
)
def test_a_failing_line_that_no_rule_knows_is_shown_as_a_guess(tmp_path, line, words):
    first = explain(tmp_path, job=f"{STEPS}{line}\n").first
    assert first is not None
    assert words in first.error
    assert first.confidence is Confidence.LOW


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("run.sh: Zeile 12:  8123 Speicherzugriffsfehler  python fit.py", "segfault"),
        ("Erreur de segmentation (core dumped)", "segfault"),
        ("run.sh: línea 3:  91 Violación de segmento  python fit.py", "segfault"),
        ("run.sh: line 3:  9 段错误  python fit.py", "segfault"),
        ("make: *** [Makefile:12: train] Error 137", "killed"),
        ("Command exited with non-zero status 139", "segfault"),
        ("[supervisor] child train.py ended rc=134", "aborted"),
        (f"{SACCT}4711        FAILED     0:11", "segfault"),
    ],
)
def test_a_signal_is_told_from_its_number_and_in_other_languages(tmp_path, line, cause):
    assert explain(tmp_path, job=f"{STEPS}{line}\n").first.cause == cause


@pytest.mark.parametrize(
    "lines",
    [
        f"{STEPS}trainer exited with code 0\n",
        f"{STEPS}[supervisor] child train.py ended rc=0\n",
        f"{STEPS}    State:          Terminated\n      Reason:  Completed\n      Exit Code:    0\n",
        f"{STEPS}{SACCT}4711        COMPLETED      0:0\n",
        f"{STEPS}healthcheck: 0 failed, 0 lame, 8 ok\n",
        f"{STEPS}monitor: no answer from rank 6 for 30 s\nmonitor: rank 6 is back\n{MORE}",
        f"{STEPS}prefetch: not enough memory for 8 buffers, using 4\n{MORE}",
        f"{STEPS}W reader: no reply from shard server, retrying\n",
        f"{STEPS}sample: The server died and the king gave up his crown.\nTraining finished.\n",
    ],
)
def test_frightening_words_of_a_healthy_log_accuse_nobody(tmp_path, lines):
    verdict = explain(tmp_path, job=lines)
    assert verdict.outcome in (JobOutcome.ENDED_WELL, JobOutcome.RUNNING)
