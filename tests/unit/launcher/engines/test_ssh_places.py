"""Which host is which place of a run."""

import pytest

from kit.values import run_plan
from torchmuster.launcher.engines.ssh import HostPlaces, bad_hosts, place_to_free, workers_of
from torchmuster.launcher.engines.ssh_command import HostProblem, SshHost

A, B, C = (SshHost(name=name) for name in "abc")


def test_hosts_beyond_the_nodes_are_spare():
    places = HostPlaces([A, B, C], 2)
    assert places.names == ("a", "b")
    assert places.candidates(1) == [B, C]


def test_hosts_that_answer_come_first():
    places = HostPlaces([A, B, C], 3)
    places.settle([C, B])
    assert places.names == ("c", "b", "a")


def test_spare_host_that_takes_a_place_is_spare_no_more():
    places = HostPlaces([A, B, C], 2)
    assert places.take(1, C)
    assert not places.take(1, C)
    assert places.names == ("a", "c")
    assert places.candidates(0) == [A, B]


@pytest.mark.parametrize(
    ("nodes", "living", "trained", "want"),
    [
        ((2, 2), {1, 2}, {0, 1}, 2),  # the spare one's
        ((2, 2), {1, 2}, {0, 2}, 1),  # which has taken another's place before
        ((2, 2), {1}, {0, 1}, None),  # nobody to spare
        ((1, 3), {1, 2}, {0, 1, 2}, 2),  # the world may shrink
        ((1, 3), set(), {0}, None),
    ],
)
def test_the_head_gets_the_host_that_an_attempt_can_do_without(nodes, living, trained, want):
    low, high = nodes
    plan = run_plan(min_nodes=low, max_nodes=high)
    assert place_to_free(living, trained, plan) == want


def test_places_that_exchange_their_hosts_keep_them_apart():
    places = HostPlaces([A, B, C], 3)
    places.exchange(0, 2)
    assert places.names == ("c", "b", "a")
    assert places.candidates(0) == [C]


def test_slots_win_over_gpus_and_gpus_over_the_plan():
    plan = run_plan(max_nodes=3, workers_per_node=(5,))
    hosts = [SshHost(name="a", slots=2), B, C]
    assert workers_of(hosts, {"a": 8, "b": 4}, plan) == (2, 4, 5)


def test_all_bad_hosts_are_in_one_error_with_each_fix_once():
    problems = [HostProblem(host=name, words="no", fix=f"fix {name != 'c'}") for name in "abc"]
    error = bad_hosts(problems, 3, "--on ssh")
    assert error.what == "3 hosts can't be used: a, b, c; the run needs 3"
    assert error.why == "a: no\nb: no\nc: no"
    assert error.fix == "fix True; fix False"
    assert error.exit_code == 5
