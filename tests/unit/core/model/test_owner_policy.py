"""What owners decide keeps the promises of `docs/faults.md` in random lives, and step by step: the time is an argument.

Nothing starts after a stop, losses are paid for, a result ends all, two heads never live at once, every stop comes to an end, a
head that answers is let be, and no wrapper's second SIGTERM cuts a save short.
"""

import asyncio
import itertools
import random
import signal
import threading
import time

import pytest

from torchmuster.core.model import owner_policy
from torchmuster.core.model.lease import SILENT_S, SLOW_S, OwnClock
from torchmuster.core.model.verdict import AT_ONCE
from torchmuster.core.owner import parts
from torchmuster.core.owner.parts import Deadline


def test_a_budget_that_was_lowered_leaves_nothing():
    lives = owner_policy.RestartBudget(1, spent=3)
    assert (lives.left, lives.after_loss()) == (0, owner_policy.AfterLoss.SPENT)


GRACE_S = 20.0
WARN = owner_policy.Warn()
STOPS = [owner_policy.StopWorkers(at_once=at_once) for at_once in (False, True)]


class Life:
    """One owner with one head after the other, and whatever may happen to them, a second at a time."""

    def __init__(self, seed):
        self.chance = chance = random.Random(seed)
        self.now = 1000.0
        self.is_far = chance.random() < 0.3
        self.may_save = chance.random() < 0.5
        most = chance.randint(0, 4)
        self.lives = owner_policy.RestartBudget(most, spent=chance.randint(0, most))
        self.policy = owner_policy.OwnerPolicy(
            "n1", self.lives, owner_policy.StopRequests(), grace_s=GRACE_S
        )
        ends_at = chance.choice([None, self.now + chance.uniform(20, 400)])
        goes_on = chance.random() < 0.6
        self.limit = owner_policy.JobTime(
            chance.choice([0.0, 30.0]),
            ends_at,
            goes_on=goes_on,
            ends_the_run=not goes_on and chance.random() < 0.5,
            may_ask=chance.random() < 0.5,
        )
        self.starts, self.quiet_s, self.over = 0, 0.0, None
        self.counted, self.time_actions = [], []
        self.start()

    def start(self):
        assert not self.counted, "nothing starts after a stop"
        self.starts += 1
        self.mood = self.chance.choices(["works", "deaf", "stopped", "slow"], [6, 1, 1, 1])[0]
        self.has_spoken, self.quiet_s = False, 0.0
        self.policy.begin(self.now)

    @property
    def state(self):
        if self.is_far:
            return None
        return {"stopped": "T"}.get(self.mood, "S")

    def second(self):
        self.now += 1.0
        self.quiet_s += 1.0
        self.ask_to_stop()
        self.pass_time()
        if self.mood == "works" and self.chance.random() < 0.7:
            self.policy.hear(self.now)
            self.has_spoken, self.quiet_s = True, 0.0
        if self.chance.random() < 0.01:
            self.mood = self.chance.choice(["deaf", "stopped", "works"])
        look = self.policy.look(self.now, self.state)
        if isinstance(look, owner_policy.GiveUp):
            self.check_given_up()
            self.head_ends(was_killed=True)
        elif self.chance.random() < 0.01 or (self.counted and self.chance.random() < 0.1):
            self.head_ends(was_killed=False)

    def ask_to_stop(self):
        if self.chance.random() > 0.02:
            return
        signum = self.chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, AT_ONCE])
        for again in range(self.chance.choice([1, 1, 2])):  # the wrapper, and its group
            before = self.policy.stops.count
            counts = self.policy.stops.ask(signum, self.now + again / 4, may_save=self.may_save)
            assert counts == (self.policy.stops.count > before)
            if counts:
                by_term = before and signum in (signal.SIGTERM, signal.SIGHUP)
                assert not (by_term and self.may_save), "a save was cut short"
                assert not again or signum == AT_ONCE, "one request counted twice"
                self.counted.append(self.now)

    def pass_time(self):
        actions = self.limit.look(self.now)
        if owner_policy.AskForEnd() in actions:
            end = self.chance.choice([None, self.limit.ends_at, self.limit.ends_at + 100.0])
            actions += self.limit.answer(end, self.now)
        for action in actions:
            if isinstance(action, owner_policy.Warn | owner_policy.StopWorkers):
                left_s = self.limit.ends_at - self.now
                assert left_s <= (self.limit.warn_s if action == WARN else 16.0)
                assert left_s > -2.0, "too late"
                self.time_actions.append(action)

    def check_given_up(self):
        is_silent = self.quiet_s > 5.0 if self.counted else self.quiet_s > 15.0
        if not self.has_spoken and not self.counted:
            assert self.quiet_s > owner_policy.FIRST_WORD_S
        since_s = self.now - self.counted[0] if self.counted else 0.0
        assert is_silent or since_s > GRACE_S or len(self.counted) > 1, "it answered"

    def head_ends(self, *, was_killed):
        ends, lives = owner_policy.AfterLoss, self.lives
        has_result = not was_killed and self.chance.random() < 0.2
        is_replaced = self.chance.random() < 0.05
        is_free = self.chance.random() < 0.2 or (self.starts == 1 and not self.has_spoken)
        spent, left = lives.spent, lives.left
        follows = self.policy.after_loss(
            has_result=has_result, is_free=is_free, is_replaced=is_replaced
        )
        ways = [
            (is_replaced, ends.ELSEWHERE),
            (has_result, ends.OVER),
            (self.counted, ends.STOPPED),
            (is_free or left, ends.AGAIN),
            (True, ends.SPENT),
        ]
        assert follows is next(end for condition, end in ways if condition)
        is_again = follows is ends.AGAIN
        assert lives.spent == spent + (is_again and not is_free) <= lives.most, "each is paid for"
        assert lives.lost == self.starts - 1 + is_again
        if is_again:
            self.start()
        else:
            self.over = follows


