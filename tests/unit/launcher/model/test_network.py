"""Which network is chosen, and what is said of the others."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.launcher.model import network as networks
from torchmuster.launcher.model.network import Interface


def interface(name, address, bits=24, **more):
    return Interface(name=name, address=address, prefix_bits=bits, **more)


def node(k, *interfaces, **more):
    return networks.NetworkNode(name=f"n{k}", interfaces=interfaces, **more)


def lab(num_nodes=2):
    """Nodes with a fast, an isolated and an identical network; the head first."""
    return [
        node(
            k,
            interface("mgmt0", f"192.168.50.{k}"),
            interface("hsn0", f"10.10.0.{k}"),
            interface("docker0", "172.17.0.1", 16),
            used_address=f"10.10.0.{k}",
        )
        for k in range(1, num_nodes + 1)
    ]


def alike():
    """Return two nodes whose only network has one address."""
    return [node(k, interface("docker0", "172.17.0.1")) for k in (1, 2)]


def explored(nodes, *, cut=(), speeds=None, latencies=None):
    """Return candidates, findings and what can't be one; `cut` holds (name, source, target)."""
    candidates, unused = networks.find_candidates(nodes)
    findings = networks.NetworkFindings()
    for number, candidate in enumerate(candidates):
        name = candidate.members[0].name
        results = [
            networks.PairResult(
                candidate=number, source=source, target=target, why="no answer within 1 s"
            )
            for cut_name, source, target in cut
            if cut_name == name
        ]
        latency_s = (latencies or {}).get(name, 0.0001)
        speed = (speeds or {}).get(name, 1e9)
        measured = networks.PairResult(candidate=number, source=0, target=1)
        results.append(replace(measured, latency_s=latency_s, bytes_per_s=speed))
        findings.add(reversed(results), [(number, node) for node in range(len(nodes))])
    return candidates, findings, unused


def chosen_of(nodes, **facts):
    candidates, findings, unused = explored(nodes, **facts)
    return networks.choose(nodes, candidates, findings, unused)


def reasons(choice):
    return {unused.name: unused.why for unused in choice.unused}


def test_the_network_that_connects_all_is_chosen_and_the_others_have_their_reasons():
    choice = chosen_of(lab(), cut=[("mgmt0", 0, 1), ("mgmt0", 1, 0)])

    assert [member.address for member in choice.members] == ["10.10.0.1", "10.10.0.2"]
    assert reasons(choice) == {
        "mgmt0": "not reachable from n2",
        "docker0": "same address on 2 nodes",
    }
    assert networks.describe(choice.members) == ("hsn0", "10.10.0.0/24")


def test_one_direction_is_not_enough():
    assert "not reachable" in reasons(chosen_of(lab(), cut=[("mgmt0", 1, 0)]))["mgmt0"]


def test_a_call_that_has_not_ended_counts_as_failed():
    nodes = lab()
    candidates, findings, unused = explored(nodes)
    mgmt = next(n for n, c in enumerate(candidates) if c.members[0].name == "mgmt0")
    findings.complete.discard((mgmt, 1))

    assert (
        reasons(networks.choose(nodes, candidates, findings, unused))["mgmt0"]
        == "not reachable from n2"
    )


def test_a_clearly_faster_network_wins_over_the_one_that_the_agents_use():
    choice = chosen_of(lab(), speeds={"mgmt0": 1.6e9, "hsn0": 1e9})

    assert choice.members[0].name == "mgmt0"
    assert reasons(choice)["hsn0"] == "slower (8 Gbit/s)"


def test_a_little_faster_is_noise():
    choice = chosen_of(lab(), speeds={"mgmt0": 1.4e9, "hsn0": 1e9})

    assert choice.members[0].name == "hsn0"
    assert reasons(choice)["mgmt0"] == "no faster (11 Gbit/s)"


def test_equally_fast_networks_are_told_apart_by_latency():
    choice = chosen_of(lab(), latencies={"mgmt0": 0.0001, "hsn0": 0.001})

    assert choice.members[0].name == "mgmt0"


def test_a_name_that_one_node_lacks_is_said_of_that_node():
    nodes = lab()
    more = interface("ib0", "10.20.0.1")
    nodes[0] = node(1, *nodes[0].interfaces, more, used_address="10.10.0.1")

    assert reasons(chosen_of(nodes))["ib0"] == "no address on n2"


def test_names_may_differ_within_a_subnet():
    nodes = [node(1, interface("eth0", "10.0.0.1")), node(2, interface("ens5", "10.0.0.2"))]

    assert networks.describe(chosen_of(nodes).members) == ("eth0, ens5", "10.0.0.0/24")


def test_point_to_point_addresses_with_other_names_are_found_by_the_agents_connections():
    nodes = [
        node(k, interface(name, f"10.{k}.0.1", 32), used_address=f"10.{k}.0.1")
        for k, name in ((1, "eth0"), (2, "ens5"))
    ]

    choice = chosen_of(nodes)

    assert [member.name for member in choice.members] == ["eth0", "ens5"]
    assert networks.describe(choice.members) == ("eth0, ens5", "2 subnets")


