"""Lines that no rule knows: told by their shape, shown as they are, and never more than a guess."""

import pytest

from torchmuster.diagnose.explain.events import JobOutcome
from torchmuster.diagnose.finding import Confidence
from unit.diagnose.explain.logs import cause_of, explain, steps, traceback_of

STEPS, MORE = steps(1, 40), steps(40, 99)
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
        ("    Last State:  Terminated\n      Reason:    Error\n      Exit Code:   3", "code 3"),
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
        ("run.sh: line 3:  1234 Segmentation fault      (core dumped) python train.py", "segfault"),
        ("run.sh: line 3:  1234 Killed                  python train.py --lr 1", "killed"),
        ("run.sh: line 3:  1234 Killed                  torchrun --nproc 2 train.py", "killed"),
        ("Illegal instruction (core dumped)", "illegal-instruction"),
    ],
)
def test_a_signal_is_told_by_a_shell_from_its_number_and_in_other_languages(tmp_path, line, cause):
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


# Lines that name a cause themselves, and what of them is only left behind by another.


IB = "n2:12:34 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB: Got completion from peer 10.0.0.1<12> with status=12 opcode=129\n"
BARRIER = traceback_of("RuntimeError: Rank 1 failed to pass monitoredBarrier in 10000 ms", rank=0)
XID = "NVRM: Xid (PCI:0000:01:00): {number}, pid=1, name=python\n"


@pytest.mark.parametrize(
    ("left", "cause"), [(IB, "ib-path"), (BARRIER, "ranks-missing-at-barrier")]
)
def test_what_a_rank_that_is_gone_leaves_behind_is_beaten_by_its_exception(tmp_path, left, cause):
    raised = traceback_of("ValueError: x", rank=1)
    assert cause_of(tmp_path, n1=raised, n2=left) == "exception"
    alone = explain(tmp_path, n2=left, n1="step 1\n")
    assert alone.first.cause == cause
    assert alone.first.confidence.value == "medium"


@pytest.mark.parametrize(("number", "cause"), [(79, "gpu-hardware"), (31, "cuda-error")])
def test_fault_of_a_program_on_a_gpu_is_no_broken_gpu(tmp_path, number, cause):
    error = traceback_of("RuntimeError: CUDA error: an illegal memory access was encountered")
    assert cause_of(tmp_path, job=XID.format(number=number) + error) == cause


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("bash: /v/bin/torchrun: /v/bin/python3: bad interpreter: Permission denied", "permission"),
        ("/var/spool/job1/slurm_script: line 12: ./run.sh: Permission denied", "permission"),
        ("python: can't open file '/p/train.py': [Errno 13] Permission denied", "permission"),
        ("bash: ./t: /v/bin/python3: bad interpreter: No such file or directory", "command-missing"),
        ("bash: line 1: ./t: cannot execute: required file not found", "command-missing"),
        ("zsh: command not found: torchrun", "command-missing"),
        ('exec: "torchrun": executable file not found in $PATH: unknown', "command-missing"),
        ("[proxy:0:0@n1] execvp error on file torchrun (No such file or directory)", "command-missing"),
        ("python: can't open file '/p/train.py': [Errno 2] No such file or directory", "script-missing"),
    ],
)  # fmt: skip
def test_what_can_not_be_run_is_told_from_what_is_not_there(tmp_path, line, cause):
    assert cause_of(tmp_path, job=f"loading\n{line}\n") == cause
