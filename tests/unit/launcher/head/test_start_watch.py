"""One sentence where ranks wait in vain at the start; none where who is missing will come."""

import pytest

from torchmuster.launcher.facts.stacks import Frame, RankActivity, StackReading
from torchmuster.launcher.head.hang_monitor import StartLook, StartWatch
from torchmuster.launcher.model.progress import StoreCall

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


class Play:
    """A start, seen every two seconds; rank 1 waits from the beginning."""

    def __init__(self, other=None, busy=False, **more):
        self.watch = StartWatch(limit_s=LIMIT_S, store=STORE)
        self.other, self.busy, self.more = other, busy, more
        self.ended, self.store, self.moves = {}, None, False
        self.now, self.num_asked = 0.0, 0

    def looks(self):
        waits = StartLook(rank=1, node="n2", standing=MEETS, rest_s=self.now, store=self.store)
        if self.other is None:
            return [waits]
        rest_s = 0.0 if self.busy else self.now
        other = self.other() if callable(self.other) else self.other
        return [StartLook(rank=0, node="n1", standing=other, rest_s=rest_s, **self.more), waits]

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
    play = Play()
    play.store = StoreCall(named="10.0.0.1:29501")
    text, at = play.go()
    assert at == LIMIT_S
    assert "rank 1 calls 10.0.0.1:29501, where no store answers" in text


def test_the_runs_own_store_is_no_reason():
    play = Play()
    play.store = StoreCall(connected=(STORE,))
    assert play.go()[1] >= 30.0


def test_ranks_that_have_ended_are_waited_for_in_vain():
    play = Play()
    play.ended = {0: "exit code 0"}
    text, at = play.go()
    assert at <= 14.0
    assert "for rank 0, which has ended (exit code 0)" in text


def test_nothing_is_looked_at_once_a_step_is_done_or_while_all_work():
    play = Play(stands())
    play.moves = True
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
