"""When an attempt may start, and what is said of the nodes that are missing."""

from dataclasses import replace

from torchmuster.core.head.node_policy import Gathering
from torchmuster.core.model.plan import Limits
from unit.core.head.test_membership import Clock, admit, make_roll


def gathering(*, max_nodes=2, min_nodes=None, **limits):
    members = make_roll(Clock(), max_nodes=max_nodes, min_nodes=min_nodes)
    plan = replace(members.plan, limits=Limits(**limits))
    members.plan = plan
    return Gathering(plan, members, since=100.0)


def test_a_last_call_longer_than_the_time_for_joining_ends_with_it():
    """Enough nodes are here: `only 1 of 1 nodes came` can't be true."""
    wait = gathering(min_nodes=1, join_timeout_s=5.0, last_call_s=30.0)
    here = [admit(wait.members, "n1", wants_place_0=True)]

    assert not wait.is_complete(here, 104.0, shrinking=False)
    assert wait.is_complete(here, 105.0, shrinking=False)


def test_a_range_gives_the_others_a_last_call_and_none_after_a_loss():
    wait = gathering(min_nodes=1, last_call_s=2.0)
    here = [admit(wait.members, "n1", wants_place_0=True)]

    assert not wait.is_complete(here, 100.0, shrinking=False)
    assert wait.due == 102.0
    assert wait.is_complete(here, 102.0, shrinking=False)
    assert wait.is_complete(here, 100.5, shrinking=True)


def test_no_attempt_starts_without_the_head_s_own_node():
    wait = gathering(min_nodes=1, last_call_s=2.0)
    here = [admit(wait.members, "n2")]

    assert not wait.is_complete(here, 103.0, shrinking=True)


def test_a_fixed_size_asks_once_for_each_lost_place():
    wait = gathering()
    admit(wait.members, "n1", place=0)
    assert wait.lacks() == [1]
    wait.asked_for.add(1)
    assert wait.lacks() == []


def test_a_range_asks_only_below_its_least_size():
    wait = gathering(max_nodes=3, min_nodes=1)
    assert wait.lacks() == [0, 1, 2]
    admit(wait.members, "n1", place=0)
    assert wait.lacks() == []


def test_nodes_that_did_not_come_are_named_with_what_is_known_of_each():
    wait = gathering(max_nodes=3, join_timeout_s=60.0)
    admit(wait.members, "n1", place=0)
    wait.asked_for.add(1)
    wait.start_failures[2] = "mpiexec said no"

    report = wait.report(num_here=1)

    assert report.error == "only 1 of 3 nodes came within 60 s"
    assert report.because == (
        "n2: lost; a replacement has not connected",
        "n3: no agent has connected: mpiexec said no",
    )


def test_who_is_out_of_the_job_is_not_waited_for_and_its_first_reason_stays():
    wait = gathering(max_nodes=3, join_timeout_s=600.0)
    for place in (0, 1):
        admit(wait.members, f"n{place + 1}", place=place)
    began = wait.since
    wait.start_failed(2, "Zero Bytes were received", is_gone=False)
    assert wait.left_s(began) == 600.0
    for _ in range(3):
        wait.start_failed(2, "Requested node configuration", is_gone=True)
    assert wait.left_s(began) == 0.0
    report = wait.report(num_here=2)
    assert report.error == "only 2 of 3 nodes can come"
    (why,) = report.because
    assert why.endswith("Zero Bytes were received; Requested node configuration")
    admit(wait.members, "n9", place=2)  # it has come all the same
    assert wait.left_s(began) == 600.0


def test_a_node_that_is_gone_is_no_matter_while_others_may_come_in_its_place():
    wait = gathering(max_nodes=3, min_nodes=2, join_timeout_s=600.0)
    admit(wait.members, "n1", place=0)
    wait.start_failed(2, "gone", is_gone=True)
    assert wait.left_s(wait.since) == 600.0
    wait.start_failed(1, "gone", is_gone=True)
    assert wait.left_s(wait.since) == 0.0


def test_workers_that_may_still_run_are_the_reason_when_all_nodes_are_here():
    wait = gathering(join_timeout_s=60.0)
    for place in (0, 1):
        admit(wait.members, f"n{place + 1}", place=place).running_attempt = place or None

    report = wait.report(num_here=2)

    assert report.error.startswith("all nodes have joined, but the next attempt could not start")
    assert report.because == ("n2: its last workers may still run",)


def test_nodes_that_computed_wrongly_before_get_no_ranks_and_are_not_waited_for():
    wait = gathering(max_nodes=2, join_timeout_s=60.0)
    wait.members.left_out_before = frozenset({"n1", "n2"})
    head = admit(wait.members, "n1", place=0, wants_place_0=True)
    assert not head.is_left_out, "there would be no run"
    assert wait.left_s(101.0) == 59.0
    assert admit(wait.members, "n2", place=1).is_left_out
    assert wait.left_s(101.0) == 0.0

    report = wait.report(num_here=1)

    assert report.error == "only 1 of the 2 nodes that the run needs may have ranks"
    assert report.at == "n2"
