"""One question at a time, for the watch or for a client; and one sentence where ranks wait in vain at the start."""

from dataclasses import replace

import pytest

from kit.stacks import TORCH, stack
from torchmuster.core.model.events import fields_of
from torchmuster.core.model.failure import EndKind
from torchmuster.core.model.plan import Limits
from torchmuster.core.model.progress import RankPhase
from torchmuster.core.net import messages
from torchmuster.launcher.facts.stacks import Frame, RankActivity, StackReading
from torchmuster.launcher.head.hang_monitor import (
    HangMonitor,
    StartLook,
    StartWatch,
    is_elsewhere,
    tell_start,
    watch_limits,
)
from torchmuster.launcher.head.hang_watch import WatchLimits
from torchmuster.launcher.model.progress import RankProgress, RankStack, StoreCall
from torchmuster.launcher.net import part_messages

C10D = f"{TORCH}/distributed/distributed_c10d.py"
READ = stack(("/home/u/data.py", 88, "read"), ("/home/u/train.py", 4, "<module>"))
REDUCE = stack((C10D, 1, "all_reduce"), ("/home/u/train.py", 41, "<module>"))
MEET = stack((C10D, 1, "init_process_group"), ("/home/u/train.py", 12, "<module>"))


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


def monitor(head, limits=None):
    return HangMonitor(3, {0: "n1", 1: "n2"}, limits, "/logs/attempt-3", head, 0.0)


@pytest.fixture
def desk(head):
    return monitor(head, WatchLimits(floor_s=60.0, ceiling_s=1800.0, blind_s=300.0))


@pytest.fixture
def told():
    """What a client has heard."""
    return []


@pytest.fixture
def asked(head, told):
    """Return a desk without a watch, which a client has asked for stacks."""
    desk = monitor(head)
    desk.ask_for(5.0, "abc", told.append)
    return desk


def answer(desk, number, place, text):
    rank_stack = RankStack(rank=place, pid=10 + place, state="S", text=text)
    desk.take_stacks(place, part_messages.Stacks(number=number, stacks=(rank_stack,)))


def run(desk, head, texts=(REDUCE, READ), *, held=False, until_s=200, **fields):
    """Let nothing happen, with digests, and answers to what is asked; return the end that comes of it, and when."""
    num_asked = 0
    for now in range(2, until_s, 2):
        usual = {"state": "S", "active_s": 1.0, "beat_age_s": now - 2.0, **fields}
        ranks = tuple(RankProgress(rank=rank, **usual) for rank in (0, 1))
        desk.take_progress(now, part_messages.Progress(attempt=3, ranks=ranks))
        end = desk.advance(now, held=held)
        if len(head.sent) > num_asked:
            num_asked = len(head.sent)
            for place, text in enumerate(texts):
                answer(desk, head.sent[-1].number, place, text)
            end = desk.advance(now, held=held)
        if end is not None:
            return end, now
    return None, until_s


TRAINS = {"steps_here": 500, "phase": RankPhase.COMPUTE, "p99_s": 0.1}


def test_a_hang_is_told_kept_in_files_and_ended_with_the_guilty_rank(desk, head):
    end, at = run(desk, head, **TRAINS)
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
    assert run(desk, head, held=True, **TRAINS)[0] is None
    assert head.sent == []


def test_without_a_watch_a_client_still_gets_stacks(head, told):
    desk = monitor(head)
    assert run(desk, head, **TRAINS)[0] is None
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


def test_a_node_that_does_not_answer_is_said(asked, told):
    answer(asked, 1, 0, REDUCE)
    asked.advance(11.0, held=False)
    assert "its agent did not answer" in told[0].sentence
    assert "no answer for rank 1" in told[0].lines


def test_two_clients_share_one_question(asked, head, told):
    asked.ask_for(5.0, "b", told.append)
    assert len(head.sent) == 1
    asked.lose(0)
    asked.lose(1)
    asked.advance(5.1, held=False)
    assert [one.ask_id for one in told] == ["abc", "b"]


def test_answers_to_another_question_or_of_strangers_are_dropped(head, told):
    desk = HangMonitor(3, {0: "n1"}, None, "/logs", head, 0.0)
    head.places = {0}
    desk.ask_for(5.0, "a", told.append)
    answer(desk, 7, 0, READ)
    answer(desk, 1, 5, READ)
    assert desk.advance(5.1, held=False) is None
    assert told == []


def test_long_stacks_come_in_pieces_that_a_message_can_hold(asked, told):
    lines = [f'  File "/{"x" * 90}/f{n}.py", line {n} in f' for n in range(12_000)]
    answer(asked, 1, 0, READ + "\n".join(lines))
    answer(asked, 1, 1, READ)
    asked.advance(5.1, held=False)
    assert len(told) > 1
    assert [one.is_last for one in told] == [False] * (len(told) - 1) + [True]
    assert all(len(messages.encode(one)) < 1 << 20 for one in told)


