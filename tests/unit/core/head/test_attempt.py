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


def counting(max_restarts):
    return RestartBook(max_restarts, policy=RestartPolicy.COUNT)


def test_restarts_are_spent_until_none_is_left():
    book = RestartBook(max_restarts=2)

    answers = [book.after_failure(killed(0, signal.SIGKILL)) for _ in range(3)]

    assert answers == [Next.AGAIN, Next.AGAIN, Next.FAIL_SPENT]
    assert book.spent == 2


def test_without_restarts_the_first_failure_is_the_end():
    assert RestartBook(max_restarts=0).after_failure(exited(0, 3)) is Next.FAIL_SPENT


def test_restarts_spent_under_a_lost_head_count():
    assert RestartBook(max_restarts=2, spent=2).after_failure(exited(0, 3)) is Next.FAIL_SPENT


@pytest.mark.parametrize("again", [BUG, LATE_BUG], ids=["soon", "after hours of loading"])
def test_the_same_failure_twice_is_not_tried_again_however_long_it_took(again):
    book = RestartBook(max_restarts=5)

    assert book.after_failure(BUG) is Next.AGAIN
    assert book.after_failure(again) is Next.FAIL_SAME_BUG
    assert book.spent == 1


def test_the_same_failure_at_a_later_step_is_tried_again():
    book = RestartBook(max_restarts=5)

    answers = [book.after_failure(BUG, step) for step in (100, 250, 250)]

    assert answers == [Next.AGAIN, Next.AGAIN, Next.FAIL_SAME_BUG]


def test_the_attempts_that_ended_alike_are_known_by_their_numbers():
    book = RestartBook(max_restarts=5)
    ends = [killed(0, signal.SIGKILL), BUG, BUG]
    answers = [book.after_failure(replace(end, attempt=n)) for n, end in enumerate(ends)]

    assert answers == [Next.AGAIN, Next.AGAIN, Next.FAIL_SAME_BUG]
    assert book.same_as == 1  # of three attempts the last two


def test_steps_that_were_done_before_are_no_progress():
    book = RestartBook(max_restarts=5)
    book.after_failure(killed(0, signal.SIGKILL), step=300)
    book.after_failure(BUG, step=200)

    assert book.after_failure(BUG, step=290) is Next.FAIL_SAME_BUG


def test_an_attempt_that_came_to_no_step_has_made_no_progress():
    book = RestartBook(max_restarts=5)
    book.after_failure(BUG, step=100)

    assert book.after_failure(BUG, step=None) is Next.FAIL_SAME_BUG


def test_the_same_exit_code_twice_with_the_same_last_lines_is_not_tried_again():
    book = RestartBook(max_restarts=5)

    assert book.after_failure(exited(0, 3, tail=("no",))) is Next.AGAIN
    assert book.after_failure(exited(0, 3, tail=("no",))) is Next.FAIL_SAME_BUG


def test_the_same_signal_is_tried_again_and_again():
    book = RestartBook(max_restarts=5)

    answers = [book.after_failure(killed(0, signal.SIGSEGV), step=1) for _ in range(5)]

    assert answers == [Next.AGAIN] * 5


def test_another_failure_in_between_makes_it_another_story():
    book = RestartBook(max_restarts=5)
    book.after_failure(BUG)
    book.after_failure(lost(2, "gone"))

    assert book.after_failure(BUG) is Next.AGAIN


@pytest.mark.parametrize(
    "end",
    [raised(0, "SnapshotError", is_final=True), raised(0, "NameError"), raised(0, "SyntaxError")],
)
def test_what_another_attempt_can_t_mend_is_not_tried_again(end):
    book = RestartBook(max_restarts=5)

    assert book.after_failure(end) is Next.FAIL_FINAL
    assert book.spent == 0


def test_where_restarts_are_counted_every_failure_is_tried_again_as_under_torchrun():
    book = counting(4)

    ends = [BUG, BUG, raised(0, "NameError"), raised(0, "SnapshotError", is_final=True), BUG]

    assert [book.after_failure(end) for end in ends] == [Next.AGAIN] * 4 + [Next.FAIL_SPENT]


def test_where_restarts_are_counted_code_75_is_a_failure_like_any_other():
    asked = preempted(0, asked=True)

    assert counting(1).take(preempted(0), wants_to_resume=False).kind is EndKind.EXIT_CODE
    assert counting(1).take(preempted(0), wants_to_resume=True).kind is EndKind.PREEMPTED
    assert counting(1).take(asked, wants_to_resume=False) == asked
    assert RestartBook(1).take(preempted(0), wants_to_resume=False) == preempted(0)


def test_preemption_spends_no_restart():
    book = RestartBook(max_restarts=0)

    assert book.after_preemption(preempted(0), step=10) is Next.AGAIN
    assert book.after_preemption(preempted(0), step=20) is Next.AGAIN
    assert book.spent == 0


def test_a_script_that_does_nothing_but_ask_to_be_resumed_is_not_resumed_for_ever():
    book = RestartBook(max_restarts=5)

    assert book.after_preemption(preempted(0)) is Next.AGAIN
    assert book.after_preemption(preempted(0)) is Next.FAIL_SAME_BUG


ENDS = st.sampled_from(
    [
        BUG,
        LATE_BUG,
        exited(1, 3),
        killed(0, signal.SIGKILL),
        lost(2, "gone"),
        raised(0, "NameError"),
        raised(0, "OSError"),
        raised(0, "SnapshotError", is_final=True),
    ]
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

    again = [answer is Next.AGAIN for answer in answers]
    assert book.spent - before == sum(again) <= most - before
    assert again == sorted(again, reverse=True)  # once it was over, it stays so
