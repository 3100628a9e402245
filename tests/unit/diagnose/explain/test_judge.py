"""Failure or not: what was said in the middle of a training that went on, and who went first without a word."""

import pytest

from kit.tables import rows
from torchmuster.diagnose.explain.events import LogFinding, LogLine
from torchmuster.diagnose.explain.judge import weighed
from torchmuster.diagnose.finding import Confidence
from unit.diagnose.explain.logs import PEER, cause_of, explain, failed, steps, traceback_of

BARRIER = "E0314 09:00:01.000000 9 torch/distributed/elastic/agent/server/api.py:1] Error waiting on exit barrier. Elapsed: 0.01 seconds\n"
STORE = (
    "[W314 09:00:01.1 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=3): Broken pipe\n"
)


def test_exception_after_which_steps_go_on_was_caught(tmp_path):
    log = steps(0, 3) + traceback_of("ZeroDivisionError: x") + "skipping\n" + steps(3, 8)
    assert cause_of(tmp_path, n1=log, n2=log) == "healthy"


@pytest.mark.parametrize("last", [3, 4, 5])
def test_exception_after_which_others_end_their_step_was_not_caught(tmp_path, last):
    log = steps(0, 3) + traceback_of("ZeroDivisionError: x") + steps(3, last)
    assert cause_of(tmp_path, job=log) == "exception"


def test_frightening_word_before_further_steps_is_no_failure(tmp_path):
    word = "ERROR tracker failed, will try again\n"
    assert cause_of(tmp_path, job=word + steps(0, 5)) == "healthy"
    assert cause_of(tmp_path, job=steps(0, 5) + "ERROR tracker failed\n") == "reported"


def test_launcher_at_its_exit_barrier_shows_that_its_ranks_ended_first(tmp_path):
    head = steps(0, 5) + traceback_of(PEER, rank=0) + failed()
    verdict = explain(tmp_path, n1=head, n2=steps(0, 5) + STORE + BARRIER + STORE)
    assert verdict.first.cause == "rank-ended-early"
    assert "exit barrier" in verdict.first.evidence[1].text


def test_abort_of_who_had_not_lost_its_peer_is_the_cause(tmp_path):
    head = traceback_of(PEER, rank=0) + failed()
    other = steps(0, 3) + failed(-6) + STORE
    assert cause_of(tmp_path, n1=head, n2=other) == "aborted"


def test_abort_after_a_lost_peer_is_an_echo(tmp_path):
    head = traceback_of(PEER, rank=0) + failed(-6)
    assert cause_of(tmp_path, n1=head, n2=steps(0, 3)) != "aborted"


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


@pytest.mark.parametrize(("state", "cause"), [("succeeded", "healthy"), ("failed", "exit-code")])
def test_a_second_launcher_that_was_sent_away_is_no_failure_of_a_run_that_succeeded(
    tmp_path, state, cause
):
    sent_away = (
        "muster: joined run 20261122-162144-loop-a48d as n2\n"
        "muster: refused an agent from n1: the run has all its 2 nodes; the run continues\n"
        "error: this agent is not needed: the run has all its 2 nodes\n"
        "/opt/pbs/bin/pbsdsh: task 0x00000001 exit status 8\n"
        "[rank 0] rank 0 of 4\n"
    )
    ending = f"muster: {state} after 7.0 s (1 attempt)\n"
    assert cause_of(tmp_path, job=sent_away + ending) == cause


# A cause is certain only while no rival has evidence of its own, or stands in the message itself.


def finding(cause, weight=80, order=5, when=None, confidence=Confidence.HIGH, rivals=()):
    began = LogLine(path="job.log", number=order, text=cause, order=order, when=when)
    given = {"weight": weight, "confidence": confidence, "rivals": rivals, "began": began}
    return LogFinding(cause=cause, error=cause, **given)


def test_nothing_beside_it_leaves_a_proof_certain():
    assert weighed([finding("disk-full")])[0].confidence is Confidence.HIGH
    assert weighed([]) == []


def test_a_message_with_a_second_reading_is_not_certain_and_names_it():
    first = weighed([finding("ib-path", rivals=("peer-lost",))])[0]
    assert first.confidence is Confidence.MEDIUM
    assert first.rivals == ("peer-lost",)


def test_another_cause_of_like_weight_that_began_before_shakes_it():
    first = weighed([finding("no-gpu", order=9), finding("disk-full", weight=78, order=2)])[0]
    assert first.confidence is Confidence.MEDIUM
    assert first.rivals == ("disk-full",)


def test_guesses_lighter_causes_and_later_ones_do_not_shake_it():
    others = [
        finding("peer-lost", order=2, confidence=Confidence.LOW),
        finding("exit-code", weight=40, order=2),
        finding("no-gpu", order=30),
        finding("disk-full", order=1),
    ]
    assert weighed([finding("disk-full"), *others])[0].confidence is Confidence.HIGH


def test_where_both_have_times_these_decide():
    late, early = finding("no-gpu", order=2, when=100.0), finding("disk-full", order=9, when=50.0)
    assert weighed([late, early])[0].confidence is Confidence.MEDIUM
    assert weighed([early, late])[0].confidence is Confidence.HIGH


# What is said to be certain is what the message proves; what was overcome is no cause.


STEPS, MORE = steps(1, 40), steps(40, 99)
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
    ("cause", "words", "text"),
    [
        *rows(
            rf"""
            value-out-of-range  between 0 and 1    Loss.cu:95: operator(): block: [0,0,0] Assertion `input_val >= zero && input_val <= one` failed.
            cuda-error          stack              RuntimeError: CUDA error: hardware stack error
            builds-differ       without MPI        RuntimeError: Distributed package doesn't have MPI built in.
            bad-setting         COMM_ID            {WARN}Invalid NCCL_COMM_ID, please use format: <ipv4>:<port>
            no-such-interface   NCCL_COMM_ID       {WARN}NET/Socket : No usable listening interface found
            container-runtime   /run/enroot/u      slurmstepd: error: pyxis:     mkdir: cannot create directory '/run/enroot/u': Permission denied
            loopback-address    loopback           RuntimeError: gloo/transport/tcp/pair.cc:799] connect [127.0.1.1]:4011: Connection refused
            """,
            3,
        ),
        ("cancelled", "Ctrl-C", f"{STEPS}^C\nstopping\n"),
    ],
)
def test_the_sentence_says_what_the_message_proves(tmp_path, cause, words, text):
    log = traceback_of(text) if text.startswith("RuntimeError: ") else f"{text}\n"
    first = explain(tmp_path, job=log).first
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
        f"{failed()}[api.py] [INFO] [default] Worker group FAILED. 2/3 attempts left; will restart worker group\n",
        traceback_of("RuntimeError: flaky") + failed(),
    ],
)
def test_steps_after_trouble_say_that_it_was_overcome(tmp_path, trouble):
    assert cause_of(tmp_path, job=f"{STEPS}{trouble}{MORE}") == "healthy"
