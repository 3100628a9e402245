"""The head's side of the survey, with agents that are only messages."""

import pytest

from kit.values import READY, member_of
from torchmuster.core.model.events import fields_of
from torchmuster.launcher.head.start_checks import (
    CONNECT_S,
    LIMIT_S,
    PATIENT_CONNECT_S,
    NetworkSurvey,
)
from torchmuster.launcher.model.network import Interface, PairResult
from torchmuster.launcher.net import part_messages


def make_member(k, network_id=None, *, ready=False):
    made = member_of(k, network_id, net="10.10.0")
    made.ready = READY if ready else None
    return made


class House:
    """A survey with a clock, and agents that answer as the test says."""

    def __init__(self, num_nodes=2, **more):
        self.now = 100.0
        self.sent = []
        self.told = []
        self.members = [make_member(k, **more) for k in range(1, num_nodes + 1)]
        self.survey = NetworkSurvey(
            lambda member, message: self.sent.append((member, message)),
            lambda member: member.hello.host,
            lambda event: self.told.append((event.name, fields_of(event))),
            clock=lambda: self.now,
            own_network_id="net1",
        )

    def settle(self):
        return self.survey.settle(self.members, "10.10.0.1")

    def last(self, kind):
        """Return what was sent of a kind in the latest survey, by member."""
        return {m.hello.host: message for m, message in self.sent if isinstance(message, kind)}

    def say_facts(self, **variables):
        for number, member in enumerate(self.members, 1):
            asked = self.last(part_messages.AskNetwork)[member.hello.host]
            interfaces = (
                Interface(name="hsn0", address=f"10.10.0.{number}", prefix_bits=24),
                Interface(name="mgmt0", address=f"192.168.50.{number}", prefix_bits=24),
                Interface(name="docker0", address="172.17.0.1", prefix_bits=16),
            )
            facts = part_messages.NetworkFacts(
                survey=asked.survey,
                ports=(5000 + number,),
                interfaces=interfaces,
                names=("lo", "hsn0", "mgmt0", "docker0"),
                variables=variables if number == 2 else {},
            )
            self.survey.take(member, facts)

    def say_results(self, good=("hsn0",), bad=("mgmt0",)):
        for node, member in enumerate(self.members):
            order = self.last(part_messages.ProbeNetwork)[member.hello.host]
            for candidate in sorted({target.candidate for target in order.targets}):
                mine = [t for t in order.targets if t.candidate == candidate]
                name = "hsn0" if mine[0].address.startswith("10.10.") else "mgmt0"
                results = [self._result(node, t, name in good) for t in mine]
                if name in good or name in bad:
                    said = part_messages.ProbeResults(
                        survey=order.survey, candidates=(candidate,), results=tuple(results)
                    )
                    self.survey.take(member, said)

    def _result(self, node, target, is_good):
        return PairResult(
            candidate=target.candidate,
            source=node,
            target=target.node,
            why=None if is_good else "no answer within 1 s",
            latency_s=0.00005 if is_good and target.measure else None,
            bytes_per_s=2.9e9 if is_good and target.measure else None,
        )

    def event(self, name):
        return next(fields for told, fields in self.told if told == name)

    def notices(self):
        return [fields["text"] for name, fields in self.told if name == "notice"]


def calling(variables=None, **more):
    """Return a house whose nodes have said their facts and call each other; the second one has these variables."""
    house = House(**more)
    house.settle()
    house.say_facts(**(variables or {}))
    house.settle()
    return house


def surveyed(**more):
    """Return a house whose network has been chosen."""
    house = calling(**more)
    house.say_results()
    house.settle()
    return house


@pytest.mark.parametrize(
    ("num_nodes", "network_id"),
    [
        pytest.param(2, "net1", id="agents of one machine"),
        pytest.param(1, "elsewhere", id="one node"),
    ],
)
def test_who_has_no_network_between_them_is_not_surveyed(num_nodes, network_id):
    house = House(num_nodes, network_id=network_id)

    assert house.settle()
    assert house.sent == []


