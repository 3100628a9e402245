"""What follows the end of a life keeps its promises in random lives: nothing starts after a stop, losses are paid for, a result ends all."""

import random

import pytest

from torchmuster.model.liveness.lives import Lives, WhatFollows


@pytest.mark.parametrize("seed", range(300))
def test_random_lives_keep_the_promises_of_owners(seed):
    chance = random.Random(seed)
    most = chance.randint(0, 4)
    lives = Lives(most, spent=chance.randint(0, most))
    begun_with, num_free, num_again = lives.spent, 0, 0
    is_stopped = False
    for _ in range(30):
        is_stopped |= chance.random() < 0.05
        has_result, is_free = chance.random() < 0.1, chance.random() < 0.2
        left = lives.left
        follows = lives.after_loss(has_result=has_result, is_stopped=is_stopped, is_free=is_free)
        num_again += follows is WhatFollows.AGAIN
        num_free += follows is WhatFollows.AGAIN and is_free
        assert lives.spent <= most
        assert num_again - num_free == lives.spent - begun_with  # each was paid for
        assert lives.lost == num_again
        if has_result:
            assert follows is WhatFollows.OVER
        elif is_stopped:
            assert follows is WhatFollows.STOPPED
        elif not is_free:
            assert (follows is WhatFollows.AGAIN) == (left > 0)
        else:
            assert follows is WhatFollows.AGAIN
        if follows in (WhatFollows.OVER, WhatFollows.STOPPED):
            return


def test_a_budget_that_was_lowered_leaves_nothing():
    lives = Lives(1, spent=3)
    assert (lives.left, lives.after_loss()) == (0, WhatFollows.SPENT)
