"""Who has been silent for how long: the time is an argument, pauses cost nobody his lease."""

import pytest

from kit.waiting import Clock
from torchmuster.core.model import lease as leases


@pytest.fixture
def wall():
    return Clock()


@pytest.fixture
def own(wall):
    return leases.OwnClock(wall)


def pass_time(wall, lease, seconds, turn_s=1.0):
    for _ in range(round(seconds / turn_s)):
        wall.now += turn_s
        lease.age_s()


def test_an_own_clock_counts_like_any_other_while_its_process_runs(wall, own):
    start = own()
    for _ in range(40):
        wall.now += 0.5
        own()
    assert own() - start == 20.0


def test_an_own_clock_takes_a_pause_for_one_turn(wall, own):
    start = own()
    wall.now += 3600.0
    assert own() - start == leases.MAX_TURN_S
    assert own.paused_s == 3600.0 - leases.MAX_TURN_S


def test_the_slow_turns_of_an_overloaded_machine_are_counted_out(wall, own):
    start = own()
    for _ in range(5):
        wall.now += 8.0
        own()
    assert own() - start == 5 * leases.MAX_TURN_S


def test_a_lease_counts_from_the_moment_that_the_echoed_ping_was_sent(wall, own):
    lease = leases.Lease(own)
    wall.now += 1.0
    number = lease.ping()
    pass_time(wall, lease, 4.0)
    lease.renew(number)
    assert lease.age_s() == 4.0


def test_a_lease_without_echo_grows_old(wall, own):
    lease = leases.Lease(own)
    for _ in range(11):
        lease.ping()
        wall.now += 1.0
        lease.age_s()
    assert lease.age_s() > leases.LEASE_S


def test_an_old_echo_does_not_make_a_lease_older(wall, own):
    lease = leases.Lease(own)
    first = lease.ping()
    pass_time(wall, lease, 1.0)
    lease.renew(lease.ping())
    lease.renew(first)
    lease.renew(999)
    assert lease.age_s() == 0.0


def test_a_pause_that_everybody_shares_ends_no_lease(wall, own):
    lease = leases.Lease(own)
    lease.renew(lease.ping())
    wall.now += 3600.0
    assert lease.age_s() <= leases.LEASE_S
    number = lease.ping()
    wall.now += 1.0
    lease.renew(number)
    assert lease.age_s() == 1.0


def test_behind_a_long_pause_an_echo_has_to_come_soon(wall, own):
    lease = leases.Lease(own)
    lease.renew(lease.ping())
    wall.now += 3600.0
    lease.age_s()
    pass_time(wall, lease, leases.PROBATION_S + 1.0)
    assert lease.age_s() > leases.LEASE_S


def test_behind_a_long_pause_the_echo_of_an_earlier_ping_proves_nothing(wall, own):
    lease = leases.Lease(own)
    number = lease.ping()
    wall.now += 3600.0
    lease.renew(number)
    pass_time(wall, lease, leases.PROBATION_S + 1.0)
    assert lease.age_s() > leases.LEASE_S


@pytest.mark.parametrize("state", [None, "T", "t", "D", "Z", "X"])
def test_who_stands_still_or_can_not_be_seen_is_given_up_after_the_lease(state):
    assert not leases.is_given_up(leases.SILENT_S, leases.SILENT_S, state)
    assert leases.is_given_up(leases.SILENT_S + 0.1, leases.SILENT_S, state)


@pytest.mark.parametrize("state", ["R", "S"])
def test_who_is_seen_to_run_is_only_slow_but_not_for_ever(state):
    assert not leases.is_given_up(leases.SILENT_S + 0.1, leases.SILENT_S, state)
    assert leases.is_given_up(leases.SLOW_S + 0.1, leases.SILENT_S, state)


def lost_after(watched, wall, state, *, answers):
    """Return after how many seconds who is in this state is lost; None if not within five minutes."""
    for second in range(300):
        wall.now += 1.0
        if watched.is_lost(state, answers=answers):
            return second
    return None


@pytest.mark.parametrize(
    ("state", "answers", "seconds"),
    [
        pytest.param("T", True, leases.LEASE_S, id="stands still"),
        pytest.param("S", True, leases.SLOW_S, id="is asked and sleeps"),
        *(pytest.param(state, False, None, id=f"imports for long: {state}") for state in "RSD"),
    ],
)
def test_who_stands_still_is_given_up_after_the_lease_and_who_sleeps_after_a_minute(
    wall, own, state, answers, seconds
):
    assert lost_after(leases.Stillness(own), wall, state, answers=answers) == seconds


def test_who_answers_does_not_stand_still(wall, own):
    watched = leases.Stillness(own)
    for _ in range(100):
        wall.now += 1.0
        watched.begin()
        assert not watched.is_lost("S", answers=True)


def test_who_is_stopped_while_it_imports_stands_still(wall, own):
    watched = leases.Stillness(own)
    wall.now += 1.0
    assert not watched.is_lost("R", answers=False)
    assert lost_after(watched, wall, "T", answers=False) == leases.LEASE_S


def test_a_path_that_swallows_large_packets_is_named():
    found = leases.large_packets_lost(4000, 0.2)
    assert "large packets seem not to pass: 4000 bytes did not arrive in 10 s" in found
    assert "MTU" in found


@pytest.mark.parametrize(("stuck_bytes", "since_s"), [(300, 0.2), (4000, 20.0)])
def test_pings_that_wait_or_a_link_that_comes_back_late_accuse_no_mtu(stuck_bytes, since_s):
    assert leases.large_packets_lost(stuck_bytes, since_s) is None
