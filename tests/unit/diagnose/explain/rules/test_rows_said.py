"""Lines that name a cause themselves, and what of them is only left behind by another."""

import pytest

from unit.diagnose.explain.logs import cause_of, explain, traceback_of

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


@pytest.mark.parametrize(
    ("why", "cause"),
    [
        ("cannot import name 'f' from 'model' (/home/u/model.py)", "exception"),
        ("cannot import name 'f' from partially initialized module 'm' (most likely due to a circular import) (/home/u/m.py)", "import-path"),
        ("attempted relative import with no known parent package", "import-path"),
        ("cannot import name 'f' from 'x' (/v/lib/python3.11/site-packages/x/__init__.py)", "versions-differ"),
    ],
)  # fmt: skip
def test_name_that_the_user_s_own_file_lacks_is_no_missing_package(tmp_path, why, cause):
    assert cause_of(tmp_path, job=traceback_of(f"ImportError: {why}")) == cause
