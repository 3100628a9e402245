"""`muster doctor` on hosts with real networks, each with one thing wrong: it is named, and nothing else is worse."""

import json

import pytest

from kit.command import MUSTER
from lab.netlab import Host
from lab.trains import muster_environment

pytestmark = pytest.mark.netns
LIMIT_S = 120.0
# New connections to n2, while its own and what answers them pass.
INTO_N2 = "ip daddr 10.10.0.2 tcp flags & (syn|ack) == syn"
LARGE = "ip saddr 10.10.0.0/24 ip daddr 10.10.0.0/24 meta length > 1200"


@pytest.fixture(scope="module")
def pair(labs):
    with labs([Host("n1"), Host("n2")]) as lab:
        yield lab


@pytest.fixture(autouse=True)
def _as_found(request):
    yield
    if "pair" in request.fixturenames:
        request.getfixturevalue("pair").reset()


def doctor(lab, *words):
    """Return exit code and what `muster doctor --json` says of n1 and n2, seen from the laptop."""
    env = muster_environment(lab) | {"MUSTER_SSH": " ".join(lab.ssh)}
    argv = [*MUSTER, "doctor", "--hosts", "n1,n2", "--no-job", "--json"]
    done = lab.run(lab.controller, [*argv, *words], env=env, limit_s=LIMIT_S)
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, json.loads(done.stdout)


def only_failure(lab, cause, *words):
    """Return what doctor finds first, which is this cause, and the only one above a warning."""
    code, said = doctor(lab, *words)
    assert code == 2
    assert said["findings"][0]["cause"] == cause
    assert causes(said, "failure") == [cause]
    return said["findings"][0]


def must(lab, host, *argv):
    done = lab.run(host, argv)
    assert done.returncode == 0, done.stderr


def causes(said, level):
    return [f["cause"] for f in said["findings"] if f["level"] == level]


def test_names_of_loopback_and_a_shared_docker0_are_named_and_are_no_failure(pair):
    code, said = doctor(pair)
    assert code == 1
    assert causes(said, "failure") == []
    assert causes(said, "warning") == ["loopback-address"]
    (name,) = [f for f in said["findings"] if f["cause"] == "loopback-address"]
    assert "127.0.1.1" in name["error"]
    (bridge,) = [f for f in said["findings"] if f["cause"] == "bridge-address"]
    assert "docker0 has the same address 172.17.0.1 on 2 nodes" in bridge["error"]
    assert {pair_["why_not"] for pair_ in said["pairs"]} == {None}
    assert all(pair_["bytes_per_s"] > 1e6 for pair_ in said["pairs"])


@pytest.mark.parametrize(("verdict", "word"), [("drop", "no answer"), ("reject", "refused")])
def test_a_firewall_in_front_of_one_node_is_named(pair, verdict, word):
    pair.deny("n2", INTO_N2, verdict=verdict)
    first = only_failure(pair, "port-blocked")
    assert "connections from n1 to n2" in first["error"]
    assert word in first["error"]


def test_a_path_that_swallows_large_packets_is_named(pair):
    pair.deny("n2", LARGE)
    assert "large packets do not arrive" in only_failure(pair, "mtu-black-hole")["error"]


@pytest.mark.lab
def test_ports_of_a_switch_with_a_smaller_mtu_are_named(make_lab):
    lab = make_lab([Host("n1"), Host("n2")])
    for host in ("n1", "n2"):  # the ports stay at 1500, and swallow without a word what is larger
        # Whole segments would be let through.
        for words in (("mtu", "9000"), ("gso_max_segs", "1")):
            must(lab, host, "ip", "link", "set", "hsn0", *words)
    assert "n1: hsn0 has MTU 9000" in only_failure(lab, "mtu-black-hole")["because"]


@pytest.mark.lab
def test_one_node_with_jumbo_frames_among_others_is_named(make_lab):
    lab = make_lab([Host("n1"), Host("n2")])
    must(lab, "n1", "ip", "link", "set", "hsn0", "mtu", "9000")
    code, said = doctor(lab)
    # Both sides agree on small segments by TCP itself, so it works; other traffic may not.
    assert code == 1
    assert "mtu-differs" in causes(said, "warning")


@pytest.mark.lab
def test_a_script_that_one_node_lacks_is_named(pair):
    (pair.root("n1") / "home" / "only.py").write_text("pass\n")
    (pair.root(pair.controller) / "home" / "only.py").write_text("pass\n")
    code, said = doctor(pair, "--script", "only.py")
    assert code == 2
    first = said["findings"][0]
    assert (first["cause"], first["at"]) == ("script-missing", "n2")
    assert "No such file" in first["because"][0]


@pytest.mark.lab
def test_small_shared_memory_and_a_full_disk_are_named(make_lab):
    lab = make_lab([Host("n1"), Host("n2")])
    must(lab, "n2", "mount", "-o", "remount,size=8m", "/dev/shm")
    runs = f"{lab.home}/.muster"
    must(lab, "n2", "sh", "-c", f"mkdir -p {runs} && mount -t tmpfs -o size=8m lab {runs}")
    code, said = doctor(lab)
    assert code == 2
    assert causes(said, "failure") == ["disk-full"]
    (disk,) = [f for f in said["findings"] if f["cause"] == "disk-full"]
    assert "on n2" in disk["error"]
    (shm,) = [f for f in said["findings"] if f["cause"] == "small-dev-shm"]
    assert "/dev/shm is only 8 MiB on n2" in shm["error"]


def test_before_a_start_a_healthy_pair_gets_no_line(pair):
    env = muster_environment(pair) | {"MUSTER_SSH": " ".join(pair.ssh)}
    home = pair.root(pair.controller) / "home"
    (home / "train.py").write_text("print('trained')\n")
    argv = [*MUSTER, "run", "--hosts", "n1,n2", "train.py"]
    done = pair.run(pair.controller, argv, env=env, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "preflight" not in done.stdout + done.stderr
