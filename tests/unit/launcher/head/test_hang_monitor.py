"""One question at a time: for the watch, or for a client."""

import pytest

from torchmuster.core.model.events import fields_of
from torchmuster.core.model.failure import EndKind
from torchmuster.core.model.plan import Limits
from torchmuster.core.model.progress import RankPhase
from torchmuster.core.net import messages
from torchmuster.launcher.head.hang_monitor import HangMonitor, watch_limits
from torchmuster.launcher.head.hang_watch import WatchLimits
from torchmuster.launcher.model.progress import RankProgress, RankStack
from torchmuster.launcher.net import part_messages

READ = (
    "Current thread 0x01 (most recent call first):\n"
    '  File "/home/u/data.py", line 88 in read\n  File "/home/u/train.py", line 4 in <module>\n'
)
REDUCE = (
    "Current thread 0x01 (most recent call first):\n"
    '  File "/e/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 1 in all_reduce\n'
    '  File "/home/u/train.py", line 41 in <module>\n'
)


class Head:
    """Stands for the head: keeps what the desk gives it."""

    def __init__(self, places=(0, 1)):
        self.places, self.sent, self.events, self.files = set(places), [], [], {}

    def send_to_nodes(self, message):
        self.sent.append(message)
        return set(self.places)

    def event(self, event):
        self.events.append((event.name, fields_of(event)))

    def append_file(self, path, text):
        self.files[path] = text


@pytest.fixture
def head():
    return Head()


@pytest.fixture
def desk(head):
    limits = WatchLimits(floor_s=60.0, ceiling_s=1800.0, blind_s=300.0)
    return HangMonitor(3, {0: "n1", 1: "n2"}, limits, "/logs/attempt-3", head, 0.0)


def progress(now, last_s):
    ranks = tuple(
        RankProgress(
            rank=rank,
            state="S",
            active_s=1.0,
            beat_age_s=now - last_s,
            steps_here=500,
            phase=RankPhase.COMPUTE,
            p99_s=0.1,
        )
        for rank in (0, 1)
    )
    return part_messages.Progress(attempt=3, ranks=ranks)


def answer(desk, number, place, text):
    stack = RankStack(rank=place, pid=10 + place, state="S", text=text)
    desk.take_stacks(place, part_messages.Stacks(number=number, stacks=(stack,)))


def run(desk, head, *, held=False, until_s=200.0, texts=(REDUCE, READ)):
    """Let nothing happen, with digests and answers; return the end that comes of it, and when."""
    now, num_asked = 2.0, 0
    while now < until_s:
        desk.take_progress(now, progress(now, 2.0))
        end = desk.advance(now, held=held)
        if len(head.sent) > num_asked:
            num_asked = len(head.sent)
            for place, text in enumerate(texts):
                answer(desk, head.sent[-1].number, place, text)
            end = desk.advance(now, held=held)
        if end is not None:
            return end, now
        now += 2.0
    return None, now


def test_a_hang_is_told_kept_in_files_and_ended_with_the_guilty_rank(desk, head):
    end, at = run(desk, head)
    assert 60 <= at <= 80
    assert (end.kind, end.rank, end.node, end.attempt) == (EndKind.HANG, 1, "n2", 3)
    assert end.is_failure
    assert end.error.where == "/home/u/data.py:88 in read"
    assert [fields["ended"] for _, fields in head.events] == [False, True]
    assert sorted(head.files) == ["/logs/attempt-3/stacks-0.txt", "/logs/attempt-3/stacks-1.txt"]
    text = head.files["/logs/attempt-3/stacks-1.txt"]
    assert text.startswith("rank 0 waits in all_reduce (train.py:41); rank 1 on n2 is in read()")
    assert 'File "/home/u/data.py", line 88 in read' in text


def test_a_held_watch_asks_for_nothing(desk, head):
    assert run(desk, head, held=True)[0] is None
    assert head.sent == []


def test_without_a_watch_a_client_still_gets_stacks(head):
    desk = HangMonitor(3, {0: "n1", 1: "n2"}, None, "/logs", head, 0.0)
    assert run(desk, head)[0] is None
    told = []
    desk.ask_for(5.0, "abc", told.append)
    answer(desk, 1, 0, REDUCE)
    assert desk.advance(5.1, held=False) is None
    assert told == []
    answer(desk, 1, 1, READ)
    desk.advance(5.2, held=False)
    (one,) = told
    assert one.ask_id == "abc"
    assert one.is_last
    assert "rank 1 on n2 is in read() (data.py:88)" in one.sentence


