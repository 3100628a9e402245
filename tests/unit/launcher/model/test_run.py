"""One fold of a run's record for every view: bounded, tolerant, the same however it comes."""

import json
import random
from pathlib import Path

import pytest

from kit.odd_records import ODD
from kit.records import BEGAN, EVENTS, end_of_rank, event, failure, start
from torchmuster.core.model.states import RunState
from torchmuster.launcher.model import run as runs

RECORDED = Path(__file__).parent / "recorded"


def test_a_run_with_a_failure_and_a_good_end():
    record = runs.fold_run(EVENTS)

    first, second = record.attempts
    assert (first.began, first.ended, first.workers_at) == (BEGAN + 1, BEGAN + 11, BEGAN + 3)
    assert (first.failure.what, first.cause.rank) == ("SIGKILL in rank 3 on n2", 3)
    assert [(end.rank, end.what) for end in first.ends] == [(3, "SIGKILL")]
    assert (first.num_ends, first.num_workers) == (1, 4)
    assert (second.ended, second.state, second.failure) == (BEGAN + 25, "succeeded", None)
    assert record.result.state is RunState.SUCCEEDED
    assert (record.began, record.last_at) == (BEGAN, BEGAN + 25)
    assert record.ended_by() == ["SIGKILL in rank 3 on n2", ""]
    assert runs.frequent_causes(record.attempts, 3) == [("SIGKILL in rank 3 on n2", 1)]


def test_an_attempt_that_began_since_makes_the_end_no_end():
    record = runs.fold_run([*EVENTS, start(30, 2, why="restarted")])
    assert record.result is None
    assert record.attempts[-1].ended is None


def test_an_attempt_without_a_failure_was_ended_by_what_follows_it():
    lines = [start(0, 0), start(9, 1, why="n2 has left"), start(20, 2, why="after attempt 1")]
    record = runs.fold_run(lines)
    assert [one.ended for one in record.attempts] == [BEGAN + 9, BEGAN + 20, None]
    assert record.ended_by() == ["n2 has left", "its head was lost", ""]


def test_ends_of_thousands_of_ranks_are_counted():
    many = {"ranks": "64-4095", "num": 4032, "what": "SIGABRT", "asked": False}
    killed = {"ranks": "0-3", "num": 4, "what": "SIGKILL", "asked": True}
    ends = [
        event(at, "workers_ended", attempt=0, **end) for at, end in ((9.9, many), (9.95, killed))
    ]
    (attempt,) = runs.fold_run([start(0, 0), *ends]).attempts
    assert (attempt.num_ends, attempt.last_end) == (4032, BEGAN + 9.95)


def test_a_wait_is_told_with_what_is_left_now():
    missing = [{"node": "n2", "why": "lost; a replacement has not connected"}]
    wait = event(0, "waiting", missing=missing, num_missing=1, wanted=2, left_s=410.0)
    record = runs.fold_run([failure(0, 0), wait])
    said = "waiting for 1 of 2 nodes: n2 (lost; a replacement has not connected)"
    assert record.wait_sentence(BEGAN + 10) == f"{said}; 6 min 40 s left"
    assert record.wait_sentence(BEGAN + 1000) == f"{said}; 0 s left"
    record.take(start(20, 1))
    assert record.wait_sentence(BEGAN + 30) == ""
    assert record.has_waited


def test_spares_are_those_that_still_wait():
    begun = {**start(0, 0), "spares": ["n3", "n4"]}
    lines = [begun, event(1, "spare_lost", node="n3", why="w"), event(2, "spare_joined", node="n5")]
    assert runs.fold_run(lines).spares == ["n4", "n5"]
    assert runs.fold_run([*lines, event(3, "spare_taken", node="n4", before="n1")]).spares == ["n5"]


def test_what_a_cluster_says_of_lost_pods_is_joined_where_it_belongs():
    lines = [start(0, 0), failure(1, 0), start(2, 1), start(3, 2, why="n2 has left")]
    record = runs.fold_run(lines)
    told = record.with_losses({"0": "evicted", "1": "drained"})
    assert told[0].failure.what == "SIGKILL in rank 3 on n2; evicted"
    assert told[2].start.why == "n2 has left; drained"
    assert record.attempts[0].failure.what == "SIGKILL in rank 3 on n2", "the record stays as it is"


