"""Which node may leave an elastic run, and when its attempt ends."""

import signal

import pytest

from kit.values import hello, run_plan, worker_end
from torchmuster.core.head.membership import Leavers, Member
from torchmuster.core.model.failure import EndKind
from torchmuster.core.model.plan import Limits

GRACE_S = 30.0


def leavers(min_nodes=1, max_nodes=3):
    plan = run_plan(min_nodes=min_nodes, max_nodes=max_nodes, limits=Limits(grace_s=GRACE_S))
    return Leavers(plan)


def member(host, *, is_head=False):
    return Member(hello=hello(host, wants_place_0=is_head), channel=None, heard_at=0.0)


HEAD, N2, N3 = member("n1", is_head=True), member("n2"), member("n3")
ALL = [HEAD, N2, N3]


def end(node, kind=EndKind.SIGNAL):
    return worker_end(kind, rank=1, node=node, asked=True)


def test_a_node_may_leave_while_enough_others_stay():
    assert leavers().may_leave(N2, signal.SIGTERM, ALL)


def test_those_that_leave_already_are_counted_out():
    found = leavers(min_nodes=2)
    assert found.may_leave(N2, signal.SIGTERM, ALL)
    found.add(N2, 0.0)
    assert not found.may_leave(N3, signal.SIGTERM, ALL)


@pytest.mark.parametrize(
    ("who", "signum", "nodes"),
    [
        (HEAD, signal.SIGTERM, (1, 3)),
        (N2, signal.SIGINT, (1, 3)),
        (N2, signal.SIGTERM, (3, 3)),
    ],
)
def test_the_head_a_ctrl_c_and_a_run_of_fixed_size_stop_it_all(who, signum, nodes):
    assert not leavers(*nodes).may_leave(who, signum, ALL)


def test_the_attempt_ends_with_a_worker_of_the_node_or_with_its_grace():
    found = leavers()
    assert not found.is_time(1000.0, [end("n2")], ["n2"])
    found.add(N2, 100.0)
    assert not found.is_time(101.0, [end("n3")], ["n2"])
    assert found.is_time(101.0, [end("n2")], ["n2"])
    assert found.is_time(100.0 + GRACE_S, [], ["n2"])


def test_a_worker_that_leaves_with_75_takes_the_others_with_it():
    found = leavers()
    found.add(N2, 100.0)
    assert not found.is_time(101.0, [end("n2", EndKind.PREEMPTED)], ["n2"])


def test_who_has_been_taken_leaves_once():
    found = leavers()
    found.add(N2, 0.0)
    assert found.take_all() == [N2]
    assert found.take_all() == []
    assert not found.is_time(1e9, [end("n2")], ["n2"])
