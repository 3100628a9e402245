"""The head's side of the preflight, with agents that are only messages."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

from kit.values import READY, run_plan
from kit.values import member_of as make_member
from torchmuster.core.model import codec
from torchmuster.core.model.events import fields_of
from torchmuster.core.model.verdict import Report
from torchmuster.diagnose.preflight import HOLD_S, LIMIT_S, LONG_HOLD_S, SURVEY, Matrix, Preflight
from torchmuster.launcher.model.network import PairResult
from torchmuster.launcher.net import part_messages
from unit.diagnose.doctor.made_up import facts


class House:
    """A preflight with clocks, and agents that answer as the test says."""

    def __init__(self, form="short", num_nodes=2, one_machine=False):
        numbers = range(1, num_nodes + 1)
        names = tuple(f"n{k}" for k in numbers)
        plan = run_plan(
            num_nodes, target="train.py", cwd="/home/u", node_names=names, preflight=form
        )
        self.now = 100.0
        self.sent, self.told = [], []
        self.preflight = Preflight(
            plan,
            lambda member, message: self.sent.append((member.hello.host, message)),
            lambda member: member.hello.host,
            lambda event: self.told.append((event.name, fields_of(event))),
            clock=lambda: self.now,
            wall=lambda: 1000.0 + self.now,
            own_network_id="net1",
        )
        self.members = [make_member(k, "net1" if one_machine else None) for k in numbers]
        for member in self.members:
            self.preflight.greet(member)

    def settle(self):
        return self.preflight.settle(self.members, "10.0.0.1", None)

    def asked(self, kind=part_messages.AskFacts):
        return [host for host, message in self.sent if isinstance(message, kind)]

    def answer_all(self):
        for number in range(len(self.members)):
            self.answer(number)

    def answer(self, number, *, clock_s=0.0, plain=None, **parts):
        found = facts(number + 1)
        for name, change in parts.items():
            found = replace(found, **{name: replace(getattr(found, name), **change)})
        plain, at = codec.to_plain(found) if plain is None else plain, 1000.0 + self.now + clock_s
        said = part_messages.NodeFacts(facts=plain, asked_at=at, sent_at=at)
        self.preflight.take(self.members[number], said)

    def make_ready(self):
        for member in self.members:
            member.ready = READY

    def open_ports(self):
        """Let the nodes say which ports they have opened, and let the head go on."""
        said = part_messages.NetworkFacts(survey=SURVEY, ports=(5000,), interfaces=())
        for member in self.members:
            self.preflight.take(member, said)
        self.settle()

    def call_each_other(self, **special):
        self.open_ports()
        for source, target in itertools.permutations(range(len(self.members)), 2):
            found = {
                "latency_s": 1e-4,
                "bytes_per_s": 1e9,
                **special.get(f"p{source}_{target}", {}),
            }
            result = PairResult(candidate=target, source=source, target=target, **found)
            said = part_messages.ProbeResults(
                survey=SURVEY, candidates=(target,), results=(result,)
            )
            self.preflight.take(self.members[source], said)

    def fields(self):
        ((_, fields),) = [told for told in self.told if told[0] == "preflight"]
        return fields

    def causes(self):
        return [finding["cause"] for finding in self.fields().get("findings", [])]


def test_a_healthy_pair_may_begin_when_both_have_spoken():
    house = House()
    assert house.asked() == ["n1", "n2"]
    assert not house.settle()
    house.answer(0)
    assert not house.settle()
    house.answer(1)
    assert house.settle()
    assert house.causes() == []


def test_on_one_machine_only_the_head_is_asked():
    house = House(one_machine=True, num_nodes=4)
    assert house.asked() == ["n1"]
    house.answer(0)
    assert house.settle()


def test_a_silent_node_holds_workers_up_for_a_fifth_of_a_second_at_most():
    house = House()
    house.answer(0)
    house.make_ready()
    assert not house.settle()
    assert house.preflight.due == house.now + HOLD_S
    house.now += HOLD_S
    assert house.settle()
    assert house.causes() == ["unknown"]
    assert house.told[0][1]["held_s"] == HOLD_S


def test_facts_that_come_while_torch_is_imported_hold_nothing_up():
    house = House()
    house.answer(0)
    house.settle()
    house.now += 1.0
    house.answer(1)
    assert house.settle()
    assert house.told[0][1]["held_s"] == 0


def test_another_torch_ends_the_run_with_a_report():
    house = House()
    house.answer(0)
    house.answer(1, torch={"torch": "2.6.0"})
    assert not house.settle()
    assert house.preflight.has_failed
    assert "torch 2.6.0" in house.preflight.error.error
    assert "--no-preflight" in house.preflight.error.hint


def test_a_failure_that_is_not_certain_lets_the_run_begin():
    house = House()
    house.answer(0)
    house.answer(1, clock_s=-30.0)
    assert house.settle()
    assert house.causes() == ["clocks-differ"]


def test_an_answer_that_makes_no_sense_is_no_answer():
    house = House()
    house.answer(0)
    house.answer(1, plain={"nonsense": 1})
    assert house.settle()
    assert house.causes() == ["unknown"]


def test_a_newcomer_is_looked_at_and_the_others_are_not_asked_again():
    house = House()
    house.answer_all()
    assert house.settle()
    house.members[1] = make_member(3, "net3")
    house.preflight.greet(house.members[1])
    assert house.asked() == ["n1", "n2", "n3"]
    assert not house.settle()
    house.answer(1)
    assert house.settle()


def test_the_long_form_lets_the_nodes_call_each_other_before_it_asks():
    house = House("long")
    assert not house.settle()
    assert house.asked() == []
    assert house.asked(part_messages.AskNetwork) == ["n1", "n2"]
    house.call_each_other()
    assert not house.settle()
    assert house.asked() == ["n1", "n2"]
    house.answer_all()
    assert house.settle()
    fields = house.fields()
    assert fields["pairs"] == [[0, 1, None, 100, 1000.0], [1, 0, None, 100, 1000.0]]
    assert [row["node"] for row in fields["nodes"]] == ["n1", "n2"]


def test_a_node_behind_a_black_hole_is_not_asked_for_more_than_it_can_send():
    house = House("long")
    house.settle()
    stalled = {"why": "64 KiB did not arrive", "stalled": True, "bytes_per_s": None}
    house.call_each_other(p1_0=stalled)
    house.settle()
    assert house.asked() == ["n1"]
    house.make_ready()
    house.answer(0)
    assert not house.settle()
    assert house.preflight.has_failed
    assert house.causes()[0] == "mtu-black-hole"
    assert house.preflight.error is None  # who asked reads the findings


def test_nodes_that_never_open_a_port_end_the_matrix_in_time():
    house = House("long")
    house.settle()
    assert house.preflight.due == house.now + LIMIT_S
    house.now += LIMIT_S
    house.settle()
    assert house.asked() == ["n1", "n2"]
    house.make_ready()
    house.settle()
    house.now += LONG_HOLD_S
    assert not house.settle()
    assert house.preflight.has_failed


def test_the_long_form_takes_over_when_no_network_connects_the_nodes():
    report = Report(error="n1 can't reach n2", because=("hsn0: refused",))
    assert not House().preflight.handle_network_failure(report)
    house = House("long")
    assert house.preflight.handle_network_failure(report)
    house.settle()
    house.call_each_other()
    house.settle()
    house.answer_all()
    assert not house.settle()
    assert house.causes() == ["network-unreachable"]


def test_64_simulated_nodes_do_not_all_call_all():
    house = House("long", num_nodes=64, one_machine=True)
    house.settle()
    house.open_ports()
    orders = [m for _, m in house.sent if isinstance(m, part_messages.ProbeNetwork)]
    assert 64 * 8 <= sum(len(order.targets) for order in orders) <= 64 * 20
    assert {order.bulk_bytes for order in orders} == {64 << 10}  # enough for a black hole


def test_64_machines_call_each_other_all_and_move_less_than_2_gb():
    house = House("long", num_nodes=64)
    house.settle()
    house.open_ports()
    orders = [m for _, m in house.sent if isinstance(m, part_messages.ProbeNetwork)]
    assert sum(len(order.targets) for order in orders) == 64 * 63
    assert sum(len(o.targets) * o.bulk_bytes for o in orders) <= 2_000_000_000


# The measurement of all pairs of nodes, with members that answer as a test wants.


class Bench:
    """A matrix of nodes on machines of their own, or all on one; the clock is the test's."""

    def __init__(self, num, *, one_machine=False):
        ids = ["m"] * num if one_machine else [f"m{node}" for node in range(num)]
        self.members = [SimpleNamespace(hello=SimpleNamespace(network_id=one)) for one in ids]
        self.sent, self.now_s = [], 0.0
        addresses = [f"10.0.0.{node}" for node in range(num)]

        def send(member, message):
            return self.sent.append((self.members.index(member), message))

        self.matrix = Matrix(self.members, addresses, send, lambda: self.now_s)

    def sent_of(self, kind):
        return {node: message for node, message in self.sent if isinstance(message, kind)}

    def open_ports(self):
        for member in self.members:
            facts = part_messages.NetworkFacts(survey=SURVEY, ports=(1000, 1001), interfaces=())
            self.matrix.take(member, facts)

    def tell(self, source, target, **found):
        result = PairResult(candidate=target, source=source, target=target, **found)
        said = part_messages.ProbeResults(survey=SURVEY, results=(result,), candidates=(target,))
        self.matrix.take(self.members[source], said)


