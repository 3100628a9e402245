"""The network lab is what its docstring says, and leaves nothing on the machine that it runs on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kit.command import SOURCE
from kit.footprint import inside, machine
from kit.waiting import wait_until
from kit.world import MACHINE_PATH
from lab.netlab import DOCKER, HSN, MGMT, Host, NetLab, Network

pytestmark = pytest.mark.netns
TESTS = Path(__file__).parents[1]
CALL = """
import socket, sys, time
began_s = time.monotonic()
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])).close()
    said = "ok"
except OSError as error:
    said = type(error).__name__
print(said, "at once" if time.monotonic() - began_s < 0.5 else "late")
"""
SEND = """
import socket, sys, time
call = socket.create_connection((sys.argv[1], 4711))
began_s = time.monotonic()
call.sendall(bytes(2 << 20))
call.shutdown(socket.SHUT_WR)
call.recv(1)
print(time.monotonic() - began_s)
"""
TAKE = """
import socket
server = socket.create_server(("", 4711))
print("ready", flush=True)
while True:
    call, _ = server.accept()
    while call.recv(1 << 20):
        pass
    call.close()
"""
KILLED_TEST = """
import json, os, signal, subprocess
from pathlib import Path
from lab.netlab import NetLab

def test_that_is_killed():
    with NetLab(2) as lab:
        child = lab.start(lab.controller, [*lab.ssh, "n1", "sleep 4711"])
        while "sleep 4711" not in lab.processes("n1").values():
            pass
        lab.cut("n2")
        space = os.readlink(f"/proc/{lab.first}/ns/pid")
        told = Path(os.environ["TOLD"])
        pids = [lab.house.pid, *lab.pids.values()]
        told.with_suffix(".new").write_text(json.dumps([str(lab.folder), pids, space]))
        told.with_suffix(".new").rename(told)
        if os.environ["STAY"] == "1":
            signal.pause()
    child.wait()