def test_off_means_no_limits():
    assert watch_limits(Limits(hang_s=0.0)) is None
    assert watch_limits(Limits()) == WatchLimits(floor_s=60.0, ceiling_s=1800.0, blind_s=300.0)


# A script without the library, whose ranks do nothing from the start on.


@pytest.mark.parametrize("age", [None, 1.0])
def test_a_wait_at_the_start_is_told_of_once_and_ends_nothing(desk, head, age):
    run(desk, head, (READ, MEET), until_s=60, beat_age_s=age)
    text = (
        "rank 1 waits in init_process_group (train.py:12) since 14 s"
        " for rank 0 on n1, which is in read() (data.py:88)"
    )
    ((name, fields),) = head.events
    assert (name, fields["attempt"], fields["text"]) == ("start_wait", 3, text)
    assert head.files == {}


def test_a_held_start_is_not_looked_at(desk, head):
    run(desk, head, (READ, MEET), until_s=60, held=True, beat_age_s=None)
    assert head.sent == []


@pytest.mark.parametrize(
    ("hang_s", "start_s"), [(60.0, 10.0), (600.0, 10.0), (24.0, 4.0), (5.0, 3.0)]
)
def test_the_time_of_a_start_follows_the_least_of_the_hang_watch(hang_s, start_s):
    assert watch_limits(Limits(hang_s=hang_s)).start_s == start_s


LIMIT_S = 10.0
STORE = "10.0.0.1:43211"
MEETS = StackReading(
    doing=RankActivity.WAITS,
    what="init_process_group",
    frame=Frame(file="/u/train.py", line=12, name="<module>"),
)


def stands(doing=RankActivity.WORKS, name="load"):
    frame = Frame(file="/u/data.py", line=30, name=name)
    return StackReading(doing=doing, what=f"{name}()", frame=frame)


LOADS = stands()


def look(rank, standing=MEETS, rest_s=12.0, **more):
    return StartLook(rank=rank, node=f"n{rank + 1}", standing=standing, rest_s=rest_s, **more)


class Play:
    """A start, seen every two seconds; rank 1 waits from the beginning."""

    def __init__(self, other=None, *, busy=False, store=None, ended=None, moves=False, **more):
        self.watch = StartWatch(limit_s=LIMIT_S, store=STORE)
        self.other, self.busy, self.more = other, busy, more
        self.store, self.ended, self.moves = store, ended or {}, moves
        self.now, self.num_asked = 0.0, 0

    def looks(self):
        waits = look(1, rest_s=self.now, store=self.store)
        if self.other is None:
            return [waits]
        other = self.other() if callable(self.other) else self.other
        return [look(0, other, rest_s=0.0 if self.busy else self.now, **self.more), waits]

    def go(self, until_s=400.0):
        """Let time pass; return the first sentence and when it was said."""
        while self.now < until_s:
            self.now += 2.0
            rests = {one.rank: one.rest_s for one in self.looks()}
            if self.watch.must_ask(self.now, rests, moves=self.moves):
                self.num_asked += 1
                text = self.watch.judge(self.looks(), self.ended)
                if text:
                    return text, self.now
        return "", self.now


def test_who_rests_while_others_wait_is_told_of_in_seconds_and_once():
    play = Play(stands())
    text, at = play.go()
    assert "rank 1 waits in init_process_group (train.py:12) since 14 s for rank 0 on n1" in text
    assert at == 14.0
    assert play.num_asked == 2
    assert play.go()[0] == ""
    assert play.num_asked == 2


@pytest.mark.parametrize("doing", [RankActivity.SAVES, RankActivity.EVALUATES])
def test_who_works_in_one_function_is_told_of_later(doing):
    assert Play(stands(), busy=True).go()[1] == 30.0
    assert Play(stands(doing)).go()[1] == 30.0


@pytest.mark.parametrize(
    ("standing", "more"),
    [
        (stands(RankActivity.DEBUGGED), {}),
        (stands(RankActivity.COMPILES), {}),
        (stands(), {"imports": True}),
    ],
)
def test_who_imports_compiles_or_is_in_a_debugger_is_not_told_of(standing, more):
    assert Play(standing, **more).go(2000.0)[0] == ""


def test_who_moves_on_between_two_looks_is_not_told_of():
    number = iter(range(10_000))
    assert Play(lambda: stands(name=f"step{next(number)}")).go()[0] == ""


def test_a_wait_of_all_is_told_of_later():
    text, at = Play().go()
    assert at >= 30.0
    assert "do rank= and world_size=" in text


def test_another_store_is_told_of_at_the_first_look():
    text, at = Play(store=StoreCall(named="10.0.0.1:29501")).go()
    assert at == LIMIT_S
    assert "rank 1 calls 10.0.0.1:29501, where no store answers" in text


def test_the_runs_own_store_is_no_reason():
    assert Play(store=StoreCall(connected=(STORE,))).go()[1] >= 30.0