def test_every_node_is_asked_for_ports_and_calls_every_other():
    bench = Bench(3)
    assert bench.sent_of(part_messages.AskNetwork).keys() == {0, 1, 2}

    bench.open_ports()
    assert not bench.matrix.advance()

    orders = bench.sent_of(part_messages.ProbeNetwork)
    assert [target.node for target in orders[1].targets] == [0, 2]
    assert orders[1].targets[0].address == "10.0.0.0"


def test_the_matrix_is_over_when_every_pair_has_a_result():
    bench = Bench(2)
    bench.open_ports()
    bench.matrix.advance()
    bench.tell(0, 1, latency_s=2e-6, bytes_per_s=3e9)
    assert not bench.matrix.advance()
    bench.tell(1, 0, why="refused")

    assert bench.matrix.advance()
    assert bench.sent_of(part_messages.EndProbe).keys() == {0, 1}
    assert bench.matrix.rows() == ((0, 1, None, 2, 3000.0), (1, 0, "refused", None, None))


def test_pairs_without_a_result_say_why_when_the_time_is_up():
    bench = Bench(2)
    bench.now_s = LIMIT_S
    assert bench.matrix.advance()
    assert {pair.why for pair in bench.matrix.pairs()} == {"the nodes did not open ports"}

    bench = Bench(2)
    bench.open_ports()
    bench.matrix.advance()
    bench.now_s = LIMIT_S
    assert bench.matrix.advance()
    assert {pair.why for pair in bench.matrix.pairs()} == {f"no result within {LIMIT_S:g} s"}


def test_one_node_has_no_pairs():
    bench = Bench(1)
    assert bench.matrix.advance()
    assert bench.sent == []


def test_a_path_on_which_bytes_stall_is_told_of_the_node_behind_the_head():
    bench = Bench(3)
    bench.tell(2, 0, stalled=True, why="64 KiB did not arrive")
    bench.tell(1, 2, stalled=True, why="64 KiB did not arrive")

    assert bench.matrix.stalled_with_head() == {2}


def test_many_simulated_nodes_move_little():
    assert Bench(40, one_machine=True).matrix.bulk_bytes == 64 << 10
    assert Bench(4).matrix.bulk_bytes == 4 << 20
