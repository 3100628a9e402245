"""The barrier over the store: it lets all go together, and names who did not come."""

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from torchmuster.launcher.facts.stacks import RankActivity, judge
from torchmuster.train.barrier import StoreBarrier
from torchmuster.train.group import WorldError


class GoneStore:
    """A store whose server has ended."""

    def set(self, key, value):
        pass

    def add(self, key, amount):
        return 1

    def wait(self, keys, timeout):
        raise RuntimeError("Connection reset by peer")

    def check(self, keys):
        raise RuntimeError("Broken pipe")


@pytest.fixture(params=["hash", "tcp", "prefix"])
def connect(request):
    """Return what opens a rank's connection to one store."""
    if request.param == "tcp":
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False)
        return
    store = dist.HashStore()
    yield lambda: dist.PrefixStore("a", store) if request.param == "prefix" else store


def barriers(connect, world_size):
    return [StoreBarrier(connect(), rank=r, world_size=world_size) for r in range(world_size)]


def test_nobody_passes_before_all_have_come_in_any_number_of_rounds(connect):
    num_rounds, world_size = 20, 4
    came = [0] * world_size
    passed_early = []

    def walk(rank, barrier):
        for number in range(num_rounds):
            came[rank] += 1
            barrier.wait("step", timeout_s=30)
            if min(came) <= number:
                passed_early.append((rank, number))

    with ThreadPoolExecutor(world_size) as pool:
        list(pool.map(walk, range(world_size), barriers(connect, world_size)))
    assert not passed_early
    assert came == [num_rounds] * world_size


@pytest.mark.parametrize(
    ("present", "missing"), [((0, 1, 2, 4), "rank 3"), ((1, 4), "ranks 0,2-3"), ((0,), "ranks 1-4")]
)
def test_the_ranks_that_did_not_come_are_named(present, missing, connect):
    every = barriers(connect, 5)

    def wait(rank):
        with pytest.raises(WorldError) as raised:
            every[rank].wait("eval", timeout_s=0.5)
        return raised.value

    with ThreadPoolExecutor(len(present)) as pool:
        errors = list(pool.map(wait, present))
    assert {error.where for error in errors} == {missing}
    assert errors[0].what.startswith(f"{5 - len(present)} of 5 workers did not reach")
    assert errors[0].why == f"rank {present[0]} waited for {missing}"


def test_one_who_is_late_does_not_wait_for_those_who_gave_up(connect):
    first, last = barriers(connect, 2)
    with pytest.raises(WorldError):
        first.wait("step", timeout_s=0.3)
    last.wait("step", timeout_s=5)


def test_names_are_barriers_of_their_own(connect):
    first, last = barriers(connect, 2)
    other = threading.Thread(target=last.wait, args=("b",), kwargs={"timeout_s": 20})
    other.start()
    with pytest.raises(WorldError):
        first.wait("a", timeout_s=0.3)
    first.wait("b", timeout_s=20)
    other.join()


def test_a_store_that_has_gone_is_told_from_a_missing_rank():
    with pytest.raises(WorldError) as raised:
        StoreBarrier(GoneStore(), rank=2, world_size=4).wait("step", timeout_s=5)
    assert raised.value.what == "the store of the process group is gone"
    assert raised.value.why == "Connection reset by peer"


def test_who_waits_at_a_barrier_is_seen_to_wait():
    """The hang watch knows the file in which it stands: ranks that wait are not to blame."""
    frames = [(inspect.getfile(StoreBarrier), "wait"), ("/home/u/train.py", "main")]
    lines = [f'  File "{file}", line 7 in {name}' for file, name in frames]
    text = "\n".join(["Current thread 0x00007f1c (most recent call first):", *lines]) + "\n"
    reading = judge(text)
    assert (reading.doing, reading.what) == (RankActivity.WAITS, "torchmuster's barrier")
