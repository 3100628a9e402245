"""The queue of a sweep lives random lives; what it promises is checked after each event."""

from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.model.states import RunState
from torchmuster.multirun.sweep.plan import MetricChoice, MetricGoal
from torchmuster.multirun.sweep.policy import SweepPolicy

ENDS = (RunState.SUCCEEDED, RunState.FAILED, RunState.PREEMPTED, RunState.LOST)


def begun(num_members, num_slots, settled=None, metric=None):
    policy = SweepPolicy(num_slots, metric)
    policy.begin(range(num_members), settled or {})
    return policy


def start_all(policy):
    starts = []
    while policy.has_room:
        starts.append(policy.start())
    return starts


@given(
    num_members=st.integers(1, 12),
    num_slots=st.integers(1, 5),
    settled=st.sets(st.integers(0, 11)),
    data=st.data(),
)
def test_a_random_life_starts_every_member_once_and_no_slot_twice(
    num_members, num_slots, settled, data
):
    earlier = {n: RunState.SUCCEEDED for n in settled if n < num_members}
    policy = begun(num_members, num_slots, earlier)
    begun_members, again, cancelled, stopped = [], [], False, set()
    while not policy.is_over:
        if policy.has_room:
            assert not cancelled
            begun_member, slot = policy.start()
            assert begun_member not in earlier
            assert slot in range(num_slots)
            begun_members.append(begun_member)
        assert len(set(policy.running.values())) == len(policy.running) <= num_slots
        if not policy.running:
            continue
        member = data.draw(st.sampled_from(sorted(policy.running)))
        event = data.draw(st.sampled_from(["end", "end", "again", "stop", "cancel", "nothing"]))
        if event == "end":
            state = data.draw(st.sampled_from(ENDS))
            final = policy.ended(member, state)
            asked = cancelled or member in stopped
            assert final is state or (asked and state is not RunState.SUCCEEDED)
        elif event == "again" and member not in again:
            again.append(member)
            policy.again(member)
            if not cancelled and member not in stopped:
                begun_members.remove(member)
        elif event == "stop":
            assert policy.stop(member) == (not cancelled and member not in stopped)
            stopped |= set() if cancelled else {member}
        elif event == "cancel":
            assert sorted(policy.cancel()) == sorted(policy.running)
            cancelled = True
    assert set(policy.states) == set(range(num_members))
    assert all(state.is_final for state in policy.states.values())
    assert len(begun_members) == len(set(begun_members))
    if not cancelled:
        assert set(begun_members) | set(earlier) == set(range(num_members))


def test_members_start_in_their_order_in_the_lowest_free_slot():
    policy = begun(4, 2)
    assert start_all(policy) == [(0, 0), (1, 1)]
    policy.ended(0, RunState.SUCCEEDED)
    assert start_all(policy) == [(2, 0)]


def test_a_lost_member_comes_before_those_that_wait():
    policy = begun(3, 1)
    start_all(policy)
    policy.again(0)
    assert policy.start()[0] == 0


def test_the_best_is_the_first_with_the_lowest_or_highest_number():
    values = {0: float("nan"), 1: 2.0, 2: 1.0, 3: 1.0, 4: 3.0}
    for goal, best in ((MetricGoal.MIN, 2), (MetricGoal.MAX, 4)):
        policy = begun(5, 1, metric=MetricChoice(name="loss", goal=goal))
        policy.values.update(values)
        assert policy.best == best


def test_without_a_number_there_is_no_best():
    policy = begun(1, 1, metric=MetricChoice(name="loss"))
    policy.values[0] = float("nan")
    assert policy.best is None


def test_a_sweep_has_the_state_of_its_worst_member():
    def over(*states):
        policy = begun(len(states), len(states))
        for (member, _), state in zip(start_all(policy), states, strict=True):
            policy.ended(member, state)
        return policy.state

    assert over(RunState.SUCCEEDED, RunState.STOPPED) is RunState.SUCCEEDED
    assert over(RunState.SUCCEEDED, RunState.PREEMPTED) is RunState.PREEMPTED
    assert over(RunState.PREEMPTED, RunState.LOST) is RunState.FAILED


def test_a_lost_slot_gets_no_member_and_a_sweep_without_slots_is_stuck():
    policy = begun(3, 2)
    assert [slot for _, slot in start_all(policy)] == [0, 1]
    policy.again(0, retire=True)
    assert not policy.has_room
    assert not policy.is_stuck
    policy.ended(1, RunState.SUCCEEDED)
    assert (policy.start()[1], policy.has_room) == (1, False)
    policy.again(0, retire=True)
    assert policy.is_stuck
