from ipaddress import IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.errors import MusterError, UsageError
from torchmuster.workflow.plan import NetworkShare
from torchmuster.workflow.sandbox import network as network_stack
from torchmuster.workflow.sandbox.network import PrivateNetwork, choose_network, host_networks

networks = st.builds(
    lambda address, bits: IPv4Network((address, bits), strict=False),
    st.integers(10 << 24, (11 << 24) - 1),
    st.integers(9, 32),
)


@given(taken=st.lists(networks, max_size=8), start=st.integers(0, 255))
def test_a_network_overlaps_no_route_of_the_machine(taken, start):
    try:
        chosen = choose_network(taken, draw=lambda count: start % count)
    except MusterError:
        pytest.fail("others are free")

    assert chosen.prefixlen == 24
    assert chosen.is_private
    assert not any(chosen.overlaps(other) for other in taken)


def test_a_machine_that_routes_all_of_10_gets_a_network_elsewhere():
    chosen = choose_network([IPv4Network("10.0.0.0/8")], draw=lambda count: 5)

    assert chosen == IPv4Network("172.16.5.0/24")


def test_a_machine_that_routes_every_private_network_is_refused_in_words():
    taken = [IPv4Network("0.0.0.0/0")]

    with pytest.raises(MusterError, match="no private network can be made"):
        choose_network(taken)


def test_routes_are_read_as_the_kernel_prints_them(tmp_path):
    table = tmp_path / "route"
    table.write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\n"
        "eth0\t00000000\t0102000A\t0003\t0\t0\t0\t00000000\t0\n"
        "eth0\t0002000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\n"
    )

    assert host_networks(str(table)) == [IPv4Network("10.0.2.0/24")]
    assert host_networks(str(tmp_path / "none")) == []


class Ended:
    """A holder that is not there."""

    pid = 1


def network(*names, hostname="machine"):
    tasks = {
        name: NetworkShare(name=name, address=f"10.1.2.{number}", join={}, environment={})
        for number, name in enumerate(names, 2)
    }
    return PrivateNetwork(Ended(), -1, tasks, hostname)


def test_a_hosts_file_names_the_tasks_and_leads_the_machines_name_to_the_task(tmp_path):
    machine = tmp_path / "hosts"
    machine.write_text("127.0.0.1 localhost\n127.0.1.1 machine\n10.9.9.9 nas b # old\n")

    text = network("a", "b").hosts_file("b", machine=str(machine)).decode()

    of_machine = ["127.0.0.1 localhost", "10.9.9.9 nas"]
    assert text.splitlines() == [*of_machine, "10.1.2.2 a", "10.1.2.3 b machine"]


def test_a_task_with_the_machines_name_keeps_it_for_itself(tmp_path):
    text = network("machine", "b").hosts_file("b", machine=str(tmp_path / "none")).decode()

    assert text.splitlines()[2:] == ["10.1.2.2 machine", "10.1.2.3 b"]


def test_too_many_tasks_for_one_network_are_refused():
    with pytest.raises(UsageError, match="up to 251 tasks"):
        PrivateNetwork.open([f"t{number}" for number in range(254)])


def stack(kind, **changes):
    given = {
        "program": f"/usr/bin/{kind}",
        "subnet": "10.1.2.0/24",
        "outside": "10.9.9.0/24",
        "hub": "/proc/7/fd/3",
        "user": "/proc/7/fd/6",
        "tasks": ("/proc/7/fd/4",),
        "passes_names": False,
    }
    return network_stack.NetworkStack(**{**given, **changes})


def with_stack(**answer):
    return PrivateNetwork(Ended(), -1, {}, "m", answer=answer, program="/usr/bin/pasta")


def test_a_network_with_a_network_stack_names_its_program():
    assert "through pasta" in with_stack(gateway="10.1.2.2", resolver="10.1.2.3").note


def test_a_program_that_fails_is_quoted_in_the_line_for_the_user():
    made = with_stack(stack_error="pasta: Failed to open tun socket")

    assert made.note.endswith("license server: pasta: Failed to open tun socket")


def test_a_machine_without_a_program_says_which_would_do():
    note = network("a").note
    assert "nothing else" in note
    assert "neither slirp4netns nor pasta is installed" in note
    assert network_stack.find_program(lambda name: None) is None
    assert network_stack.find_program(lambda name: name if name == "pasta" else None) == "pasta"


OURS = b"nameserver 10.1.2.3\n"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("nameserver 10.0.0.53\n", None),
        ("search x.org\nnameserver 127.0.0.53\noptions o\n", OURS + b"search x.org\noptions o\n"),
        ("nameserver ::1\n", OURS),
        ("", OURS),
    ],
)
def test_a_resolver_on_the_machines_loopback_is_replaced(tmp_path, text, written):
    machine = tmp_path / "resolv.conf"
    machine.write_text(text)
    made = with_stack(gateway="10.1.2.2", resolver="10.1.2.3")

    assert made.resolver_file(machine=str(machine)) == written
    assert network("a").resolver_file(machine=str(machine)) is None


def test_the_machines_loopback_stays_out_of_the_network():
    assert "--disable-host-loopback" in network_stack.slirp_argv(stack("slirp4netns"), 5, 6)
    pasta = network_stack.pasta_argv(stack("pasta"), "/proc/self/fd/4")
    assert "--no-map-gw" in pasta
    assert pasta.count("none") == 4


@pytest.mark.parametrize("passes", [True, False])
def test_pasta_answers_for_names_only_where_the_machines_resolver_can_not(passes):
    argv = network_stack.pasta_argv(stack("pasta", passes_names=passes), "/proc/self/fd/4")

    assert ("--dns-forward=10.9.9.3" in argv) is passes


@pytest.mark.parametrize(("user", "word"), [("/proc/7/fd/6", True), (None, False)])
def test_a_user_namespace_is_entered_where_there_is_one(user, word):
    slirp = network_stack.slirp_argv(stack("slirp4netns", user=user), 5, 6)
    pasta = network_stack.pasta_argv(stack("pasta", user=user), "x")

    assert ("--userns-path=/proc/7/fd/6" in slirp) is word
    assert ("--userns=/proc/7/fd/6" in pasta) is word
    assert ("--netns-only" in pasta) is not word
    assert slirp[-2:] == ["/proc/7/fd/3", "tap0"]
