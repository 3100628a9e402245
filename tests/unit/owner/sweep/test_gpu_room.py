"""Who may start beside a member on the same GPU: by what nvidia-smi says, and by what the user or the first member does."""

import asyncio

import pytest

from torchmuster.owner.sweep.gpu_room import STEADY_S, GpuRoom, MemoryOfGpu
from torchmuster.owner.sweep.policy import SweepPolicy
from torchmuster.owner.sweep.room_watch import RoomWatch
from torchmuster.proc import Answered

GIB = 1 << 30


def memory(used_gib, total_gib=24):
    return {"0": MemoryOfGpu(total_gib * GIB, int(used_gib * GIB))}


def room_of(slots=3, need_gib=None, before_gib=0.0):
    room = GpuRoom([("0",)] * slots, need_gib * GIB if need_gib else None)
    room.looked(memory(before_gib), 0.0)
    return room


@pytest.mark.parametrize(
    ("gpus", "is_shared"),
    [
        ([("0",), ("1",)], False),
        ([("0",), ("0",)], True),
        ([("0", "1"), ("1", "2")], True),
        ([("0", "0")], False),  # two workers of one member
    ],
)
def test_only_gpus_of_several_slots_are_asked_for(gpus, is_shared):
    assert GpuRoom(gpus).is_shared is is_shared


def test_a_member_alone_on_its_gpu_always_may():
    assert room_of(need_gib=80).why_not(0) is None


def test_as_many_share_a_gpu_as_what_the_user_says_has_room_for():
    room = room_of(need_gib=10)
    room.started(0)
    assert room.why_not(1) is None  # 24 GiB, of which one takes 10
    room.started(1)
    assert room.why_not(2) == "GPU 0 has 4 GiB left beside 2, a member needs 10 GiB"
    room.ended(0)
    assert room.why_not(2) is None


def test_what_strangers_use_is_not_there():
    room = room_of(need_gib=10, before_gib=8)
    room.started(0)
    assert room.why_not(1) == "GPU 0 has 6 GiB left beside 1, a member needs 10 GiB"


def test_a_stranger_who_comes_later_counts_by_what_is_free():
    room = room_of(need_gib=10)
    room.started(0)
    room.looked(memory(20), 1.0)
    assert room.why_not(1) == "GPU 0 has 4 GiB left beside 1, a member needs 10 GiB"


def test_without_a_word_of_the_user_the_first_member_is_watched_until_it_grows_no_more():
    room = room_of()
    room.started(0)
    assert room.why_not(1) == "what the first member takes of GPU 0 is not known yet"
    room.looked(memory(0), 1.0)  # it imports torch
    room.looked(memory(0), 2.0 + STEADY_S)
    assert room.why_not(1) is not None
    room.looked(memory(4), 20.0)
    room.looked(memory(8), 21.0)
    room.looked(memory(8), 20.0 + STEADY_S)
    assert room.why_not(1) is not None
    room.looked(memory(8), 21.0 + STEADY_S)
    assert room.why_not(1) is None
    room.started(1)
    # It has allocated nothing yet: what it will use is counted.
    assert room.why_not(2) == "GPU 0 has 6.4 GiB left beside 2, a member was seen to use 8.8 GiB"


def test_a_member_that_has_ended_was_seen_whole():
    room = room_of()
    room.started(0)
    room.looked(memory(5), 1.0)
    room.ended(0)
    room.started(1)
    assert room.why_not(2) is None


def test_where_a_gpu_is_not_named_nobody_is_kept_waiting():
    room = GpuRoom([("MIG-1",), ("MIG-1",)])
    room.looked(memory(0), 0.0)
    room.started(0)
    assert (room.can_see, room.why_not(1)) == (False, None)


def test_one_answer_that_does_not_come_changes_nothing():
    room = room_of(need_gib=20)
    room.started(0)
    room.looked({}, 1.0)
    assert room.can_see
    assert room.why_not(1) is not None


# With what nvidia-smi printed.

ANSWER = "0, GPU-aaaa, NVIDIA GeForce RTX 4090, 550.54.15, 24564, {used}, Default\n"


class Smi:
    """A pretended nvidia-smi."""

    def __init__(self, said, status=0):
        self.said, self.status, self.asked = said, status, []

    def __call__(self, argv, limit_s):
        self.asked.append(argv)
        return Answered(status=self.status, stdout=self.said.encode(), stderr=b"")


def looked(room, smi, said):
    watch = RoomWatch(room, said.append, smi)
    asyncio.run(watch.look())
    return watch


@pytest.mark.parametrize("name", ["0", "GPU-aaaa"])
def test_slots_without_room_are_closed_and_open_again(name):
    said, smi = [], Smi(ANSWER.format(used=1024))
    watch = looked(GpuRoom([(name,)] * 2, 20 * GIB), smi, said)
    policy = SweepPolicy(2)
    policy.begin(range(2), {})
    watch.fit(policy)
    watch.room.started(policy.start().slot)
    watch.fit(policy)
    watch.fit(policy)
    assert not policy.has_room
    assert said == [
        f"GPU {name} has 2.988 GiB left beside 1, a member needs 20 GiB: the next one waits"
    ]
    policy.ended(0, None)
    watch.room.ended(0)
    watch.fit(policy)
    assert policy.has_room
    assert "--query-gpu=" in smi.asked[0][1]


@pytest.mark.parametrize(
    ("answer", "status", "why"),
    [
        ("", None, "nvidia-smi did not answer within 10 s"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the driver\n", 9,
         "nvidia-smi: NVIDIA-SMI has failed because it couldn't communicate with the driver"),
        (ANSWER.format(used=1), 0, "nvidia-smi does not name them as CUDA_VISIBLE_DEVICES does"),
    ],
)  # fmt: skip
def test_what_can_not_be_asked_is_said_once(answer, status, why):
    said = []
    watch = looked(GpuRoom([("7",)] * 2), Smi(answer, status), said)
    asyncio.run(watch.look())
    assert said == [
        f"members share GPUs whose memory can't be asked for ({why}): whether they fit is not known"
    ]