@pytest.mark.parametrize("seed", range(400))
def test_random_lives_of_an_owner_keep_its_promises(seed):
    life = Life(seed)
    for _ in range(1200):
        life.second()
        if life.over is not None:
            break
        if life.counted:
            assert life.now - life.counted[0] <= GRACE_S + 32.0, "a stop did not come to an end"
        if len(life.counted) > 1:  # one that asks for an end at once is one
            assert life.now - life.counted[1] <= 5.0, "the second stop did not end it"
    stops = [action for action in life.time_actions if action != WARN]
    assert stops == STOPS[: len(stops)]
    assert WARN not in life.time_actions[1:], "at most one warning, before all stops"


def test_all_ends_come_in_random_lives():
    """The lives above reach each end; else they would prove nothing about it."""
    ends = set()
    for seed in range(400):
        life = Life(seed)
        while life.over is None and life.now < 2200.0:
            life.second()
        ends.add(life.over)
    assert ends >= set(owner_policy.AfterLoss) - {owner_policy.AfterLoss.AGAIN}


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_was_taken_away_goes_on_elsewhere_and_what_a_user_ended_does_not(
    is_asked, is_whole, is_cancelled
):
    requests = owner_policy.StopRequests()
    if is_asked:
        requests.ask(signal.SIGTERM, 1.0)
    follows = requests.after_end(is_whole=is_whole, is_cancelled=is_cancelled)
    elsewhere = is_asked and not is_whole and not is_cancelled
    ends = owner_policy.AfterLoss
    assert follows is (ends.ELSEWHERE if elsewhere else ends.OVER)


# Whether the head still answers: silence, stops, and what follows.


