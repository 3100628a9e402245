"""What owners decide keeps the promises of `docs/faults.md` in random lives.

Nothing starts after a stop, losses are paid for, a result ends all, two heads never live at once, every stop comes to an end, a
head that answers is let be, and no wrapper's second SIGTERM cuts a save short.
"""

import random
import signal

import pytest

from torchmuster.core.model.owner_policy import (
    FIRST_WORD_S,
    AfterLoss,
    AskForEnd,
    GiveUp,
    JobTime,
    OwnerPolicy,
    RestartBudget,
    StopRequests,
    StopWorkers,
    Warn,
)
from torchmuster.core.model.verdict import AT_ONCE


@pytest.mark.parametrize("seed", range(300))
def test_random_lives_keep_the_promises_of_owners(seed):
    chance = random.Random(seed)
    most = chance.randint(0, 4)
    lives = RestartBudget(most, spent=chance.randint(0, most))
    begun_with, num_free, num_again = lives.spent, 0, 0
    is_stopped = False
    for _ in range(30):
        is_stopped |= chance.random() < 0.05
        has_result, is_free = chance.random() < 0.1, chance.random() < 0.2
        left = lives.left
        follows = lives.after_loss(has_result=has_result, is_stopped=is_stopped, is_free=is_free)
        num_again += follows is AfterLoss.AGAIN
        num_free += follows is AfterLoss.AGAIN and is_free
        assert lives.spent <= most
        assert num_again - num_free == lives.spent - begun_with  # each was paid for
        assert lives.lost == num_again
        if has_result:
            assert follows is AfterLoss.OVER
        elif is_stopped:
            assert follows is AfterLoss.STOPPED
        elif not is_free:
            assert (follows is AfterLoss.AGAIN) == (left > 0)
        else:
            assert follows is AfterLoss.AGAIN
        if follows in (AfterLoss.OVER, AfterLoss.STOPPED):
            return


def test_a_budget_that_was_lowered_leaves_nothing():
    lives = RestartBudget(1, spent=3)
    assert (lives.left, lives.after_loss()) == (0, AfterLoss.SPENT)


GRACE_S = 20.0


class Life:
    """One owner with one head after the other, and whatever may happen to them, a second at a time."""

    def __init__(self, seed):
        self.chance = chance = random.Random(seed)
        self.now = 1000.0
        self.is_far = chance.random() < 0.3
        self.may_save = chance.random() < 0.5
        self.lives = RestartBudget(chance.randint(0, 3))
        self.policy = OwnerPolicy("n1", self.lives, StopRequests(), grace_s=GRACE_S)
        ends_at = chance.choice([None, self.now + chance.uniform(20, 400)])
        goes_on = chance.random() < 0.6
        self.limit = JobTime(
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
        if isinstance(look, GiveUp):
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
        if AskForEnd() in actions:
            end = self.chance.choice([None, self.limit.ends_at, self.limit.ends_at + 100.0])
            actions += self.limit.answer(end, self.now)
        for action in actions:
            if isinstance(action, Warn | StopWorkers):
                left_s = self.limit.ends_at - self.now
                assert left_s <= (self.limit.warn_s if action == Warn() else 16.0)
                assert left_s > -2.0, "too late"
                self.time_actions.append(action)

    def check_given_up(self):
        is_silent = self.quiet_s > 5.0 if self.counted else self.quiet_s > 15.0
        if not self.has_spoken and not self.counted:
            assert self.quiet_s > FIRST_WORD_S
        since_s = self.now - self.counted[0] if self.counted else 0.0
        assert is_silent or since_s > GRACE_S or len(self.counted) > 1, "it answered"

    def head_ends(self, *, was_killed):
        has_result = not was_killed and self.chance.random() < 0.2
        is_replaced = self.chance.random() < 0.05
        is_free = self.starts == 1 and not self.has_spoken
        spent = self.lives.spent
        follows = self.policy.after_loss(
            has_result=has_result, is_free=is_free, is_replaced=is_replaced
        )
        if follows is AfterLoss.AGAIN:
            assert self.lives.spent == spent + (not is_free)
            self.start()
            return
        assert self.lives.spent == spent
        expected = (
            AfterLoss.ELSEWHERE
            if is_replaced
            else AfterLoss.OVER
            if has_result
            else AfterLoss.STOPPED
            if self.counted
            else AfterLoss.SPENT
        )
        assert follows is expected
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
    assert life.starts <= life.lives.most + 2
    stops = [action for action in life.time_actions if action != Warn()]
    assert stops == [StopWorkers(at_once=False), StopWorkers(at_once=True)][: len(stops)]
    assert life.time_actions.count(Warn()) <= 1
    if Warn() in life.time_actions:
        assert life.time_actions[0] == Warn()


def test_all_ends_come_in_random_lives():
    """The lives above reach each end; else they would prove nothing about it."""
    ends = set()
    for seed in range(400):
        life = Life(seed)
        while life.over is None and life.now < 2200.0:
            life.second()
        ends.add(life.over)
    assert ends >= {one for one in AfterLoss if one is not AfterLoss.AGAIN}


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_was_taken_away_goes_on_elsewhere_and_what_a_user_ended_does_not(
    is_asked, is_whole, is_cancelled
):
    requests = StopRequests()
    if is_asked:
        requests.ask(signal.SIGTERM, 1.0)
    follows = requests.after_end(is_whole=is_whole, is_cancelled=is_cancelled)
    elsewhere = is_asked and not is_whole and not is_cancelled
    assert follows is (AfterLoss.ELSEWHERE if elsewhere else AfterLoss.OVER)
