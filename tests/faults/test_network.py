"""Two hosts, each a network namespace, and a link between them that drops."""

import time

import pytest
from harness import start_pair as pair_of

from kit.namespaces import HeldNetworks, why_no_networks
from kit.waiting import wait_until
from torchmuster.core import proc

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")
pytestmark = pytest.mark.netns


ADDRESSES = ("10.231.77.1", "10.231.77.2")


@pytest.fixture
def hosts():
    """Yield two networks that see only each other."""
    if (reason := why_no_networks()) is not None:
        pytest.skip(reason)
    with HeldNetworks(2) as networks:
        networks.ip(0, f"link add eth0 type veth peer name eth0 netns {networks.pids[1]}")
        for number, address in enumerate(ADDRESSES):
            up = ("link set eth0 up", "link set lo up")
            networks.ip(number, f"addr add {address}/24 dev eth0", *up)
        yield networks


def start_pair(job, hosts, *options):
    """Start one `muster torchrun` on each host."""
    prefixes = tuple(tuple(hosts.argv(number, [])) for number in range(2))
    endpoint = ("--rdzv-endpoint", f"{ADDRESSES[0]}:29501")
    return pair_of(job, *endpoint, *options, prefixes=prefixes)


def test_two_hosts_train_over_their_link(job, hosts):
    head, other = start_pair(job, hosts, "--nnodes", "2")
    ranks = head.wait_up(0, num=2)
    assert set(ranks) == {0, 1}
    head.stop_workers()
    assert head.wait() == 0
    assert other.wait() == 0
    masters = [event["master"] for event in head.events("attempt_started")]
    assert masters[0].startswith(f"{ADDRESSES[0]}:")


def test_a_node_that_is_cut_off_is_dead_before_the_next_attempt_and_rejoins(job, hosts):
    head, other = start_pair(
        job, hosts, "--nnodes", "1:2", "--max-restarts", "3",
        "--rdzv-conf", "last_call_timeout=60",
    )  # fmt: skip
    first = head.wait_up(0, num=2)
    cut_off = [p for p, _ in first.values() if p in other.all_pids()]
    assert len(cut_off) == 1
    hosts.ip(1, "link set eth0 down")
    dropped = time.monotonic()
    second = head.wait_up(1, num=1, timeout_s=60)
    assert set(second) == {0}
    assert second[0][1] - dropped > 10.0
    assert not proc.is_running(cut_off[0])
    hosts.ip(1, "link set eth0 up")
    wait_until(lambda: head.events("newcomer"), "the node's return", 60)
    head.order(0, "kill")
    third = head.wait_up(2, num=2)
    assert set(third) == {0, 1}
    head.stop_workers()
    assert head.wait() == 0
    assert other.wait() == 0
    assert "no message from the head" in other.stderr


def test_a_path_that_swallows_large_packets_is_named(job, hosts):
    for number in range(2):
        hosts.ip(number, "link set eth0 gso_max_segs 1")
    # The head's end of the link drops what is longer, and its kernel says that it takes more.
    hosts.ip(0, "link set eth0 mtu 600", "route change 10.231.77.0/24 dev eth0 advmss 1460")
    head, other = start_pair(job, hosts, "--nnodes", "2", "--rdzv-conf", "join_timeout=60")
    wait_until(lambda: "large packets" in head.stderr, "the line", 60)
    for run in (head, other):
        run.process.terminate()
    head.wait(60)
    other.wait(60)


def test_two_agents_of_one_machine_that_is_not_the_heads_work(job, hosts):
    options = ("--nnodes", "3", "--rdzv-conf", "join_timeout=60")
    head, other = start_pair(job, hosts, *options)
    third = job(*other.options, command="torchrun")
    third.prefix, third.home, third.script = other.prefix, head.home, head.script
    third.start()
    ranks = head.wait_up(0, num=3)
    assert set(ranks) == {0, 1, 2}
    head.stop_workers()
    assert [run.wait() for run in (head, other, third)] == [0, 0, 0]
    assert "network: eth0" in head.stderr