class Watched:
    def __init__(self, grace_s=GRACE_S):
        self.now = 1000.0
        self.clock = OwnClock(lambda: self.now)
        self.policy = owner_policy.OwnerPolicy("n1", owner_policy.RestartBudget(0), grace_s=grace_s)
        self.policy.begin(self.clock())
        self.policy.hear(self.clock())
        self.said = []

    def pass_time(self, seconds, state="S", *, answers=False):
        """Look once a second; return when the head was given up, and why."""
        for second in range(1, round(seconds) + 1):
            self.now += 1.0
            if answers:
                self.policy.hear(self.clock())
            match self.policy.look(self.clock(), state):
                case owner_policy.Say(text=text):
                    self.said.append(text)
                case owner_policy.GiveUp(why=why):
                    return second, why
        return None

    def stop(self, signum=signal.SIGINT):
        assert self.policy.stops.ask(signum, self.now + len(self.said))
        self.now += 0.6  # less than a look


@pytest.fixture
def watched():
    return Watched()


def test_a_head_that_answers_is_never_spoken_of(watched):
    assert watched.pass_time(3600, answers=True) is None
    assert watched.said == []


@pytest.mark.parametrize("state", ["T", "t", "D"])
def test_a_head_that_stands_still_is_named_after_5_s_and_given_up_after_15(watched, state):
    second, why = watched.pass_time(60, state)
    assert SILENT_S < second <= SILENT_S + 1
    assert why == "it was silent for 16 s and was killed"
    assert watched.said[0] == (
        "the head of n1 has been silent for 5 s; after 15 s it counts as lost"
    )


def test_a_head_that_waits_for_a_processor_is_waited_for(watched):
    assert watched.pass_time(SLOW_S) is None
    assert "its process runs, so muster waits for it" in watched.said[0]
    assert watched.pass_time(2) is not None


def test_a_head_on_another_machine_may_be_silent_as_long_as_its_connection(watched):
    second, _ = watched.pass_time(60, None)
    assert owner_policy.FAR_SILENT_S < second <= owner_policy.FAR_SILENT_S + 1


def test_a_head_that_starts_has_more_time(watched):
    watched.policy.begin(watched.clock())
    second, _ = watched.pass_time(60, "T")
    assert owner_policy.FIRST_WORD_S < second <= owner_policy.FIRST_WORD_S + 1


def test_a_client_that_stood_still_itself_does_not_take_the_head_for_dead(watched):
    watched.now += 3600.0
    assert watched.pass_time(1, "S") is None
    assert watched.pass_time(60, "S", answers=True) is None
    assert watched.said == []


def test_a_stop_does_not_wait_for_a_head_that_stands_still(watched):
    watched.stop()
    second, _ = watched.pass_time(60, "T")
    assert second <= 6


def test_one_stop_has_a_limit_behind_the_grace(watched):
    watched.stop()
    second, why = watched.pass_time(600, answers=True)
    assert GRACE_S < second < GRACE_S + 60
    assert why == "it did not end in time when it was asked to stop, and was killed"


def test_a_stop_without_a_grace_of_ours_has_no_limit_while_the_head_answers():
    watched = Watched(grace_s=None)
    watched.stop()
    watched.stop()
    assert watched.pass_time(3600, answers=True) is None
    second, _ = watched.pass_time(60, "T")
    assert second == 16, "as without a stop"


def test_the_second_stop_is_final(watched):
    watched.stop()
    watched.stop()
    second, _ = watched.pass_time(60, answers=True)
    assert second <= 5


def test_the_second_stop_of_a_silent_head_kills_at_once(watched):
    watched.pass_time(6, "S")
    watched.stop()
    watched.stop()
    second, _ = watched.pass_time(60, "S")
    assert second == 1


def test_one_request_for_an_end_at_once_leaves_the_head_its_time(watched):
    watched.stop(AT_ONCE)
    second, _ = watched.pass_time(600, answers=True)
    assert second > GRACE_S


# When workers are warned, when they are stopped.


