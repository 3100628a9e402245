import signal

import pytest

from kit.tables import rows
from torchmuster.core.model.failure import EndKind, describe, first_cause, last_step
from unit.core.model.ends import end_of, exited, killed, lost, preempted, raised, succeeded

# What healthy ranks were seen to say after another one's death, word for word.
ECHOES = {
    name: (kind, said)
    for name, kind, said in rows(
        r"""
        gloo_closed    RuntimeError                        [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:42467
        gloo_reset     RuntimeError                        [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:463] Read error [10.1.0.2]:9123: Connection reset by peer
        gloo_timeout   RuntimeError                        [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete
        gloo_pair      RuntimeError                        Application timeout caused pair closure
        gloo_mesh      RuntimeError                        Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] no error
        nccl_remote    torch.distributed.DistBackendError  NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process exited or there was a network error, NCCL version 2.27.3\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
        nccl_watchdog  torch.distributed.DistBackendError  [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.
        store_connect  torch.distributed.DistNetworkError  The client socket has timed out after 60000ms while trying to connect to (n1, 29500).
        store_wait     torch.distributed.DistStoreError    wait timeout after 300000ms, keys: /default_pg/0//cuda//0
        store_closed   torch.distributed.DistNetworkError  failed to recv, got 0 bytes
        store_recv     RuntimeError                        recvValue failed on SocketImpl(fd=61, addr=[localhost]:58110, remote=[localhost]:29500): Connection reset by peer
        barrier        RuntimeError                        Rank 3 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0.
        """,
        3,
    )
}
OWN_WORDS = {
    "value": ("ValueError", "expected 10 classes, got 12"),
    "memory": ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."),
    "shape": ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)"),
    "cuda": ("torch.AcceleratorError", "CUDA error: device-side assert triggered"),
    "file": ("FileNotFoundError", "[Errno 2] No such file or directory: 'data.bin'"),
}


@pytest.mark.parametrize("words", ECHOES.values(), ids=ECHOES)
def test_an_echo_is_passed_over_for_the_failure_that_came_later(words):
    echo, cause = raised(0, *words), raised(3, "ValueError", "bad batch")

    assert echo.looks_like_echo
    assert first_cause([echo, cause]) is cause


@pytest.mark.parametrize("words", OWN_WORDS.values(), ids=OWN_WORDS)
def test_a_rank_s_own_error_is_no_echo(words):
    own, later = raised(0, *words), killed(1, signal.SIGKILL)

    assert not own.looks_like_echo
    assert first_cause([own, later]) is own


CLOSED = ECHOES["gloo_closed"]
WATCHDOG = ("[rank1]: ProcessGroupNCCL's watchdog got stuck", ECHOES["nccl_watchdog"][1])
ASKED = [killed(0, signal.SIGKILL, asked=True), exited(1, 1, asked=True)]
FIRST_CAUSES = {
    "of nothing but echoes the first one": ([raised(rank, *CLOSED) for rank in (2, 0, 1)], 0),
    "the first of several": ([succeeded(0), exited(2, 3), killed(1, signal.SIGSEGV)], 1),
    "not the abort of the watchdog": ([killed(1, signal.SIGABRT, tail=WATCHDOG), exited(0, 3)], 1),
    "an abort without the watchdog's words": (
        [killed(1, signal.SIGABRT, tail=("double free or corruption",)), exited(0, 3)],
        0,
    ),
    "a segmentation fault whatever its last lines say": (
        [killed(1, signal.SIGSEGV, tail=("Connection closed by peer",)), exited(0, 1)],
        0,
    ),
    "nothing that was asked for": (ASKED, None),
    "what was not asked for": ([*ASKED, exited(2, 3)], 2),
    "no success and no preemption": ([succeeded(0), preempted(1)], None),
    "nothing": ([], None),
    "a lost node": ([raised(0, *CLOSED), lost(2, "its agent has gone")], 1),
}


@pytest.mark.parametrize(("ends", "index"), FIRST_CAUSES.values(), ids=FIRST_CAUSES)
def test_the_first_cause_is(ends, index):
    assert first_cause(ends) is (None if index is None else ends[index])


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (exited(0, 3), 3),
        (killed(0, signal.SIGKILL), 137),
        (killed(0, signal.SIGSEGV), 139),
        (succeeded(0), 0),
        (raised(0, "ValueError"), 1),
        (end_of(0, EndKind.NOT_STARTED), 1),
    ],
)
def test_the_shell_would_show_this_code(end, code):
    assert end.shell_code == code


def test_the_last_step_of_an_attempt_is_the_furthest_of_any_rank_that_says_one():
    assert last_step([exited(0, 3), killed(1, 9, step=7), killed(2, 9, step=6)]) == 7
    assert last_step([exited(0, 3)]) is None


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (raised(0, "ValueError", "no\nsuch"), "ValueError: no"),
        (raised(0, "KeyError", ""), "KeyError"),
        (killed(0, signal.SIGSEGV), "SIGSEGV"),
        (killed(0, 64), "SIGRTMAX"),
        (killed(0, 200), "signal 200"),
        (exited(0, 3), "exit code 3"),
        (preempted(0), "exit code 75 (preempted)"),
        (lost(0, "its agent has gone"), "its agent has gone"),
        (end_of(0, EndKind.NOT_STARTED), "it could not be started"),
    ],
)
def test_an_end_is_described_in_a_few_words(end, words):
    assert describe(end) == words


def test_the_source_path_that_gloo_puts_in_front_is_left_out():
    assert (
        describe(raised(0, *CLOSED)) == "RuntimeError: Connection closed by peer [127.0.0.1]:42467"
    )


def test_a_long_message_is_cut_to_fit_a_sentence():
    assert describe(raised(0, "ValueError", "x" * 500)) == f"ValueError: {'x' * 97}..."