def test_ranks_that_have_ended_are_waited_for_in_vain():
    text, at = Play(ended={0: "exit code 0"}).go()
    assert at <= 14.0
    assert "for rank 0, which has ended (exit code 0)" in text


def test_nothing_is_looked_at_once_a_step_is_done_or_while_all_work():
    play = Play(stands(), moves=True)
    assert play.go()[0] == ""
    assert play.num_asked == 0
    watch = StartWatch(limit_s=LIMIT_S)
    assert not watch.must_ask(100.0, {0: 2.0, 1: 4.0}, moves=False)
    assert not watch.must_ask(100.0, {}, moves=False)


def test_looks_get_rarer_and_end():
    play = Play(stands(RankActivity.DEBUGGED))
    play.go(120.0)
    assert play.num_asked <= 7
    play.go(20_000.0)
    assert play.num_asked == 10


def test_the_rank_that_does_not_come_is_named_with_its_place():
    told = tell_start([look(1), look(2), look(3)], [look(0, LOADS)], {}, STORE)
    assert told == (
        "ranks 1-3 wait in init_process_group (train.py:12) since 12 s"
        " for rank 0 on n1, which is in load() (data.py:30)"
    )


def test_code_outside_of_functions_is_named_by_its_line():
    module = replace(MEETS, doing=RankActivity.WORKS, what="<module>")
    told = tell_start([look(1)], [look(0, module, source="name = input()")], {}, STORE)
    assert told.endswith("for rank 0 on n1, which is at `name = input()` (train.py:12)")
    assert "..." in tell_start([look(1)], [look(0, module, source="x" * 200)], {}, STORE)


def test_several_that_do_not_come_are_grouped_and_those_that_ended_are_told_of():
    others = [look(1, LOADS), look(2, LOADS)]
    told = tell_start([look(3)], others, {0: "exit code 0"}, STORE)
    assert "rank 3 waits in" in told
    assert "for ranks 1-2, which are in load() (data.py:30)" in told
    assert told.endswith(", and for rank 0, which has ended (exit code 0)")


def test_more_groups_than_a_sentence_holds_are_counted():
    others = [look(rank, stands(name=f"f{rank}")) for rank in range(1, 6)]
    assert tell_start([look(0)], others, {}, STORE).endswith("and for 2 more")


def test_all_that_wait_in_vain_are_asked_for_rank_and_world_size():
    told = tell_start([look(0), look(1)], [], {}, STORE)
    assert "though all of this attempt have come; do rank= and world_size= there" in told
    assert "all of this attempt" not in tell_start([look(0)], [], {}, STORE)


LINES = (
    'train.py:2: os.environ["MASTER_ADDR"] = other',
    'train.py:3: os.environ["MASTER_PORT"] = "29501"',
)


@pytest.mark.parametrize(
    ("call", "does", "lines"),
    [
        ({"named": "10.0.0.1:29501", "lines": LINES}, "calls 10.0.0.1:29501, where no", LINES[1:]),
        ({"calling": ("10.9.9.9:77",), "lines": LINES}, "calls 10.9.9.9:77, where no", LINES),
        ({"connected": ("10.9.9.9:5",)}, "has no connection to the store of this run", ()),
    ],
)
def test_who_calls_another_store_is_told_both_addresses(call, does, lines):
    told = tell_start([look(0), look(1, store=StoreCall(**call))], [], {}, STORE)
    assert f"; rank 1 {does}" in told
    shown = "".join(f" `{line}`" for line in lines)
    assert told.endswith(f"{STORE} (MASTER_ADDR, MASTER_PORT): does the script set its own?{shown}")
    assert "world_size" not in told


@pytest.mark.parametrize(
    ("call", "elsewhere"),
    [
        (StoreCall(), True),
        (StoreCall(connected=("10.0.0.1:43211",)), False),
        (StoreCall(connected=("127.0.0.1:43211",)), False),
        (StoreCall(connected=("10.0.0.1:29501",)), True),
        (StoreCall(calling=(STORE,)), False),
        (StoreCall(calling=("10.9.9.9:43211",)), True),
        (StoreCall(named=STORE), False),
    ],
)
def test_a_connection_to_the_runs_own_store_is_none_elsewhere(call, elsewhere):
    assert is_elsewhere(call, STORE) is elsewhere
    assert not is_elsewhere(call, "")


def test_a_look_reads_the_stack():
    create = (f"{TORCH}/distributed/rendezvous.py", 1, "_create_c10d_store")
    text = stack(create, (C10D, 2, "init_process_group"), ("/u/train.py", 12, "<module>"))
    call = StoreCall(named="x:1")
    one = RankStack(rank=3, pid=1, state="S", text=text, store=call)
    seen = StartLook.of(3, "n4", one, rest_s=5.0)
    assert (seen.meets, seen.imports, seen.store) == (True, False, call)
    assert not StartLook.of(3, "n4", replace(one, state="T"), rest_s=5.0).meets