class Timed:
    """A clock, a scheduler that answers at once, and what was done when."""

    def __init__(self):
        self.now = 1000.0
        self.done = []

    def watch(self, limit, ask=None):
        """Do what a limit asks for until it has nothing left to do; return the actions."""
        limit.may_ask = ask is not None
        while not limit.is_done:
            actions = limit.look(self.now)
            if owner_policy.AskForEnd() in actions:
                assert limit.look(self.now + 0.5) == [], "it waits for the answer"
                actions = [*actions, *limit.answer(ask(), self.now)]
            self.done += [(self.now, action) for action in actions]
            self.now += 1.0
        return [action for _, action in self.done]

    def when(self, kind):
        return [at for at, action in self.done if isinstance(action, kind)]


@pytest.fixture
def timed():
    return Timed()


def test_workers_are_warned_so_long_before_the_end(timed):
    limit = owner_policy.JobTime(120.0, ends_at=4000.0)
    timed.watch(limit)
    assert timed.when(owner_policy.Warn) == [4000.0 - 120.0]
    assert limit.was_up


def test_a_warning_longer_than_half_of_the_job_is_shortened_and_said(timed):
    first = timed.watch(owner_policy.JobTime(60.0, ends_at=1040.0))[0]
    assert isinstance(first, owner_policy.Say)
    assert "--warn 60s is too long" in first.text
    assert timed.when(owner_policy.Warn) == [1020.0]


def test_workers_that_stay_are_stopped_only_where_the_run_goes_on(timed):
    timed.watch(owner_policy.JobTime(60.0, ends_at=4000.0))
    assert timed.when(owner_policy.StopWorkers) == []
    done = timed.watch(owner_policy.JobTime(60.0, ends_at=8000.0, goes_on=True))
    assert [one for one in done if isinstance(one, owner_policy.StopWorkers)] == STOPS
    first, second = timed.when(owner_policy.StopWorkers)
    assert 8000.0 - 60.0 < first < second < 8000.0


def test_a_run_with_a_limit_of_its_own_is_stopped_at_the_end(timed):
    timed.watch(owner_policy.JobTime(60.0, ends_at=4000.0, ends_the_run=True))
    assert (timed.when(owner_policy.Warn), timed.when(owner_policy.StopWorkers)) == (
        [3940.0],
        [4000.0],
    )


def test_an_end_is_asked_for_where_it_is_unknown():
    asked = []

    def ask():
        return asked.append(1) or 5.0

    Deadline(owner_policy.JobTime(9.0, ends_at=1.0), ask=ask).find_out()
    assert asked == []
    deadline = Deadline(owner_policy.JobTime(0.0), ask=ask)
    deadline.find_out()
    assert (deadline.limit.ends_at, asked) == (5.0, [1])


def test_an_end_that_nobody_knows_is_said_where_the_run_goes_on(timed):
    (said,) = timed.watch(owner_policy.JobTime(9.0, goes_on=True))
    assert "the end of this job is unknown" in said.text


def test_the_time_is_up_from_the_warning_on():
    limit = owner_policy.JobTime(120.0, ends_at=1000.0)
    assert not limit.is_up(879.0)
    assert limit.is_up(881.0)
    assert not owner_policy.JobTime(120.0).is_up(881.0)


def test_a_signal_counts_as_the_time_limit_at_the_end_only():
    limit = owner_policy.JobTime(30.0, ends_at=1000.0, was_up=True)
    assert not limit.is_over(980.0), "the warning came; somebody else may stop the job now"
    assert limit.is_over(1000.0)
    assert owner_policy.JobTime(0.0, was_up=True).is_over(1.0), (
        "nobody knows the end, but a warning came"
    )
    assert not owner_policy.JobTime(0.0).is_over(1.0)


