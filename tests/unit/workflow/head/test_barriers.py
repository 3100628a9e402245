import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.net import messages
from torchmuster.core.net.ipc import BarrierWaits
from torchmuster.workflow.head import barriers as barriers_module
from torchmuster.workflow.head.barriers import MAX_BARRIERS, Barriers, name_missing, say_missing
from torchmuster.workflow.head.task_messages import BarrierAnswer, BarrierCall, BarrierState
from torchmuster.workflow.task.agent import answer_of_barrier

AB, ABC = ("a", "b"), ("a", "b", "c")


def kinds(answers):
    return {answer.caller_id: answer.kind.value for answer in answers}


class Group:
    """Barriers whose callers are named after their task, e.g. `b` or `b2`."""

    def __init__(self, members=ABC):
        self.barriers = Barriers(members)
        self.now_s = 0.0

    def come(self, caller, name="x", *, timeout_s=600.0, **more):
        call = BarrierCall(caller_id=caller, name=name, timeout_s=timeout_s, **more)
        return self.barriers.arrive(caller[0], call, self.now_s)

    def tick(self, now_s):
        self.now_s = now_s
        return self.barriers.tick(now_s)


def waiting(*callers, members=ABC, **more):
    """Return a group where these have come and wait."""
    group = Group(members)
    for caller in callers:
        assert group.come(caller, **more) == ()
    return group


def test_all_are_released_when_the_last_task_comes():
    group = waiting("a", "b")

    assert kinds(group.come("c")) == dict.fromkeys("abc", "released")


def test_a_full_barrier_begins_anew_a_hundred_times():
    group = Group()

    for number in range(100):
        assert group.come(f"a{number}") == group.come(f"b{number}") == ()
        released = kinds(group.come(f"c{number}"))
        assert released == dict.fromkeys((f"a{number}", f"b{number}", f"c{number}"), "released")
        group.barriers.leave(f"a{number}")


def test_names_are_barriers_of_their_own():
    group = Group(AB)

    assert group.come("a", "x") == ()
    assert group.come("b", "y") == ()
    assert kinds(group.come("a2", "y")) == {"b": "released", "a2": "released"}


def test_a_second_process_of_a_task_is_refused_and_the_others_go_on():
    group = waiting("a")
    (refused,) = group.come("a2")
    group.come("b")

    assert (refused.caller_id, refused.kind) == ("a2", BarrierState.FAILED)
    assert refused.what == "task `a` waits at the barrier `x` already"
    assert kinds(group.come("c")) == dict.fromkeys("abc", "released")


def test_several_processes_of_a_task_count_when_a_count_is_given():
    group = waiting("a1", "a2", "b1", members=AB, count=4)

    assert set(kinds(group.come("b2", count=4)).values()) == {"released"}


def test_the_same_call_never_counts_twice():
    group = waiting("a1", members=AB, count=2)
    answers = group.come("a1", count=2)

    assert [answer.what for answer in answers] == ["this call waits already"]
    assert len(group.come("b1", count=2)) == 2


def test_the_same_rank_is_refused_alone():
    group = waiting("a1", members=AB, count=3, rank=0)
    (refused,) = group.come("b1", count=3, rank=0)
    group.come("b2", count=3, rank=1)

    assert (refused.caller_id, refused.what) == ("b1", "rank 0 waits at the barrier `x` already")
    assert set(kinds(group.come("a3", count=3, rank=2))) == {"a1", "b2", "a3"}


@pytest.mark.parametrize("rank", [-1, 3, 1 << 40])
def test_a_rank_out_of_range_is_refused_alone(rank):
    group = waiting("a", rank=0)
    (refused,) = group.come("b", rank=rank)

    assert refused.what == f"rank {rank} is out of range: the barrier `x` waits for 3"
    assert refused.fix == "ranks are 0 to 2"
    group.come("b", rank=1)
    assert len(group.come("c", rank=2)) == 3


def test_counts_that_disagree_fail_both_and_name_both():
    group = waiting("a", count=2)
    answers = group.come("b")

    assert kinds(answers) == {"a": "failed", "b": "failed"}
    why = "task a waits for 2, task b waits for one call of each task"
    assert {answer.why for answer in answers} == {why}


def test_a_count_of_all_tasks_agrees_with_no_count():
    group = waiting("a", members=AB, count=2)

    assert len(group.come("b")) == 2


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"name": ""}, "`` is not a valid name of a barrier"),
        ({"name": "a b"}, "`a b` is not a valid name of a barrier"),
        ({"name": "x\n"}, "`x\n` is not a valid name of a barrier"),
        ({"name": "n" * 65}, f"`{'n' * 65}` is not a valid name of a barrier"),
        ({"count": 0}, "a barrier can't wait for 0"),
        ({"count": 1 << 17}, "a barrier can't wait for 131072"),
        ({"timeout_s": 0.0}, "0.0 s is not a valid limit for a wait"),
        ({"timeout_s": float("nan")}, "nan s is not a valid limit for a wait"),
        ({"timeout_s": float("inf")}, "inf s is not a valid limit for a wait"),
    ],
)
def test_what_can_t_be_is_refused_alone(more, what):
    group = waiting("a")
    (refused,) = group.come("b", **more)

    assert (refused.kind, refused.what) == (BarrierState.FAILED, what)
    group.come("b")
    assert len(group.come("c")) == 3