def test_a_node_that_does_not_answer_is_said(head):
    desk = HangMonitor(3, {0: "n1", 1: "n2"}, None, "/logs", head, 0.0)
    told = []
    desk.ask_for(5.0, "abc", told.append)
    answer(desk, 1, 0, REDUCE)
    desk.advance(11.0, held=False)
    assert "its agent did not answer" in told[0].sentence
    assert "no answer for rank 1" in told[0].lines


def test_two_clients_share_one_question(head):
    desk = HangMonitor(3, {0: "n1", 1: "n2"}, None, "/logs", head, 0.0)
    told = []
    desk.ask_for(5.0, "a", told.append)
    desk.ask_for(5.0, "b", told.append)
    assert len(head.sent) == 1
    desk.lose(0)
    desk.lose(1)
    desk.advance(5.1, held=False)
    assert [one.ask_id for one in told] == ["a", "b"]


def test_answers_to_another_question_or_of_strangers_are_dropped(head):
    desk = HangMonitor(3, {0: "n1"}, None, "/logs", head, 0.0)
    head.places = {0}
    told = []
    desk.ask_for(5.0, "a", told.append)
    answer(desk, 7, 0, READ)
    answer(desk, 1, 5, READ)
    assert desk.advance(5.1, held=False) is None
    assert told == []


def test_long_stacks_come_in_pieces_that_a_message_can_hold(head):
    desk = HangMonitor(3, {0: "n1", 1: "n2"}, None, "/logs", head, 0.0)
    told = []
    desk.ask_for(5.0, "a", told.append)
    lines = [f'  File "/{"x" * 90}/f{n}.py", line {n} in f' for n in range(12_000)]
    answer(desk, 1, 0, READ + "\n".join(lines))
    answer(desk, 1, 1, READ)
    desk.advance(5.1, held=False)
    assert len(told) > 1
    assert [one.is_last for one in told] == [False] * (len(told) - 1) + [True]
    assert all(len(messages.encode(one)) < 1 << 20 for one in told)


def test_off_means_no_limits():
    assert watch_limits(Limits(hang_s=0.0)) is None
    assert watch_limits(Limits()) == WatchLimits(floor_s=60.0, ceiling_s=1800.0, blind_s=300.0)


MEET = (
    "Current thread 0x01 (most recent call first):\n"
    '  File "/e/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 1 in init_process_group\n'
    '  File "/home/u/train.py", line 12 in <module>\n'
)


def start(desk, head, *, held=False, until_s=60.0, age=None, texts=(READ, MEET)):
    """Let ranks of a script without the library do nothing from the start on."""
    num_asked = 0
    for now in range(2, int(until_s), 2):
        ranks = tuple(RankProgress(rank=r, state="S", active_s=1.0, beat_age_s=age) for r in (0, 1))
        desk.take_progress(now, part_messages.Progress(attempt=3, ranks=ranks))
        desk.advance(now, held=held)
        if len(head.sent) > num_asked:
            num_asked = len(head.sent)
            for place, text in enumerate(texts):
                answer(desk, head.sent[-1].number, place, text)
            desk.advance(now, held=held)


@pytest.mark.parametrize("age", [None, 1.0])
def test_a_wait_at_the_start_is_told_of_once_and_ends_nothing(desk, head, age):
    start(desk, head, age=age)
    ((name, fields),) = head.events
    assert name == "start_wait"
    assert fields["attempt"] == 3
    assert fields["text"] == (
        "rank 1 waits in init_process_group (train.py:12) since 14 s"
        " for rank 0 on n1, which is in read() (data.py:88)"
    )
    assert head.files == {}


def test_a_held_start_is_not_looked_at(desk, head):
    start(desk, head, held=True)
    assert head.sent == []


@pytest.mark.parametrize(
    ("hang_s", "start_s"), [(60.0, 10.0), (600.0, 10.0), (24.0, 4.0), (5.0, 3.0)]
)
def test_the_time_of_a_start_follows_the_least_of_the_hang_watch(hang_s, start_s):
    assert watch_limits(Limits(hang_s=hang_s)).start_s == start_s
