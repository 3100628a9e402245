"""One life of the process group, by itself."""

from torchmuster.head.attempt import Attempt
from unit.model.ends import succeeded


def test_ranks_that_end_one_by_one_are_told_every_ten_seconds():
    attempt = Attempt(number=0, started_at=0.0, members={}, ranks={})
    told = []
    for now in range(25):
        attempt.add(succeeded(now))
        if attempt.tells_early_ends(now):
            told.append(now)
    assert told == [0, 10, 20]
    assert not attempt.tells_early_ends(29.0)
    assert attempt.tells_early_ends(30.0)
    assert not attempt.tells_early_ends(60.0)