def test_a_caller_of_another_group_is_refused():
    (refused,) = Group().come("z")

    assert refused.what == "`z` is not a task of this group"


def test_a_thousand_barriers_can_wait_at_once_and_no_more():
    group = Group()
    for number in range(MAX_BARRIERS):
        assert group.come(f"a{number}", f"n{number}") == ()

    (refused,) = group.come("b", "one-more")
    assert refused.what == "the group waits at 1000 barriers already"
    group.barriers.leave("a7")
    assert group.come("b", "one-more") == ()
    assert group.come("c2", "n8") == ()


def test_used_names_don_t_pile_up():
    group = Group(("a",))
    for number in range(3 * MAX_BARRIERS):
        assert len(group.come(f"a{number}", f"n{number}")) == 1

    assert len(group.barriers._barriers) == MAX_BARRIERS


def test_who_leaves_is_withdrawn_and_may_come_again():
    group = waiting("a1", members=AB)
    group.barriers.leave("a1")
    group.barriers.leave("never came")

    assert group.come("b") == ()
    assert kinds(group.come("a2")) == {"b": "released", "a2": "released"}


def test_every_five_seconds_it_says_who_is_missing():
    group = waiting("a")
    assert group.tick(4.9) == ()
    (first,) = group.tick(5.0)
    assert group.tick(9.9) == ()
    group.come("b")
    (second,) = group.tick(10.0)

    assert (first.kind, first.missing, first.left_s) == (BarrierState.WAITING, ("b", "c"), 595.0)
    assert first.what == "1 of 3 is here, missing: b, c"
    assert (second.caller_id, second.what) == ("a", "2 of 3 are here, missing: c")


def test_missing_ranks_are_named_by_their_number():
    group = waiting("a", members=AB, count=300, rank=1)
    (answer,) = group.tick(5.0)

    first = ", ".join(f"rank {number}" for number in (0, *range(2, 9)))
    assert answer.what.endswith(f"{first} and 291 more")


def test_when_some_of_the_missing_are_enough_it_says_so():
    group = waiting("a", count=2)
    (answer,) = group.tick(5.0)

    assert answer.what == "1 of 2 is here, missing: 1 of b, c"


def test_at_its_limit_a_caller_learns_who_was_missing_and_the_others_go_on():
    group = waiting("a", timeout_s=3.0)
    group.come("b")
    (late,) = group.tick(3.0)

    assert (late.caller_id, late.kind, late.timed_out) == ("a", BarrierState.FAILED, True)
    assert late.what == "the barrier `x` was not full within 3 s: missing c"
    assert late.missing == ("c",)
    (still,) = group.tick(5.0)
    assert still.what == "1 of 3 is here, missing: a (gave up after 3 s), c"
    group.come("c")
    assert set(kinds(group.come("a2"))) == {"a2", "b", "c"}


def test_those_whose_limits_pass_together_name_the_same_missing():
    group = waiting("a", "b", timeout_s=3.0)

    assert [answer.missing for answer in group.tick(3.5)] == [("c",), ("c",)]


def test_a_task_that_ended_fails_the_wait_of_all_and_is_named():
    group = waiting("a", "b")
    answers = group.barriers.end_member("c", "exit code 3")

    assert kinds(answers) == {"a": "failed", "b": "failed"}
    assert answers[0].what == "the barrier `x` can never be full: task `c` has ended"
    assert (answers[0].why, answers[0].timed_out) == ("c: exit code 3", False)


def test_who_comes_after_a_task_has_ended_fails_at_once():
    group = Group()
    group.barriers.end_member("c", "exit code 0")
    (answer,) = group.come("a")

    assert answer.what == "the barrier `x` can never be full: task `c` has ended"


def test_a_count_that_the_living_can_fill_outlives_an_ended_task():
    group = waiting("a", count=2)

    assert group.barriers.end_member("c", "exit code 1") == ()
    assert kinds(group.come("b", count=2)) == {"a": "released", "b": "released"}


def test_a_count_that_the_living_can_t_fill_fails_at_once():
    group = waiting("a", count=2)
    group.barriers.end_member("b", "exit code 1")
    answers = group.barriers.end_member("c", "lost")

    assert kinds(answers) == {"a": "failed"}
    assert answers[0].why == "b: exit code 1\nc: lost"


