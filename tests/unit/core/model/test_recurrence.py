import signal
from dataclasses import replace

import pytest

from torchmuster.core.model.failure import OVERUSED, EndKind
from torchmuster.core.model.verdict import Prospect, mark, prospect
from unit.core.model.ends import end_of, exited, killed, lost, preempted, raised


def hung(message="rank 1 stood still for 90 s", bases=("Hang",), **more):
    end = raised(1, "Hang", message, bases=bases, **more)
    return replace(end, kind=EndKind.HANG)


PERMANENT_ENDS = [
    raised(0, "SyntaxError", "invalid syntax"),
    raised(0, "IndentationError", "unexpected indent", bases=("IndentationError", "SyntaxError")),
    raised(0, "ModuleNotFoundError", "No module named 'numpyy'"),
    raised(0, "ImportError", "cannot import name 'x'"),
    raised(0, "NameError", "name 'modle' is not defined"),
    raised(0, "UnboundLocalError", "x", bases=("UnboundLocalError", "NameError", "Exception")),
    raised(0, "SnapshotError", is_final=True),
    raised(0, "OSError", is_final=True),
    raised(0, "EOFError", "EOF when reading a line"),
    raised(0, "RuntimeError", "Distributed package doesn't have NCCL built in"),
]
ONCE_MORE = [
    raised(0, "AttributeError", "module 'torch.nn' has no attribute 'CrossEntropyLos'"),
    raised(0, "TypeError"),
    raised(0, "ValueError"),
    raised(0, "KeyError"),
    raised(0, "AssertionError"),
    raised(0, "RuntimeError", "shapes can't be multiplied"),
    raised(0, "RuntimeError", "Default process group has not been initialized"),
    raised(0, "mine.OwnError", "no"),
    raised(0, "FileNotFoundError", "[Errno 2]", bases=("FileNotFoundError", "OSError")),
    raised(0, "PermissionError", "[Errno 13]", bases=("PermissionError", "OSError")),
    raised(0, "FileExistsError", "[Errno 17]", bases=("FileExistsError", "OSError")),
    raised(0, "OSError", "[Errno 122] Disk quota exceeded: 'last.pt'"),
    raised(0, "EOFError", "Ran out of input"),
    raised(0, "RuntimeError", "DataLoader worker (pid(s) 812, 813) exited unexpectedly"),
    raised(0, "RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"),
    killed(0, signal.SIGABRT, tail=("Is there a distributed collective mismatch in your code?",)),
    hung(),
    exited(0, 3),
    preempted(0),
    lost(0, OVERUSED),
]
UP_TO_THE_BUDGET = [
    raised(0, "OSError", "[Errno 5] Input/output error"),
    raised(0, "ConnectionError"),
    raised(0, "requests.exceptions.HTTPError", bases=("HTTPError", "RequestException", "OSError")),
    raised(0, "TimeoutError"),
    raised(0, "mine.LicenceError", bases=("LicenceError", "ConnectionError", "OSError")),
    raised(0, "torch.distributed.DistBackendError", "NCCL error"),
    raised(0, "torch.distributed.DistNetworkError"),
    raised(0, "torch.OutOfMemoryError", "CUDA out of memory."),
    raised(0, "RuntimeError", "CUDA error: an illegal memory access was encountered"),
    raised(0, "RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed."),
    killed(0, signal.SIGKILL, tail=("No space left on device",)),
    killed(0, signal.SIGABRT, tail=("pure virtual method called",)),
    raised(0, "EOFError"),
    raised(0, "RuntimeError", "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
    raised(0, "ImportError", "libx.so: cannot open shared object file: Input/output error"),
    hung(bases=("Hang", "TimeoutError")),
    killed(0, signal.SIGSEGV),
    killed(0, signal.SIGKILL),
    exited(0, 137),
    lost(0, "gone"),
    end_of(0, EndKind.NOT_STARTED),
]


def told(end):
    return f"{end.error.type_name} {end.error.message}" if end.error else end.kind.value


@pytest.mark.parametrize("end", PERMANENT_ENDS, ids=told)
def test_what_another_attempt_can_t_mend_is_not_tried_again(end):
    assert prospect(end) is Prospect.NONE


@pytest.mark.parametrize("end", ONCE_MORE, ids=told)
def test_what_the_program_itself_did_is_doubtful_and_has_a_mark(end):
    assert prospect(end) is Prospect.DOUBTFUL
    assert mark(end) is not None


@pytest.mark.parametrize("end", UP_TO_THE_BUDGET, ids=told)
def test_what_its_surroundings_did_is_open_and_never_the_same_twice(end):
    assert prospect(end) is Prospect.OPEN
    assert mark(end) is None


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (raised(0, "ValueError", "bad"), raised(2, "ValueError", "bad", elapsed_s=9000.0)),
        (raised(0, "ValueError", "at 0x7f12"), raised(0, "ValueError", "at 0x7eff")),
        (raised(0, "ValueError", "rank 0, cuda:0"), raised(1, "ValueError", "rank 1, cuda:1")),
        (raised(0, "ValueError", "in /tmp/tmpab1/x"), raised(0, "ValueError", "in /tmp/tmpcd2/x")),
        (
            raised(0, "RuntimeError", "pid(s) 8, 9 ended"),
            raised(0, "RuntimeError", "pid(s) 71 ended"),
        ),
        (hung(), hung("rank 3 stood still for 62 s")),
        (exited(0, 3, tail=("no licence",)), exited(1, 3, tail=("no licence",))),
    ],
    ids=[
        "another rank and time",
        "an address",
        "the rank's name",
        "a folder",
        "processes",
        "a hang",
        "an exit code",
    ],
)
def test_the_same_failure_is_known_again_where_only_the_start_differs(first, again):
    assert mark(first) == mark(again)


@pytest.mark.parametrize(
    "other",
    [
        raised(0, "ValueError", "bad batch 3", where="train.py:8"),
        hung(where="train.py:8"),
        raised(0, "KeyError", "bad batch 3"),
        raised(0, "ValueError", "bad batch 7"),
        exited(0, 1),
    ],
    ids=["another line", "a hang", "another type", "another number", "an exit code"],
)
def test_another_failure_is_another_one(other):
    assert mark(raised(0, "ValueError", "bad batch 3")) != mark(other)


def test_a_lost_connection_has_a_mark_once_other_ranks_have_ended():
    first = raised(0, "RuntimeError", "Connection closed by peer [127.0.0.1]:26849", where="a.py:9")
    again = raised(0, "RuntimeError", "Connection closed by peer [127.0.0.1]:41637", where="a.py:9")
    assert mark(first) is None
    assert mark(first, after_early_end=True) == mark(again, after_early_end=True)
    assert mark(first, after_early_end=True) is not None


def test_exit_codes_are_told_apart_by_their_number_and_the_last_lines():
    assert mark(exited(0, 3)) != mark(exited(0, 4))
    assert mark(exited(0, 3, tail=("epoch 5",))) != mark(exited(0, 3, tail=("epoch 7",)))
