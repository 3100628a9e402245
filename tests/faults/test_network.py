"""Two hosts, each a network namespace, and a link between them that drops."""

import os
import secrets
import shutil
import subprocess
import time

import pytest
from harness import LOOP

from kit.waiting import wait_until
from torchmuster import proc

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")
pytestmark = pytest.mark.netns


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def hosts():
    """Yield two namespaces `(name, address)` that see only each other."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    word = secrets.token_hex(3)
    names = [f"muster-{word}-a", f"muster-{word}-b"]
    addresses = ["10.231.77.1", "10.231.77.2"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        ip(
            "link",
            "add",
            "eth0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "eth0",
            "netns",
            names[1],
        )
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield list(zip(names, addresses, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def start_pair(job, hosts, *options):
    """Start one `muster torchrun` on each host; they share a home and a folder."""
    (name_a, address), (name_b, _) = hosts
    pair = []
    for name in (name_a, name_b):
        run = job(
            "--nproc-per-node", "1", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"{address}:29501", *options, command="torchrun",
        )  # fmt: skip
        run.prefix = ("nsenter", f"--net=/run/netns/{name}")
        pair.append(run)
    head, other = pair
    other.home = head.home
    head.script = other.script = (LOOP, str(head.folder))
    head.start()
    other.start()
    return head, other


def test_two_hosts_train_over_their_link(job, hosts):
    head, other = start_pair(job, hosts, "--nnodes", "2")
    ranks = head.wait_up(0, num=2)
    assert set(ranks) == {0, 1}
    head.stop_workers()
    assert head.wait() == 0
    assert other.wait() == 0
    masters = [event["master"] for event in head.events("attempt_started")]
    assert masters[0].startswith("10.231.77.1:")


def test_a_node_that_is_cut_off_is_dead_before_the_next_attempt_and_rejoins(job, hosts):
    head, other = start_pair(
        job, hosts, "--nnodes", "1:2", "--max-restarts", "3",
        "--rdzv-conf", "last_call_timeout=60",
    )  # fmt: skip
    first = head.wait_up(0, num=2)
    cut_off = [p for p, _ in first.values() if p in other.all_pids()]
    assert len(cut_off) == 1
    ip("-n", hosts[1][0], "link", "set", "eth0", "down")
    dropped = time.monotonic()
    second = head.wait_up(1, num=1, timeout_s=60)
    assert set(second) == {0}
    assert second[0][1] - dropped > 10.0
    assert not proc.is_running(cut_off[0])
    ip("-n", hosts[1][0], "link", "set", "eth0", "up")
    wait_until(lambda: head.events("newcomer"), "the node's return", 60)
    head.order(0, "kill")
    third = head.wait_up(2, num=2)
    assert set(third) == {0, 1}
    head.stop_workers()
    assert head.wait() == 0
    assert other.wait() == 0
    assert "no message from the head" in other.stderr


def test_a_path_that_swallows_large_packets_is_named(job, hosts):
    (head_name, _), (other_name, _) = hosts
    for name in (head_name, other_name):
        ip("-n", name, "link", "set", "eth0", "gso_max_segs", "1")
    # The head's end of the link drops what is longer, and its kernel says that it takes more.
    ip("-n", head_name, "link", "set", "eth0", "mtu", "600")
    words = ("route", "change", "10.231.77.0/24", "dev", "eth0", "advmss", "1460")
    ip("-n", head_name, *words)
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
