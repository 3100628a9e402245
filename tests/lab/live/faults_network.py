"""Faults of names, addresses, firewalls, links and ports, and of nodes that go away in the middle."""

import contextlib
from pathlib import Path

from kit import missing
from lab.live.case import NAMES, PYTHON, fault, train
from lab.live.faults_launch import TELLS, THREE, TRIO, said, static, words
from lab.netlab import Host

CARELESS = (Host("n1"), Host("n2"))
# New connections, while their own and what answers them pass.
NEW = "tcp flags & (syn|ack) == syn"
LARGE = "ip saddr 10.10.0.0/24 ip daddr 10.10.0.0/24 meta length > 1200"
STORE_IS_HERE = {"n1": ["--rdzv-conf=is_host=1"], "n2": ["--rdzv-conf=is_host=0,read_timeout=5"]}
NO_STORE = """
import socket
taken = socket.create_server(("", 29500))
print("taken", flush=True)
while True:
    caller, _ = taken.accept()
    caller.sendall(b"SSH-2.0-OpenSSH_9.2\\r\\n")
    caller.close()
"""
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"


def only_n2(command):
    """Return what does this on n2 before the command that follows."""
    return ("sh", "-c", f'[ $(hostname) = n2 ] && {command}; exec "$@"', "-")


@contextlib.contextmanager
def port_taken(bench):
    """Let another program take calls on n1's port 29500."""
    with bench.lab.start("n1", [PYTHON, "-c", NO_STORE], stdout=-1) as other:
        assert other.stdout.readline() == b"taken\n"
        yield
        other.kill()


def shells_say(bench, host, *lines):
    """Add lines to what each shell of a host runs first, those of ssh too."""
    (bench.lab.root(host) / "home" / ".bashrc").write_text("".join(f"{one}\n" for one in lines))


def inside(bench, host, *argv):
    """Run a command on a host; it has to work."""
    done = bench.lab.run(host, argv)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Names and addresses.


@fault("loopback-address", hosts=CARELESS)
def own_names_mean_loopback(bench):
    files = bench.torchrun(*words(bench, join_s=15, read_s=12), until="connectFullMesh")
    assert "127.0.1.1" in said(files)
    return bench.explain(files)


@fault("loopback-address", quick=True, hosts=CARELESS)
def own_names_mean_loopback_before_the_job(bench):
    return bench.doctor()


@fault("bridge-address")
def gloo_takes_the_bridge_that_all_nodes_have(bench):
    told = words(bench, join_s=15, read_s=12)
    env = {"GLOO_SOCKET_IFNAME": "docker0"}
    return bench.explain(bench.torchrun(*told, env=env, until="connectFullMesh"))


@fault("name-not-resolved", hosts=(Host("n1", hosts=NAMES), Host("n2", hosts=NAMES[1:])))
def second_node_does_not_know_the_name_of_the_head(bench):
    return bench.explain(bench.torchrun(*words(bench)))


@fault(
    "name-not-resolved", quick=True, hosts=(Host("n1", hosts=NAMES), Host("n2", hosts=NAMES[1:]))
)
def second_node_does_not_know_the_name_of_the_head_before_the_job(bench):
    return bench.doctor()


@fault("names-differ", hosts=(*TRIO[:2], Host("n3", hosts=(*NAMES[:1], "10.10.0.9 n2", THREE[2]))))
def one_node_has_another_address_for_a_name(bench):
    return bench.doctor()


@fault(
    "mixed-ip-families",
    hosts=(Host("n1", hosts=NAMES), Host("n2", hosts=(NAMES[0], "fd00:10::2 n2"))),
)
def one_node_has_an_ipv6_name_only(bench):
    inside(bench, "n2", "ip", "addr", "add", "fd00:10::2/64", "dev", "hsn0", "nodad")
    files = bench.torchrun(*words(bench, join_s=15, read_s=12))
    return bench.explain(files)


@fault("no-such-interface", quick=True)
def gloo_is_told_of_an_interface_that_one_node_lacks(bench):
    told = words(bench, join_s=15, read_s=12)
    before = only_n2("export GLOO_SOCKET_IFNAME=ib0")
    return bench.explain(bench.torchrun(*told, before=before, limit_s=30, until="ib0"))


@fault("no-such-interface", hosts=TRIO[:2])
def gloo_is_told_of_an_interface_that_one_node_lacks_before_the_job(bench):
    shells_say(bench, "n2", "export GLOO_SOCKET_IFNAME=ib0")
    return bench.doctor()


@fault("nobody-hosts-the-store")
def head_does_not_know_a_second_address_as_its_own(bench):
    inside(bench, "n1", "ip", "addr", "add", "10.10.0.101/24", "dev", "hsn0")
    try:
        return bench.explain(bench.torchrun(*words(bench, endpoint="10.10.0.101:29500")))
    finally:
        inside(bench, "n1", "ip", "addr", "del", "10.10.0.101/24", "dev", "hsn0")


@fault(
    "no-route",
    hosts=(Host("n1", hosts=NAMES), Host("n2", hosts=NAMES, networks=("mgmt0", "docker0"))),
)
def second_node_has_no_interface_on_the_network_of_the_endpoint(bench):
    return bench.explain(bench.torchrun(*words(bench, endpoint="10.10.0.1:29500", join_s=8)))


