"""What is said to be certain is what the message proves; what was overcome is no cause."""

import pytest

from torchmuster.diagnose.finding import Confidence
from unit.diagnose.explain.logs import cause_of, explain, traceback_of

STEPS = "".join(f"step {number}/400 loss {3 - number / 200:.3f}\n" for number in range(1, 40))
MORE = "".join(f"step {number}/400 loss {2 - number / 400:.3f}\n" for number in range(40, 99))
WARN = "n1:71:92 [0] bootstrap.cc:110 NCCL WARN "


@pytest.mark.parametrize(
    "line",
    [
        # The program may go on after it, or the message has a second reading.
        "Warning  FailedScheduling  0/9 nodes are available: 3 Insufficient nvidia.com/gpu, 6 node(s) had untolerated taint {a: }.",
        "NVRM: Xid (PCI:0000:07:00): 119, pid=91, name=python, Timeout after 6s of waiting for RPC response",
        "NVRM: Xid (PCI:0000:07:00): 74, pid=91, NVLink: fatal error detected on link 3",
        "Oops: 0002 [#1] PREEMPT SMP NOPTI",
        "TCP: too many orphaned sockets",
        "security group on either this instance or the peer instance",
        "012 (4711.000.000) 2026-01-05 10:00:00 Job was evicted.",
        "slurmstepd: error: Munge decode failed: Expired credential",
        "rpc error: code = DeadlineExceeded desc = context deadline exceeded",
        "Installed the preemption signal handler for SIGTERM",
        "KV cache: Evicted 12 blocks to make room",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "git@github.com: Permission denied (publickey).",
        "wandb: ERROR Error while calling W&B API: project not found (<Response [404]>)",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 804: forward compatibility was attempted on non supported HW",
    ],
)
def test_a_message_with_a_second_reading_is_not_high(tmp_path, line):
    first = explain(tmp_path, job=f"starting\n{line}\n").first
    assert first is None or first.confidence is not Confidence.HIGH


@pytest.mark.parametrize(
    ("text", "cause", "words"),
    [
        (
            "Loss.cu:95: operator(): block: [0,0,0] Assertion `input_val >= zero && input_val <= one` failed.",
            "value-out-of-range",
            "between 0 and 1",
        ),
        (traceback_of("RuntimeError: CUDA error: hardware stack error"), "cuda-error", "stack"),
        (
            traceback_of("RuntimeError: Distributed package doesn't have MPI built in."),
            "builds-differ",
            "without MPI",
        ),
        (f"{WARN}Invalid NCCL_COMM_ID, please use format: <ipv4>:<port>", "bad-setting", "COMM_ID"),
        (
            f"{WARN}NET/Socket : No usable listening interface found",
            "no-such-interface",
            "NCCL_COMM_ID",
        ),
        (
            "slurmstepd: error: pyxis:     mkdir: cannot create directory '/run/enroot/u': Permission denied",
            "container-runtime",
            "/run/enroot/u",
        ),
        (
            traceback_of(
                "RuntimeError: gloo/transport/tcp/pair.cc:799] connect [127.0.1.1]:4011: Connection refused"
            ),
            "loopback-address",
            "loopback",
        ),
        (f"{STEPS}^C\nstopping\n", "cancelled", "Ctrl-C"),
    ],
)
def test_the_sentence_says_what_the_message_proves(tmp_path, text, cause, words):
    first = explain(tmp_path, job=f"{text}\n").first
    assert first.cause == cause
    assert words in first.error


def test_two_missing_versions_are_both_named(tmp_path):
    log = (
        "python: libstdc++.so.6: version `GLIBCXX_3.4.29' not found (required by /e/a.so)\n"
        "python: /lib64/libc.so.6: version `GLIBC_2.34' not found (required by /e/a.so)\n"
    )
    first = explain(tmp_path, job=log).first
    assert "GLIBCXX_3.4.29" in first.error
    assert "GLIBC_2.34" in first.because[0]


def test_tolerations_of_a_pod_are_no_lost_node(tmp_path):
    log = """\
        Name:         train-0
        Tolerations:  node.kubernetes.io/not-ready:NoExecute op=Exists for 300s
                      node.kubernetes.io/unreachable:NoExecute op=Exists for 300s
        """
    assert explain(tmp_path, job=log).first is None


@pytest.mark.parametrize(
    "lines",
    [
        "nfs: server fs01 not responding, still trying\nnfs: server fs01 OK\n",
        "Lustre: scratch-OST0001: Request sent has timed out\nLustre: scratch-OST0001: Connection restored to 10.1.2.3@o2ib\n",
        "metrics: connection to db-1:9000 refused\nmetrics: db-1:9000 is reachable again\n",
    ],
)
def test_trouble_of_which_the_log_says_that_it_is_over_is_not_the_cause(tmp_path, lines):
    log = f"{STEPS}{lines}{traceback_of('ValueError: the mask is empty')}"
    verdict = explain(tmp_path, job=log)
    assert [finding.cause for finding in verdict.found] == ["exception"]


@pytest.mark.parametrize(
    "trouble",
    [
        "W reader: timed out reading shard 12, retrying\n",
        "upload failed (attempt 1 of 5): connection reset by peer\nupload succeeded on attempt 2\n",
        "CUDA out of memory with batch 64, trying batch 32\n",
        (
            "[api.py] [ERROR] failed (exitcode: 1) local_rank: 0 (pid: 9) of binary: python\n"
            "[api.py] [INFO] [default] Worker group FAILED. 2/3 attempts left; will restart worker group\n"
        ),
        traceback_of("RuntimeError: flaky")
        + "[api.py] [ERROR] failed (exitcode: 1) local_rank: 0 (pid: 9) of binary: python\n",
    ],
)
def test_steps_after_trouble_say_that_it_was_overcome(tmp_path, trouble):
    assert cause_of(tmp_path, job=f"{STEPS}{trouble}{MORE}") == "healthy"
