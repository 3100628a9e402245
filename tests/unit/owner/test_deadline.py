"""When workers are warned, when they are stopped."""

import asyncio
import itertools

import pytest

from torchmuster.owner import stops as module
from torchmuster.owner.stops import Deadline


class Clock:
    """A clock that goes on only while somebody sleeps."""

    def __init__(self):
        self.now = 1000.0

    def time(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds

    async def to_thread(self, ask):
        return ask()


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(module, "asyncio", made)
    return made


def watch(deadline):
    """Return what a deadline does until it has nothing left to do."""
    done = []
    says = [lambda text: done.append(("say", text)), lambda: done.append("warn")]
    asyncio.run(deadline.watch(*says, lambda at_once: done.append(("stop", at_once))))
    return done


def test_workers_are_warned_so_long_before_the_end(clock):
    deadline = Deadline(120.0, ends_at=4000.0)
    assert [word for word in watch(deadline) if word == "warn"] == ["warn"]
    assert clock.now == 4000.0 - 120.0
    assert deadline.was_up


def test_a_warning_longer_than_half_of_the_job_is_shortened_and_said(clock):
    done = watch(Deadline(60.0, ends_at=1040.0))
    assert done[0][0] == "say"
    assert "--warn 60s is too long" in done[0][1]
    assert "warn" in done
    assert clock.now == 1020.0


def test_workers_that_stay_are_stopped_only_where_the_run_goes_on(clock):
    stays = watch(Deadline(60.0, ends_at=4000.0))
    assert not [word for word in stays if word[0] == "stop"]
    stopped = watch(Deadline(60.0, ends_at=8000.0, goes_on=True))
    assert [word for word in stopped if word[0] == "stop"] == [("stop", False), ("stop", True)]
    assert 8000.0 - 60.0 < clock.now < 8000.0


def test_an_end_is_asked_for_where_it_is_unknown():
    asked = []
    ask = lambda: asked.append(1) or 5.0  # noqa: E731
    Deadline(9.0, ends_at=1.0, ask=ask).find_out()
    assert asked == []
    deadline = Deadline(0.0, ask=ask)
    deadline.find_out()
    assert (deadline.ends_at, asked) == (5.0, [1])


def test_an_end_that_nobody_knows_is_said_where_the_run_goes_on():
    ((_, text),) = watch(Deadline(9.0, goes_on=True))
    assert "the end of this job is unknown" in text


def test_the_time_is_up_from_the_warning_on():
    deadline = Deadline(120.0, ends_at=1000.0)
    assert not deadline.is_up(879.0)
    assert deadline.is_up(881.0)
    assert not Deadline(120.0).is_up(881.0)


def test_a_signal_counts_as_the_time_limit_at_the_end_only():
    deadline = Deadline(30.0, ends_at=1000.0, was_up=True)
    assert not deadline.is_over(980.0), "the warning came; somebody else may stop the job now"
    assert deadline.is_over(1000.0)
    assert Deadline(0.0, was_up=True).is_over(1.0), "nobody knows the end, but a warning came"
    assert not Deadline(0.0).is_over(1.0)


def test_a_job_that_was_suspended_or_got_more_time_is_warned_before_its_new_end(clock):
    asked, moved = [], []

    def ask():
        asked.append(clock.now)
        if clock.now < 3880.0:
            return 4000.0
        return (
            4094.0 if clock.now < 3970.0 else 5000.0 if clock.now < 4800.0 else 5010.0
        )  # 10 s more are no move

    deadline = Deadline(120.0, ends_at=4000.0, ask_again=ask, moved=moved.append)
    assert [word for word in watch(deadline) if word == "warn"] == ["warn"]
    assert clock.now == 5000.0 - 120.0
    assert asked[:2] == [1000.0 + 720.0, 1720.0 + 540.0]
    assert {3880.0, 3974.0, 4880.0} <= set(asked)
    assert min(b - a for a, b in itertools.pairwise(asked)) >= 60.0
    assert len(asked) < 25
    assert moved == [4094.0, 5000.0]
    assert deadline.ends_at == 5000.0
    assert not deadline.is_over(4500.0)


def test_a_scheduler_that_does_not_answer_moves_nothing(clock):
    deadline = Deadline(120.0, ends_at=4000.0, ask_again=lambda: None, goes_on=True)
    assert "warn" in watch(deadline)
    assert deadline.ends_at == 4000.0


def test_a_lowered_limit_is_obeyed(clock):
    deadline = Deadline(120.0, ends_at=4000.0, ask_again=lambda: 3000.0)
    assert "warn" in watch(deadline)
    assert clock.now == 3000.0 - 120.0


def test_the_end_is_followed_for_a_library_that_watches_it_itself(clock):
    moved = []
    deadline = Deadline(0.0, ends_at=2000.0, ask_again=lambda: 3000.0, moved=moved.append)
    assert [word for word in watch(deadline) if word == "warn"] == []
    assert (moved, clock.now) == ([3000.0], 3000.0)