def test_of_many_processes_a_task_that_took_part_is_missed_when_it_ends():
    group = waiting("a1", "a2", "b1", members=AB, count=4)
    answers = group.barriers.end_member("b", "signal SIGKILL")

    assert kinds(answers) == {"b1": "failed", "a1": "failed", "a2": "failed"}


def test_one_task_with_several_processes_can_fill_a_count_of_all_tasks():
    group = waiting("a1", "a2", count=3)

    assert group.barriers.end_member("b", "exit code 0") == ()
    assert group.barriers.end_member("c", "exit code 0") == ()
    assert len(group.come("a3", count=3)) == 3


def test_another_count_forgets_who_took_part():
    group = Group(AB)
    for caller in ("a1", "a2", "a3", "b1"):
        group.come(caller, count=4)
    group.come("a4", count=3)

    assert group.barriers.end_member("b", "exit code 0") == ()
    group.come("a5", count=3)
    assert len(group.come("a6", count=3)) == 3


def test_another_count_forgets_that_a_task_had_several_processes():
    group = Group()
    for caller in ("a1", "a2", "b1", "c1"):
        group.come(caller, count=4)
    group.come("a3", count=2)
    group.barriers.end_member("b", "exit code 1")

    assert kinds(group.barriers.end_member("c", "exit code 1")) == {"a3": "failed"}


def test_a_helper_that_never_came_does_not_fail_many_processes_of_one_task():
    group = waiting("a1", members=("a", "helper"), count=3)

    assert group.barriers.end_member("helper", "exit code 0") == ()
    (answer,) = group.tick(5.0)
    assert answer.what.endswith("helper (has ended: exit code 0) and 1 more")
    group.come("a2", count=3)
    assert len(group.come("a3", count=3)) == 3


CALLS = st.tuples(
    st.sampled_from(["come", "leave", "gone", "tick"]),
    st.sampled_from(ABC),
    st.sampled_from(["x", "y"]),
    st.sampled_from([None, None, None, 2, 3, 4]),
    st.sampled_from([None, None, 0, 1, 2]),
)


@given(st.lists(CALLS, max_size=80))
def test_whatever_happens_each_call_ends_once_and_a_release_is_full(calls):
    group = Group()
    counts, open_calls = {}, set()
    for number, (kind, member, name, count, rank) in enumerate(calls):
        caller = f"{member}{number}"
        answers = ()
        if kind == "come":
            counts[caller] = count or len(ABC)
            open_calls.add(caller)
            answers = group.come(caller, name, count=count, rank=rank, timeout_s=20.0)
        elif kind == "leave":
            for gone in sorted(open_calls)[:1]:
                group.barriers.leave(gone)
                open_calls.discard(gone)
        elif kind == "gone":
            answers = group.barriers.end_member(member, "exit code 1")
        else:
            answers = group.tick(group.now_s + 3.0)
        final = [answer for answer in answers if answer.kind is not BarrierState.WAITING]
        released = [a.caller_id for a in final if a.kind is BarrierState.RELEASED]
        assert len({a.caller_id for a in final}) == len(final)
        assert {a.caller_id for a in answers} <= open_calls
        assert all(counts[one] == len(released) for one in released)
        open_calls -= {a.caller_id for a in final}
        assert set(group.barriers._at) == open_calls
    left = group.tick(group.now_s + 20.0)
    assert {a.caller_id for a in left if a.timed_out} == open_calls


def test_answers_travel_over_the_channel_and_to_the_process():
    answer = BarrierAnswer(caller_id="7", kind=BarrierState.WAITING, missing=("b",), left_s=2.5)

    assert messages.decode(messages.encode(answer)) == answer
    assert answer_of_barrier(answer) == BarrierWaits(what="", left_s=2.5)


def test_the_module_does_no_work_of_its_own():
    assert not {"asyncio", "socket", "time", "os"} & set(vars(barriers_module))


@pytest.mark.parametrize(
    ("names", "num_missing", "text"),
    [
        (["b"], 1, "b"),
        (["b", "c"], 2, "b, c"),
        (["b", "c", "d"], 2, "2 of b, c, d"),
        (["b"], 4, "b and 3 more"),
        ([], 5, "5 more"),
        ([f"t{i}" for i in range(8)], 100, "t0, t1, t2, t3, t4, t5, t6, t7 and 92 more"),
        ([f"t{i}" for i in range(10)], 1, "1 of t0, t1, t2, t3, t4, t5, t6, t7 and 2 more"),
    ],
)
def test_who_is_missing_is_told_in_few_words(names, num_missing, text):
    assert name_missing(names, num_missing) == text


def test_a_progress_line_counts_and_names():
    assert say_missing(1, 3, "b, c") == "1 of 3 is here, missing: b, c"
    assert say_missing(2, 3, "c") == "2 of 3 are here, missing: c"