def test_ipv6_is_taken_only_where_no_ipv4_network_connects_all():
    nodes = [
        node(k, interface("eth0", f"fd00::{k}", 64), interface("eth1", f"10.0.0.{k}"))
        for k in (1, 2)
    ]

    assert chosen_of(nodes, speeds={"eth0": 9e9}).members[0].name == "eth1"
    assert chosen_of(nodes, cut=[("eth1", 0, 1)]).members[0].address == "fd00::1"


def test_without_a_network_the_error_names_the_pair_and_what_was_tried():
    failure = chosen_of(lab(3), cut=[("hsn0", 1, 2), ("mgmt0", 0, 1)])

    assert isinstance(failure, networks.NoNetwork)
    assert failure.what == "no network connects all nodes: n2 and n3 don't reach each other"
    assert "hsn0: n2 calls n3 at 10.10.0.3: no answer within 1 s" in failure.tried
    assert "docker0: same address on 3 nodes" in failure.tried


def test_without_any_candidate_the_error_says_so():
    failure = chosen_of(alike())

    assert failure.what == "no interface has an address of its own on every node"
    assert failure.tried == ("docker0: same address on 2 nodes",)


def test_no_more_candidates_are_tried_than_the_limit_of_traffic_allows():
    nodes = [
        node(
            k,
            *(interface(f"eth{i}", f"10.{i}.0.{k}") for i in range(10)),
            used_address=f"10.9.0.{k}",
        )
        for k in (1, 2)
    ]

    candidates, unused = networks.find_candidates(nodes)

    assert len(candidates) == networks.MAX_CANDIDATES
    assert candidates[0].members[0].name == "eth9"
    assert {u.why for u in unused} == {"not tried, only 7 networks are"}


@given(st.integers(2, 80), st.integers(0, 99))
def test_whoever_is_called_calls_back(num_nodes, seed):
    peers = networks.draw_peers(num_nodes, seed)

    for node, mine in enumerate(peers):
        assert node not in mine
        assert all(node in peers[other] for other in mine)
        if num_nodes <= 32:
            assert len(mine) == num_nodes - 1
        else:
            assert node == 0 or {0, node - 1, (node + 1) % num_nodes} <= set(mine)


@given(st.integers(2, 200))
def test_a_measured_pair_is_one_that_is_called(num_nodes):
    peers = networks.draw_peers(num_nodes, 1)

    for node in range(num_nodes):
        peer = networks.measured_peer(node, num_nodes)
        assert peer is None or peer in peers[node]
    assert networks.measured_peer(0, num_nodes) == 1


SPEEDS = st.floats(1e6, 1e11)


@given(
    num_nodes=st.integers(2, 5),
    cuts=st.lists(
        st.tuples(st.sampled_from(["hsn0", "mgmt0"]), st.integers(0, 4), st.integers(0, 4))
    ),
    speeds=st.fixed_dictionaries({"hsn0": SPEEDS, "mgmt0": SPEEDS}),
)
def test_the_choice_connects_all_and_no_good_one_is_clearly_faster(num_nodes, cuts, speeds):
    nodes = lab(num_nodes)
    cuts = [c for c in cuts if c[1] != c[2] and max(c[1:]) < num_nodes]
    cuts = [c for c in cuts if (c[1], c[2]) != (0, 1)]  # that pair carries the measurement
    good = {"hsn0", "mgmt0"} - {name for name, _, _ in cuts}

    choice = chosen_of(nodes, cut=cuts, speeds=speeds)

    assert isinstance(choice, networks.Choice) == bool(good)
    if isinstance(choice, networks.Choice):
        name = choice.members[0].name
        assert name in good
        assert speeds[name] * networks.CLEARLY >= max(speeds[n] for n in good)
        assert set(reasons(choice)) == {"hsn0", "mgmt0", "docker0"} - {name}


@pytest.mark.parametrize(
    ("variable", "value", "names"),
    [
        ("NCCL", "eth", ["eth0", "eth1"]),
        ("NCCL", "=eth0", ["eth0"]),
        ("NCCL", "=eth", []),
        ("NCCL", "^lo,eth", ["ib0"]),
        ("NCCL", "^=eth0", ["eth1", "ib0", "lo"]),
        ("GLOO", "eth0,ib0", ["eth0", "ib0"]),
        ("GLOO", "eth", []),
        ("GLOO", "=eth0", []),
    ],
)
def test_each_librarys_variable_is_read_in_its_own_grammar(variable, value, names):
    assert (
        networks.matches(f"{variable}_SOCKET_IFNAME", value, ("eth0", "eth1", "ib0", "lo")) == names
    )


def test_two_agents_of_one_machine_share_its_addresses():
    shared = interface("eth0", "10.0.0.2")
    nodes = [
        node(1, interface("eth0", "10.0.0.1"), machine="a"),
        node(2, shared, used_address="10.0.0.2", machine="b"),
        node(3, shared, used_address="10.0.0.2", machine="b"),
    ]
    candidates, unused = networks.find_candidates(nodes)
    assert [m.address for m in candidates[0].members] == ["10.0.0.1", "10.0.0.2", "10.0.0.2"]
    assert not unused


def test_one_address_on_two_machines_is_still_no_network():
    candidates, unused = networks.find_candidates([replace(n, machine=n.name) for n in alike()])
    assert candidates == []
    assert unused[0].why == "same address on 2 nodes"