@fault("no-route")
def endpoint_is_on_a_network_that_does_not_connect_the_nodes(bench):
    told = words(bench, endpoint="192.168.50.1:29500", join_s=12)
    return bench.explain(bench.torchrun(*told, each=STORE_IS_HERE, until="No route"))


@fault("network-unreachable")
def no_network_connects_the_nodes_before_the_job(bench):
    inside(bench, "n2", "ip", "link", "set", "hsn0", "down")
    try:
        return bench.doctor("--join-timeout", "10s")
    finally:
        inside(bench, "n2", "ip", "link", "set", "hsn0", "up")


# Firewalls and ports.


@fault("firewall", quick=True)
def firewall_drops_calls_to_the_endpoint(bench):
    bench.lab.deny("n1", 'iifname "hsn0" tcp dport 29500')
    return bench.explain(bench.torchrun(*words(bench)))


# torch 2.13 says of a call that was refused the same as of one that got no answer.
@fault("firewall", "store-refused")
def firewall_rejects_calls_to_the_endpoint(bench):
    bench.lab.deny("n1", 'iifname "hsn0" tcp dport 29500', verdict="reject")
    return bench.explain(bench.torchrun(*words(bench)))


@fault("second-store-unreachable")
def firewall_lets_through_the_port_of_the_endpoint_only(bench):
    bench.lab.deny("n1", f'iifname "hsn0" tcp dport != 29500 {NEW}')
    told = words(bench, join_s=15, read_s=12)
    bench.script.write_text(train(timeout_s=8))
    return bench.explain(bench.torchrun(*told))


@fault("port-blocked")
def firewall_drops_calls_before_the_job(bench):
    bench.lab.deny("n2", f"ip daddr 10.10.0.2 {NEW}")
    return bench.doctor()


@fault("port-blocked", quick=True)
def firewall_rejects_calls_before_the_job(bench):
    bench.lab.deny("n2", f"ip daddr 10.10.0.2 {NEW}", verdict="reject")
    return bench.doctor()


@fault("other-service-on-port")
def another_service_answers_on_the_port(bench):
    with port_taken(bench):
        return bench.explain(bench.torchrun(*words(bench)))


@fault("port-taken", quick=True)
def port_of_the_head_belongs_to_another_program(bench):
    ranks = {"n1": ["--node-rank=0"], "n2": ["--node-rank=1"]}
    with port_taken(bench):
        files = bench.torchrun(*static(bench, "--master-addr=n1"), each=ranks)
    return bench.explain(files)


# Links.


@fault("mtu-black-hole")
def path_swallows_large_packets_before_the_job(bench):
    bench.lab.deny("n2", LARGE)
    return bench.doctor()


@fault("mtu-black-hole", hosts=TRIO[:2])
def nodes_send_jumbo_frames_over_a_switch_that_takes_none(bench):
    for host in bench.lab.hosts:
        inside(bench, host, "ip", "link", "set", "hsn0", "mtu", "9000", "gso_max_segs", "1")
    return bench.doctor()


@fault("mtu-differs", hosts=TRIO[:2])
def one_node_has_another_mtu(bench):
    inside(bench, "n2", "ip", "link", "set", "hsn0", "mtu", "1400")
    return bench.doctor()


@fault("slow-path", hosts=TRIO)
def link_of_one_node_is_slow(bench):
    bench.lab.limit("n3", "hsn0", "10mbit")
    return bench.doctor()


@fault("clocks-differ", hosts=TRIO[:2])
def clock_of_one_node_is_a_minute_behind(bench):
    if not Path(FAKETIME).exists():
        missing.stop("needs libfaketime: apt-get install faketime")
    late = f"export LD_PRELOAD={FAKETIME} FAKETIME=-60s"
    shells_say(bench, "n2", late)
    return bench.doctor()


# Nodes that go away.


def endless(bench, timeout_s):
    """Write a script that trains until something happens."""
    bench.script.write_text(train(steps=100_000, at_step="time.sleep(0.02)", timeout_s=timeout_s))


def trained_until(bench, happens):
    """Run torchrun, let something happen when it trains, and return what `muster explain` says."""
    endless(bench, timeout_s=6)
    files = bench.torchrun(once=("step 3", happens), limit_s=25, env=TELLS)
    assert "step 3" in said(files)
    return bench.explain(files)


@fault("peer-lost")
def second_node_dies_in_the_middle(bench):
    return trained_until(bench, lambda: bench.lab.kill("n2"))


@fault("peer-lost")
def head_dies_in_the_middle(bench):
    return trained_until(bench, lambda: bench.lab.kill("n1"))


def ran_until(bench, happens):
    """Do the same with `muster run`."""
    endless(bench, timeout_s=100)
    once = ("step 3", happens)
    return bench.muster("--max-restarts=0", str(bench.script), once=once, limit_s=60)


@fault("node-failed")
def second_node_of_a_run_dies_in_the_middle(bench):
    return ran_until(bench, lambda: bench.lab.kill("n2"))


@fault("node-failed")
def second_node_of_a_run_is_cut_off_in_the_middle(bench):
    return ran_until(bench, lambda: bench.lab.cut("n2"))