def test_a_job_that_was_suspended_or_got_more_time_is_warned_before_its_new_end(timed):
    asked = []

    def ask():
        asked.append(timed.now)
        if timed.now < 3880.0:
            return 4000.0
        if timed.now < 3970.0:
            return 4094.0
        return 5000.0 if timed.now < 4800.0 else 5010.0  # 10 s more are no move

    limit = owner_policy.JobTime(120.0, ends_at=4000.0)
    done = timed.watch(limit, ask)
    assert timed.when(owner_policy.Warn) == [5000.0 - 120.0]
    assert asked[:2] == [1000.0 + 720.0, 1720.0 + 540.0]
    assert {3880.0, 3974.0, 4880.0} <= set(asked)
    assert min(b - a for a, b in itertools.pairwise(asked)) >= 60.0
    assert len(asked) < 25
    assert [one for one in done if isinstance(one, owner_policy.TellEnd)] == [
        owner_policy.TellEnd(4094.0),
        owner_policy.TellEnd(5000.0),
    ]
    assert limit.ends_at == 5000.0
    assert not limit.is_over(4500.0)


def test_a_scheduler_that_does_not_answer_moves_nothing(timed):
    limit = owner_policy.JobTime(120.0, ends_at=4000.0, goes_on=True)
    timed.watch(limit, lambda: None)
    assert (timed.when(owner_policy.Warn), limit.ends_at) == ([3880.0], 4000.0)


def test_a_lowered_limit_is_obeyed(timed):
    timed.watch(owner_policy.JobTime(120.0, ends_at=4000.0), lambda: 3000.0)
    assert timed.when(owner_policy.Warn) == [3000.0 - 120.0]


def test_the_end_is_followed_for_a_library_that_watches_it_itself(timed):
    timed.watch(owner_policy.JobTime(0.0, ends_at=2000.0), lambda: 3000.0)
    assert timed.when(owner_policy.Warn) == []
    assert [action for _, action in timed.done if isinstance(action, owner_policy.TellEnd)] == [
        owner_policy.TellEnd(3000.0)
    ]
    assert timed.now == 3001.0


def test_a_stop_that_has_begun_is_not_taken_back(timed):
    """Workers that are leaving are not left half stopped because the job got more time."""
    limit = owner_policy.JobTime(0.0, ends_at=1080.0, goes_on=True)
    timed.watch(limit, lambda: 1080.0 if timed.now < 1066.0 else 9000.0)
    assert timed.when(owner_policy.StopWorkers) == [1065.0, 1070.0]


def test_workers_that_are_stopped_late_have_as_long_until_they_are_killed(timed):
    limit = owner_policy.JobTime(
        0.0, ends_at=1008.0, goes_on=True
    )  # the job's last 15 s have begun
    timed.watch(limit)
    first, second = timed.when(owner_policy.StopWorkers)
    assert (first, second - first) == (1000.0, 5.0)


def test_an_answer_that_took_long_is_an_answer(timed):
    limit = owner_policy.JobTime(120.0, ends_at=4000.0, may_ask=True)
    while owner_policy.AskForEnd() not in limit.look(timed.now):
        timed.now += 1.0
    timed.now = 3881.0  # the scheduler, or this process, was stopped meanwhile
    assert owner_policy.Warn() in limit.answer(None, timed.now)


def test_the_clock_of_a_job_acts_and_asks_beside_it(monkeypatch):
    monkeypatch.setattr(parts, "_LOOK_EVERY_S", 0.005)
    monkeypatch.setattr("torchmuster.core.model.owner_policy._ASK_EVERY_S", 0.02)
    monkeypatch.setattr("torchmuster.core.model.owner_policy._MOVED_S", 0.05)
    now, ends, done = time.time(), [], []

    def ask_again():
        threading.Event().wait(0.05)  # longer than between two questions
        ends.append(now + 0.6)
        return ends[-1]

    deadline = Deadline(
        owner_policy.JobTime(0.1, now + 0.3, ends_the_run=True), ask_again=ask_again
    )
    asyncio.run(deadline.watch(done.append))
    kinds = [type(action) for action in done if not isinstance(action, owner_policy.Say)]
    assert kinds == [owner_policy.TellEnd, owner_policy.Warn, owner_policy.StopWorkers]
    assert time.time() >= now + 0.6
    assert ends
