import signal

from torchmuster.agent.restarts import Next, RestartBook
from unit.model.ends import exited, killed, lost, preempted, raised

SOON = {"elapsed_s": 1.0}


def test_restarts_are_spent_until_none_is_left():
    book = RestartBook(max_restarts=2)

    answers = [book.after_failure(killed(0, signal.SIGKILL)) for _ in range(3)]

    assert answers == [Next.AGAIN, Next.AGAIN, Next.FAIL_SPENT]
    assert book.spent == 2


def test_without_restarts_the_first_failure_is_the_end():
    assert RestartBook(max_restarts=0).after_failure(exited(0, 3)) is Next.FAIL_SPENT


def test_restarts_spent_under_a_lost_head_count():
    assert RestartBook(max_restarts=2, spent=2).after_failure(exited(0, 3)) is Next.FAIL_SPENT


def test_the_same_bug_twice_soon_after_the_start_is_not_tried_again():
    book = RestartBook(max_restarts=5)

    assert book.after_failure(raised(0, "ValueError", **SOON)) is Next.AGAIN
    assert book.after_failure(raised(3, "ValueError", **SOON)) is Next.FAIL_SAME_BUG
    assert book.spent == 1


def test_the_same_exit_code_twice_soon_after_the_start_is_not_tried_again():
    book = RestartBook(max_restarts=5)

    assert book.after_failure(exited(0, 3, **SOON)) is Next.AGAIN
    assert book.after_failure(exited(0, 3, **SOON)) is Next.FAIL_SAME_BUG


def test_the_same_signal_is_tried_again_and_again():
    book = RestartBook(max_restarts=5)

    answers = [book.after_failure(killed(0, signal.SIGSEGV, **SOON)) for _ in range(5)]

    assert answers == [Next.AGAIN] * 5


def test_another_failure_in_between_makes_it_another_story():
    book = RestartBook(max_restarts=5)
    book.after_failure(raised(0, "ValueError", **SOON))
    book.after_failure(lost(2, "gone", **SOON))

    assert book.after_failure(raised(0, "ValueError", **SOON)) is Next.AGAIN


def test_the_same_bug_long_after_the_start_is_tried_again():
    book = RestartBook(max_restarts=5)
    book.after_failure(raised(0, "ValueError", elapsed_s=100.0))

    assert book.after_failure(raised(0, "ValueError", elapsed_s=100.0)) is Next.AGAIN


def test_an_exception_that_says_it_is_final_is_not_tried_again():
    book = RestartBook(max_restarts=5)

    assert book.after_failure(raised(0, "SnapshotError", is_final=True)) is Next.FAIL_FINAL
    assert book.spent == 0


def test_preemption_spends_no_restart():
    book = RestartBook(max_restarts=0)

    assert book.after_preemption(preempted(0)) is Next.AGAIN
    assert book.after_preemption(preempted(0)) is Next.AGAIN
    assert book.spent == 0


def test_a_script_that_does_nothing_but_ask_to_be_resumed_is_not_resumed_for_ever():
    book = RestartBook(max_restarts=5)

    assert book.after_preemption(preempted(0, **SOON)) is Next.AGAIN
    assert book.after_preemption(preempted(0, **SOON)) is Next.FAIL_SAME_BUG
