"""One life of the process group, by itself, and whether another one follows."""

import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.values import worker_end
from torchmuster.core.head.attempt import Attempt, EndReports, Next, RestartBook
from torchmuster.core.model.events import WorkersEndedEvent
from torchmuster.core.model.failure import EndKind, RanCode, ValueNote
from torchmuster.core.model.plan import RestartPolicy
from unit.core.model.ends import exited, killed, lost, preempted, raised, succeeded


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


# Whether a failure is tried again.


BUG = raised(0, "ValueError", "bad", elapsed_s=1.0)
LATE_BUG = raised(3, "ValueError", "bad", elapsed_s=9000.0)
KILLED = killed(0, signal.SIGKILL)
FINAL = raised(0, "SnapshotError", is_final=True)
NO_NAME = raised(0, "NameError")
EXITED = exited(0, 3, tail=("no",))
AGAIN, SAME = Next.AGAIN, Next.FAIL_SAME_BUG


def counting(max_restarts):
    return RestartBook(max_restarts, policy=RestartPolicy.COUNT)


# How each of some failures is answered: an end, or an end and the step that the attempt came to.
@pytest.mark.parametrize(
    ("most", "spent"), [(2, 0), (0, 0), (2, 2)], ids=["two", "none", "two under a lost head"]
)
def test_restarts_are_spent_until_none_is_left(most, spent):
    book = RestartBook(most, spent=spent)

    answers = [book.after_failure(KILLED) for _ in range(most - spent + 1)]

    assert answers == [*[AGAIN] * (most - spent), Next.FAIL_SPENT]
    assert book.spent == most


# Failures, some with the step that their attempt came to, and what is said to the last one; the others are tried again.
LAST_ANSWERS = {
    "the same twice": ([BUG, BUG], SAME),
    "the same after hours of loading": ([BUG, LATE_BUG], SAME),
    "a step that was done before is none": ([(KILLED, 300), (BUG, 200), (BUG, 290)], SAME),
    "a later step is progress and the same is none": ([(BUG, 100), (BUG, 250), (BUG, 250)], SAME),
    "no step is none": ([(BUG, 100), BUG], SAME),
    "the same exit code with the same last lines": ([EXITED, EXITED], SAME),
    "the same signal": ([(killed(0, signal.SIGSEGV), 1)] * 5, AGAIN),
    "another failure in between": ([BUG, lost(2, "gone"), BUG], AGAIN),
    "one that says it is final": ([FINAL], Next.FAIL_FINAL),
    "a name that is not defined": ([NO_NAME], Next.FAIL_FINAL),
    "a syntax error": ([raised(0, "SyntaxError")], Next.FAIL_FINAL),
}


@pytest.mark.parametrize(("failures", "last"), LAST_ANSWERS.values(), ids=LAST_ANSWERS)
def test_a_failure_is_tried_again_while_another_attempt_may_mend_it(failures, last):
    book = RestartBook(max_restarts=5)

    told = [one if isinstance(one, tuple) else (one, None) for one in failures]
    answers = [book.after_failure(end, step) for end, step in told]

    assert answers == [*[AGAIN] * (len(told) - 1), last]
    assert book.spent == answers.count(AGAIN)


def test_where_restarts_are_counted_every_failure_is_tried_again_as_under_torchrun():
    book = counting(4)

    answers = [book.after_failure(end) for end in (BUG, BUG, NO_NAME, FINAL, BUG)]

    assert answers == [*[AGAIN] * 4, Next.FAIL_SPENT]


def test_the_attempts_that_ended_alike_are_known_by_their_numbers():
    book = RestartBook(max_restarts=5)
    for number, end in enumerate([KILLED, BUG, BUG]):
        book.after_failure(replace(end, attempt=number))

    assert book.same_as == 1  # of three attempts the last two


def test_where_restarts_are_counted_code_75_is_a_failure_like_any_other():
    asked = preempted(0, asked=True)

    assert counting(1).take(preempted(0), wants_to_resume=False).kind is EndKind.EXIT_CODE
    assert counting(1).take(preempted(0), wants_to_resume=True).kind is EndKind.PREEMPTED
    assert counting(1).take(asked, wants_to_resume=False) == asked
    assert RestartBook(1).take(preempted(0), wants_to_resume=False) == preempted(0)


def test_preemption_spends_no_restart():
    book = RestartBook(max_restarts=0)

    assert book.after_preemption(preempted(0), step=10) is AGAIN
    assert book.after_preemption(preempted(0), step=20) is AGAIN
    assert book.spent == 0


def test_a_script_that_does_nothing_but_ask_to_be_resumed_is_not_resumed_for_ever():
    book = RestartBook(max_restarts=5)

    assert book.after_preemption(preempted(0)) is AGAIN
    assert book.after_preemption(preempted(0)) is SAME


ENDS = st.sampled_from(
    [BUG, LATE_BUG, KILLED, NO_NAME, FINAL, exited(1, 3), lost(2, "gone"), raised(0, "OSError")]
)
STEPS = st.none() | st.integers(0, 5)


@given(
    st.sampled_from(RestartPolicy),
    st.integers(0, 4),
    st.integers(0, 4),
    st.lists(st.tuples(ENDS, STEPS), max_size=20),
)
def test_the_budget_is_never_overspent_and_nothing_follows_an_end(policy, most, spent, failures):
    book = RestartBook(most, min(spent, most), policy)
    before = book.spent

    answers = [book.after_failure(end, step) for end, step in failures]

    again = [answer is AGAIN for answer in answers]
    assert book.spent - before == sum(again) <= most - before
    assert again == sorted(again, reverse=True)  # once it was over, it stays so
