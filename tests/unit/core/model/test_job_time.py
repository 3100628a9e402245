"""When workers are warned, when they are stopped: the time is an argument."""

import asyncio
import itertools
import threading
import time

import pytest

from torchmuster.core.model.owner_policy import AskForEnd, JobTime, Say, StopWorkers, TellEnd, Warn
from torchmuster.core.owner import parts
from torchmuster.core.owner.parts import Deadline


class World:
    """A clock, a scheduler that answers at once, and what was done when."""

    def __init__(self):
        self.now = 1000.0
        self.done = []

    def watch(self, limit, ask=None):
        """Do what a limit asks for until it has nothing left to do; return the actions."""
        limit.may_ask = ask is not None
        while not limit.is_done:
            actions = limit.look(self.now)
            if AskForEnd() in actions:
                assert limit.look(self.now + 0.5) == [], "it waits for the answer"
                actions = [*actions, *limit.answer(ask(), self.now)]
            self.done += [(self.now, action) for action in actions]
            self.now += 1.0
        return [action for _, action in self.done]

    def when(self, kind):
        return [at for at, action in self.done if isinstance(action, kind)]


@pytest.fixture
def world():
    return World()


def test_workers_are_warned_so_long_before_the_end(world):
    limit = JobTime(120.0, ends_at=4000.0)
    world.watch(limit)
    assert world.when(Warn) == [4000.0 - 120.0]
    assert limit.was_up


def test_a_warning_longer_than_half_of_the_job_is_shortened_and_said(world):
    first = world.watch(JobTime(60.0, ends_at=1040.0))[0]
    assert isinstance(first, Say)
    assert "--warn 60s is too long" in first.text
    assert world.when(Warn) == [1020.0]


def test_workers_that_stay_are_stopped_only_where_the_run_goes_on(world):
    world.watch(JobTime(60.0, ends_at=4000.0))
    assert world.when(StopWorkers) == []
    done = world.watch(JobTime(60.0, ends_at=8000.0, goes_on=True))
    assert [one for one in done if isinstance(one, StopWorkers)] == [
        StopWorkers(at_once=False),
        StopWorkers(at_once=True),
    ]
    first, second = world.when(StopWorkers)
    assert 8000.0 - 60.0 < first < second < 8000.0


def test_a_run_with_a_limit_of_its_own_is_stopped_at_the_end(world):
    world.watch(JobTime(60.0, ends_at=4000.0, ends_the_run=True))
    assert (world.when(Warn), world.when(StopWorkers)) == ([3940.0], [4000.0])


def test_an_end_is_asked_for_where_it_is_unknown():
    asked = []
    ask = lambda: asked.append(1) or 5.0  # noqa: E731
    Deadline(JobTime(9.0, ends_at=1.0), ask=ask).find_out()
    assert asked == []
    deadline = Deadline(JobTime(0.0), ask=ask)
    deadline.find_out()
    assert (deadline.limit.ends_at, asked) == (5.0, [1])


def test_an_end_that_nobody_knows_is_said_where_the_run_goes_on(world):
    (said,) = world.watch(JobTime(9.0, goes_on=True))
    assert "the end of this job is unknown" in said.text


def test_the_time_is_up_from_the_warning_on():
    limit = JobTime(120.0, ends_at=1000.0)
    assert not limit.is_up(879.0)
    assert limit.is_up(881.0)
    assert not JobTime(120.0).is_up(881.0)


def test_a_signal_counts_as_the_time_limit_at_the_end_only():
    limit = JobTime(30.0, ends_at=1000.0, was_up=True)
    assert not limit.is_over(980.0), "the warning came; somebody else may stop the job now"
    assert limit.is_over(1000.0)
    assert JobTime(0.0, was_up=True).is_over(1.0), "nobody knows the end, but a warning came"
    assert not JobTime(0.0).is_over(1.0)


def test_a_job_that_was_suspended_or_got_more_time_is_warned_before_its_new_end(world):
    asked = []

    def ask():
        asked.append(world.now)
        if world.now < 3880.0:
            return 4000.0
        return (
            4094.0 if world.now < 3970.0 else 5000.0 if world.now < 4800.0 else 5010.0
        )  # 10 s more are no move

    limit = JobTime(120.0, ends_at=4000.0)
    done = world.watch(limit, ask)
    assert world.when(Warn) == [5000.0 - 120.0]
    assert asked[:2] == [1000.0 + 720.0, 1720.0 + 540.0]
    assert {3880.0, 3974.0, 4880.0} <= set(asked)
    assert min(b - a for a, b in itertools.pairwise(asked)) >= 60.0
    assert len(asked) < 25
    assert [one for one in done if isinstance(one, TellEnd)] == [TellEnd(4094.0), TellEnd(5000.0)]
    assert limit.ends_at == 5000.0
    assert not limit.is_over(4500.0)


def test_a_scheduler_that_does_not_answer_moves_nothing(world):
    limit = JobTime(120.0, ends_at=4000.0, goes_on=True)
    world.watch(limit, lambda: None)
    assert (world.when(Warn), limit.ends_at) == ([3880.0], 4000.0)


def test_a_lowered_limit_is_obeyed(world):
    world.watch(JobTime(120.0, ends_at=4000.0), lambda: 3000.0)
    assert world.when(Warn) == [3000.0 - 120.0]


def test_the_end_is_followed_for_a_library_that_watches_it_itself(world):
    world.watch(JobTime(0.0, ends_at=2000.0), lambda: 3000.0)
    assert world.when(Warn) == []
    assert [action for _, action in world.done if isinstance(action, TellEnd)] == [TellEnd(3000.0)]
    assert world.now == 3001.0


def test_a_stop_that_has_begun_is_not_taken_back(world):
    """Workers that are leaving are not left half stopped because the job got more time."""
    limit = JobTime(0.0, ends_at=1080.0, goes_on=True)
    world.watch(limit, lambda: 1080.0 if world.now < 1066.0 else 9000.0)
    assert world.when(StopWorkers) == [1065.0, 1070.0]


def test_workers_that_are_stopped_late_have_as_long_until_they_are_killed(world):
    limit = JobTime(0.0, ends_at=1008.0, goes_on=True)  # the job's last 15 s have begun
    world.watch(limit)
    first, second = world.when(StopWorkers)
    assert (first, second - first) == (1000.0, 5.0)


def test_an_answer_that_took_long_is_an_answer(world):
    limit = JobTime(120.0, ends_at=4000.0, may_ask=True)
    while AskForEnd() not in limit.look(world.now):
        world.now += 1.0
    world.now = 3881.0  # the scheduler, or this process, was stopped meanwhile
    assert Warn() in limit.answer(None, world.now)


def test_the_clock_of_a_job_acts_and_asks_beside_it(monkeypatch):
    monkeypatch.setattr(parts, "_LOOK_EVERY_S", 0.005)
    monkeypatch.setattr("torchmuster.core.model.owner_policy._ASK_EVERY_S", 0.02)
    monkeypatch.setattr("torchmuster.core.model.owner_policy._MOVED_S", 0.05)
    now, ends, done = time.time(), [], []

    def ask_again():
        threading.Event().wait(0.05)  # longer than between two questions
        ends.append(now + 0.6)
        return ends[-1]

    deadline = Deadline(JobTime(0.1, now + 0.3, ends_the_run=True), ask_again=ask_again)
    asyncio.run(deadline.watch(done.append))
    kinds = [type(action) for action in done if not isinstance(action, Say)]
    assert kinds == [TellEnd, Warn, StopWorkers]
    assert time.time() >= now + 0.6
    assert ends