"""


def call(lab, host, address, port=22, limit_s=2.0):
    """Return how a call of TCP from a host ends: "ok at once", "ConnectionRefusedError at once", ..."""
    words = [sys.executable, "-I", "-S", "-c", CALL, address, port, limit_s]
    return lab.run(host, words).stdout.strip()


def ssh(lab, host, command, *options):
    """Run a command by ssh from the controller, which is never asked a question."""
    words = [*lab.ssh, "-o", "BatchMode=yes", "-o", "ConnectTimeout=2", *options, host, command]
    return lab.run(lab.controller, words)


def test_hosts_reach_each_other_on_the_fast_interface_only(trio):
    assert call(trio, "n1", trio.address("n2", "hsn0")) == "ok at once"
    assert call(trio, "n2", trio.address("n1", "hsn0")) == "ok at once"
    assert call(trio, "n1", trio.address("n2", "mgmt0")) != "ok at once"


def test_the_controller_reaches_hosts_on_the_management_interface_only(trio):
    for host in trio.hosts:
        assert call(trio, trio.controller, trio.address(host, "mgmt0")) == "ok at once"
        assert call(trio, trio.controller, trio.address(host, "hsn0")) != "ok at once"


def test_every_host_has_the_same_docker0(trio):
    for host in trio.hosts:
        said = trio.run(host, ["ip", "-o", "-4", "addr", "show", "dev", "docker0"]).stdout
        assert "172.17.0.1/16" in said


def test_a_host_calls_itself_127_0_1_1_as_debian_does(trio):
    ask = "import socket; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()))"
    for host in trio.hosts:
        assert trio.run(host, [sys.executable, "-c", ask]).stdout == f"{host} 127.0.1.1\n"
    other = trio.run("n2", ["getent", "hosts", "n1"]).stdout.split()
    assert other == [trio.address("n1", "hsn0"), "n1"]


@pytest.mark.lab
def test_interfaces_in_sys_are_the_hosts_own(trio):
    assert set(trio.run("n1", ["ls", "/sys/class/net"]).stdout.split()) == {
        "lo",
        "hsn0",
        "mgmt0",
        "docker0",
    }


@pytest.mark.lab
def test_a_host_sees_its_own_processes_only(trio):
    with trio.start("n1", ["sleep", "4711"]) as child:
        wait_until(lambda: "sleep 4711" in trio.processes("n1").values(), "the command")
        assert "sleep 4711" in trio.run("n1", ["ps", "ax"]).stdout
        assert "sleep 4711" not in trio.run("n2", ["ps", "ax"]).stdout
        assert trio.leftovers() == {"n1": ["sleep 4711"]}
        child.kill()
    wait_until(lambda: not trio.leftovers(), "its end")


@pytest.mark.lab
def test_home_and_tmp_are_own_and_shared_is_shared_where_asked(trio):
    for place in ("$HOME", "/tmp", str(trio.shared), "/dev/shm"):
        ssh(trio, "n1", f"echo mine > {place}/mark")
    found = {
        host: ssh(trio, host, f"ls $HOME /tmp {trio.shared} /dev/shm").stdout.count("mark")
        for host in trio.hosts
    }
    assert found == {"n1": 4, "n2": 1, "n3": 0}
    assert (trio.root("n1") / "home" / "mark").read_text() == "mine\n"


def test_cut_hosts_are_silent_until_healed(trio):
    address = trio.address("n2", "hsn0")
    trio.cut("n2")
    assert call(trio, "n1", address, limit_s=1.0) == "TimeoutError late"
    assert call(trio, trio.controller, trio.address("n2", "mgmt0"), limit_s=1.0).endswith("late")
    assert call(trio, "n2", "127.0.0.1") == "ok at once"
    trio.heal("n2")
    assert call(trio, "n1", address) == "ok at once"


@pytest.mark.lab
def test_one_interface_can_be_cut(trio):
    trio.cut("n2", interface="hsn0")
    assert call(trio, "n1", trio.address("n2", "hsn0"), limit_s=1.0) == "TimeoutError late"
    assert call(trio, trio.controller, trio.address("n2", "mgmt0")) == "ok at once"


@pytest.mark.lab
def test_a_port_can_be_rejected_or_dropped_and_an_address_swallowed(trio):
    one, two = trio.address("n1", "hsn0"), trio.address("n2", "hsn0")
    trio.deny("n2", "tcp dport 22", verdict="reject")
    assert call(trio, "n1", two) == "ConnectionRefusedError at once"
    trio.heal("n2")
    trio.deny("n2", "tcp dport 22")
    assert call(trio, "n1", two, limit_s=1.0) == "TimeoutError late"
    trio.heal("n2")
    trio.deny("n2", f"ip daddr {one}")
    assert call(trio, "n2", one, limit_s=1.0) == "TimeoutError late"
    assert call(trio, "n2", trio.address("n3", "hsn0")) == "ok at once"


@pytest.mark.lab
def test_a_limited_link_is_slow(trio):
    address, seconds = trio.address("n2", "hsn0"), {}
    with trio.start("n2", [sys.executable, "-c", TAKE], stdout=subprocess.PIPE) as server:
        assert server.stdout.readline() == b"ready\n"
        for name in ("n1", "n3"):
            if name == "n1":
                trio.limit(name, "hsn0", "20mbit")
            seconds[name] = float(trio.run(name, [sys.executable, "-c", SEND, address]).stdout)
        server.kill()
    trio.run("n1", ["tc", "qdisc", "del", "dev", "hsn0", "root"])
    assert seconds["n1"] > 0.6  # 2 MiB at 20 Mbit/s are 0.84 s
    assert seconds["n3"] < seconds["n1"] / 2


@pytest.mark.lab
def test_a_killed_host_has_no_processes_and_its_sshd_can_be_started_again(trio):
    with trio.start("n1", ["sleep", "4711"]) as child:
        wait_until(trio.leftovers, "the command")
        trio.kill("n1")
        assert child.wait(10) == -signal.SIGKILL
    assert trio.processes("n1") == {}
    assert call(trio, trio.controller, trio.address("n1", "mgmt0")).startswith("ConnectionRefused")
    trio.start_sshd("n1")
    assert ssh(trio, "n1", "hostname").stdout == "n1\n"


@pytest.mark.lab
def test_a_paused_sshd_takes_calls_and_is_silent(trio):
    trio.pause_sshd("n1")
    assert call(trio, trio.controller, trio.address("n1", "mgmt0")) == "ok at once"
    assert "banner exchange" in ssh(trio, "n1", "hostname").stderr
    trio.resume_sshd("n1")
    assert ssh(trio, "n1", "hostname").stdout == "n1\n"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("none", "Connection refused"),
        ("silent", "banner exchange"),
        ("password", "Permission denied"),
        ("unknown_key", "Host key verification failed"),
        ("changed_key", "has changed"),
    ],
)
@pytest.mark.lab
def test_an_sshd_is_as_asked(odd, kind, words):
    done = ssh(odd, kind.replace("_", "-"), "hostname")
    assert done.returncode == 255
    assert words in done.stderr


@pytest.fixture(scope="module")
def odd(labs):
    """Return a lab of hosts with something odd each."""
    hosts = [
        *(
            Host(kind.replace("_", "-"), ssh=kind)
            for kind in ("none", "silent", "password", "unknown_key", "changed_key")
        ),
        Host("bare", python="none", hide=(SOURCE,)),
        Host("other", python="/usr/bin/python3", shell_noise="welcome to other"),
        Host("renamed", hosts=("127.0.0.1 renamed",), networks=("mgmt0", "hsn1")),
    ]
    networks = (HSN, MGMT, Network(name="hsn1", subnet="10.20.0", mtu=9000, rate="100mbit"))
    with labs(hosts, networks=networks) as lab:
        yield lab


@pytest.mark.lab
def test_a_host_can_lack_python_and_the_source(odd):
    said = ssh(
        odd, "bare", "command -v python python3 python3.11; command -v tar; ls -A " + str(SOURCE)
    )
    assert said.stdout.split() == [str(odd.root("bare") / "bin" / "tar")]


@pytest.mark.lab
def test_a_host_can_have_another_python_and_noisy_shells(odd):
    said = ssh(odd, "other", "python3 -c 'import sys; print(sys.executable)'").stdout
    assert said.splitlines() == ["welcome to other", "/usr/bin/python3"]


@pytest.mark.lab
def test_a_host_can_have_its_own_names_interfaces_mtu_and_rate(odd):
    assert odd.run("renamed", ["getent", "hosts", "renamed"]).stdout.split()[0] == "127.0.0.1"
    said = odd.run("renamed", ["ip", "-o", "link"]).stdout
    assert "hsn1" in said
    assert "mtu 9000" in said
    assert "hsn0" not in said
    assert "tbf" in odd.run("renamed", ["tc", "qdisc", "show", "dev", "hsn1"]).stdout


@pytest.mark.lab
def test_a_lab_may_have_one_network_that_the_controller_is_on(make_lab):
    lab = make_lab(2, networks=(HSN, DOCKER), ssh_over="hsn0", controller_on=("hsn0",))
    assert ssh(lab, "n2", "hostname").stdout == "n2\n"


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "sigkill_of_pytest"])
def test_a_lab_leaves_nothing_on_the_machine(tmp_path, killed, allowed):
    (tmp_path / "test_it.py").write_text(KILLED_TEST)
    told = tmp_path / "told"
    before = machine()
    paths = {"PYTHONPATH": f"{SOURCE}:{TESTS}", "TOLD": str(told), "STAY": str(int(killed))}
    paths["PATH"] = MACHINE_PATH  # the lab in there needs the machine's own Slurm and sshd
    words = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", tmp_path]
    words += ["-p", "no:cacheprovider", tmp_path / "test_it.py"]
    with subprocess.Popen(words, env=os.environ | paths, cwd=tmp_path) as child:
        wait_until(lambda: told.exists() or child.poll() is not None, "the lab")
        if killed:
            folder, pids, space = json.loads(told.read_text())
            assert inside(folder, pids, space)  # it can be seen at all
            child.kill()
    assert child.returncode == (-signal.SIGKILL if killed else 0)
    folder, pids, space = json.loads(told.read_text())
    wait_until(lambda: not inside(folder, pids, space), "the end of its processes")
    wait_until(lambda: not os.path.exists(folder), "the end of its folder")
    wait_until(
        lambda: not machine() - before, "the machine to be as before", 90.0
    )  # other tests may have links too


@pytest.mark.lab
def test_a_lab_ends_when_the_process_that_holds_it_is_killed(allowed):
    with NetLab(1) as lab:
        pids = list(lab.pids.values())
        lab.house.kill()
        wait_until(lambda: not inside(str(lab.folder), pids), "its end")
    assert not lab.folder.exists()