def test_of_very_many_attempts_the_middle_ones_are_kept_in_short():
    lines = []
    for number in range(1000):
        lines += [start(number, number), failure(number + 0.5, number)]
    record = runs.fold_run(lines)
    whole = [one.number for one in record.attempts if one.start.nodes]
    assert len(record.attempts) == 1000
    assert whole == [*range(runs.WHOLE_FIRST), *range(1000 - runs.WHOLE_LAST, 1000)]
    assert all(one.failure.what for one in record.attempts)
    same = {id(record.attempts[n].start.nodes) for n in whole[runs.WHOLE_FIRST :]}
    assert len(same) == 1, "nodes that stay the same are kept once"


def test_of_very_many_moments_the_first_and_the_last_are_kept():
    lines = [event(n, "notice", text=f"word {n}") for n in range(1000)]
    record = runs.fold_run(lines)
    texts = [one.text for one in record.moments]
    assert (len(texts), record.num_moments) == (runs.MOST_MOMENTS, 1000)
    assert (texts[0], texts[runs.MOST_MOMENTS // 2 - 1]) == ("word 0", "word 99")
    assert texts[runs.MOST_MOMENTS // 2 :] == [f"word {n}" for n in range(900, 1000)]


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_odd_lines_are_left_out_and_the_rest_counts(text):
    odd = []
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        odd += [found] if isinstance(found, dict) else []
    for at in range(len(EVENTS)):
        record = runs.fold_run([*EVENTS[:at], *odd, *EVENTS[at:]])
        assert record.attempts[-1].number in (0, 1, 77)
        assert record.result is not None


def test_a_fold_never_fails_at_any_mix_of_lines_and_values():
    dice = random.Random(7)
    values = [None, True, -1, 0, 3, 1e300, float("nan"), float("inf"), "", "x", [], [1], {}, "n1"]
    lines = [*EVENTS, event(2, "waiting", left_s=3.0), event(3, "time_limit", ends_at=BEGAN)]
    for _ in range(300):
        record = runs.RunRecord()
        for _ in range(12):
            line = dict(dice.choice(lines))
            for _ in range(dice.randrange(4)):
                line[dice.choice([*line])] = dice.choice(values)
            record.take(line)
        record.wait_sentence(BEGAN)
        record.ended_by()
        record.with_losses({"0": "said"})


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.glob("*.jsonl")))
def test_records_of_earlier_versions_are_read(name):
    """Each is of a run of two nodes in which a worker was killed once: made by that commit, whose name it has."""
    lines = [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]
    record = runs.fold_run(lines)
    assert record.num_bad == 0
    assert [one.number for one in record.attempts] == [0, 1]
    assert record.attempts[0].cause.signum == 9
    assert [len(one.start.nodes) for one in record.attempts] == [2, 2]
    assert record.result.state is RunState.SUCCEEDED
    assert record.code is not None


def test_ranks_that_fail_again_and_again_take_no_more_room():
    record = runs.RunRecord()
    for number in range(300):
        record.take(start(number, number))
        for rank in range(100):
            end = {"attempt": number, "rank": rank, "what": "SIGABRT", "asked": False}
            record.take(event(number, "worker_ended", **end))
        record.take(event(number, "attempt_failed", attempt=number, what="w", cause=end_of_rank(0)))
    assert sum(len(one.ends) for one in record.attempts) == 64 * (
        runs.WHOLE_FIRST + runs.WHOLE_LAST
    )
    assert sum(one.num_ends for one in record.attempts) == 30_000


def test_a_short_series_stays_as_it_is():
    points = [(n, float(n)) for n in range(8)]

    assert runs.thinned(points, 8) == points


def test_a_long_series_keeps_each_spike_its_ends_and_its_gaps():
    points = [(n, 1.0) for n in range(100_000)]
    points[12_345] = (12_345, 99.0)
    points[54_321] = (54_321, -99.0)
    points[77_777] = (77_777, None)

    few = runs.thinned(points, 1000)

    assert len(few) <= 1001
    assert {points[0], points[12_345], points[54_321], points[77_777], points[-1]} <= set(few)
    assert [step for step, _ in few] == sorted(step for step, _ in few)
