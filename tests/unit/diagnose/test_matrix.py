"""The measurement of all pairs of nodes, with members that answer as a test wants."""

from types import SimpleNamespace

from torchmuster.diagnose.preflight import LIMIT_S, SURVEY, Matrix
from torchmuster.launcher.model.network import PairResult
from torchmuster.launcher.net import part_messages


class Bench:
    """A matrix of nodes on machines of their own, or all on one; the clock is the test's."""

    def __init__(self, num, *, one_machine=False):
        ids = ["m"] * num if one_machine else [f"m{node}" for node in range(num)]
        self.members = [SimpleNamespace(hello=SimpleNamespace(network_id=one)) for one in ids]
        self.sent, self.now_s = [], 0.0
        addresses = [f"10.0.0.{node}" for node in range(num)]
        send = lambda member, message: self.sent.append((self.members.index(member), message))  # noqa: E731
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