def test_the_network_that_connects_all_is_chosen_and_told():
    house = House()
    assert not house.settle()
    house.say_facts()
    assert not house.settle()
    house.say_results()

    assert house.settle()
    assert house.survey.master_address == "10.10.0.1"
    assert [house.survey.interface_of(member) for member in house.members] == ["hsn0", "hsn0"]
    told = house.event("network")
    assert told["interface"] == "hsn0"
    assert told["gbit_per_s"] == "23"
    assert told["unused"] == [
        {"name": "docker0", "why": "same address on 2 nodes"},
        {"name": "mgmt0", "why": "not reachable from n2"},
    ]
    assert len(house.last(part_messages.EndProbe)) == 2


def test_all_pairs_call_each_other_and_a_repeated_address_is_not_called():
    house = calling(num_nodes=3)

    for number, member in enumerate(house.members):
        order = house.last(part_messages.ProbeNetwork)[member.hello.host]
        assert order.connect_s == CONNECT_S
        called = {(target.candidate, target.node) for target in order.targets}
        assert called == {(c, n) for c in (0, 1) for n in range(3) if n != number}
        assert "172.17.0.1" not in {target.address for target in order.targets}


def test_a_known_network_is_not_surveyed_again_for_a_restart_nor_for_fewer_nodes():
    house = surveyed(num_nodes=3)
    house.sent.clear()
    house.members.pop()

    assert house.settle()
    assert house.sent == []


def test_a_new_node_is_a_new_survey():
    house = surveyed()
    house.members[1] = make_member(9)

    assert not house.settle()
    assert house.last(part_messages.AskNetwork)["n9"].survey == 2


def test_workers_that_could_start_do_not_wait_for_black_holes():
    house = calling(ready=True)
    house.say_results(bad=())  # the calls on mgmt0 have not ended

    assert house.settle()
    assert house.survey.master_address == "10.10.0.1"


def test_calls_that_have_not_ended_are_waited_for_while_spawners_import():
    house = calling()
    house.say_results(bad=())

    assert not house.settle()
    house.now = house.survey.due
    assert house.settle()


def test_an_agent_that_says_nothing_costs_the_limit_and_the_run_goes_on():
    house = House()
    house.settle()
    assert house.survey.due == 100.0 + LIMIT_S
    house.now = house.survey.due

    assert house.settle()
    assert house.survey.master_address is None
    assert house.survey.interface_of(house.members[0]) is None
    assert "the network was not measured: n1 has not reported" in house.notices()[0]


def test_before_a_run_is_ended_everything_is_tried_once_more_with_patience():
    house = calling()
    house.say_results(good=(), bad=("hsn0", "mgmt0"))

    assert not house.settle()
    assert house.survey.error is None
    house.say_facts()
    house.settle()
    assert house.last(part_messages.ProbeNetwork)["n1"].connect_s == PATIENT_CONNECT_S
    house.say_results(good=(), bad=("hsn0", "mgmt0"))

    assert not house.settle()
    assert "n1 and n2 don't reach each other" in house.survey.error.error
    assert "docker0: same address on 2 nodes" in house.survey.error.because


def test_what_the_user_has_set_is_checked_against_the_interfaces_of_his_node():
    chosen = {"GLOO_SOCKET_IFNAME": "=hsn0", "NCCL_SOCKET_IFNAME": "mgmt"}
    gloo, nccl = surveyed(variables={**chosen, "TP_SOCKET_IFNAME": "hsn0"}).notices()

    assert gloo.startswith("GLOO_SOCKET_IFNAME==hsn0 on n2 names no interface of this node")
    assert "NCCL's grammar" in gloo
    assert "NCCL_SOCKET_IFNAME=mgmt on n2 names mgmt0, which can't connect" in nccl


def test_loopback_is_said_to_lead_to_the_node_itself():
    assert surveyed(variables={"GLOO_SOCKET_IFNAME": "lo"}).notices() == [
        "GLOO_SOCKET_IFNAME=lo on n2 names lo, which can't connect the nodes: it leads to the node itself"
    ]


def test_words_of_an_earlier_survey_and_results_for_others_are_dropped():
    house = calling()
    forged = PairResult(candidate=0, source=0, target=1, why="a lie about n1")
    lie = part_messages.ProbeResults(survey=1, candidates=(), results=(forged,))
    house.survey.take(house.members[1], lie)
    early = part_messages.ProbeResults(survey=0, candidates=(0, 1), results=())
    house.survey.take(house.members[0], early)
    house.say_results()

    assert house.settle()
    assert house.event("network")["interface"] == "hsn0"
