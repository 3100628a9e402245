"""One life of the process group, by itself."""

from kit.values import worker_end
from torchmuster.core.head.attempt import Attempt, EndReports
from torchmuster.core.model.events import WorkersEndedEvent
from torchmuster.core.model.failure import RanCode, ValueNote
from unit.core.model.ends import succeeded


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


def _killed(rank, *, asked=True, **more):
    return worker_end(attempt=4, rank=rank, asked=asked, elapsed_s=float(rank), signum=9, **more)


def test_thousands_of_ends_are_a_few_events_and_none_is_missing():
    told = EndReports()
    single = [event for rank in range(4096) if (event := told.take(_killed(rank, asked=rank > 0)))]
    (rest,) = told.rest()

    assert [event.rank for event in single] == list(range(9))
    assert rest == WorkersEndedEvent(
        attempt=4, ranks="9-4095", num=4087, asked=True, what="SIGKILL", elapsed_s=4095.0
    )
    assert told.rest() == []


def test_each_way_to_end_is_an_event_and_what_a_rank_says_is_its_own():
    told = EndReports()
    for rank in range(64):
        assert told.take(_killed(rank, asked=False))
    note = ValueNote(size_bytes=1, sha256="", python="3.12")
    assert told.take(_killed(64, asked=False, value=note)).value == note
    assert told.take(_killed(65, asked=False, code=RanCode(files=())))
    assert told.take(_killed(66, asked=False)) is None
    assert told.take(succeeded(67)) is None
    assert [(one.ranks, one.what) for one in told.rest()] == [
        ("66", "SIGKILL"),
        ("67", "exit code 0"),
    ]
