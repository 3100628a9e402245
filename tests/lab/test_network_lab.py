"""Where torchrun with the obvious arguments fails, muster trains: one careless cluster, both ways.

The cluster is the default of `netlab.py`: names that resolve to 127.0.1.1 on their own host, one
interface on which the hosts don't reach each other, and docker's address on all of them.
"""

import pytest

from kit.command import MUSTER
from lab.netlab import Host
from lab.trains import SCRIPT, TORCHRUN, Together, muster_environment

pytestmark = pytest.mark.netns
# What people write: a name of the first host, or of the host that they are on.
NAMED = ("--rdzv-backend=c10d", "--rdzv-id=7", "--rdzv-endpoint=n1:29500")
OWN_NAME = ("--rdzv-backend=c10d", "--rdzv-id=7", "--rdzv-endpoint={host}:29500")
SIZE = ("--nnodes=2", "--nproc-per-node=1")
# `MASTER_ADDR=$(hostname -i)` in a script that runs on every node.
STATIC = ("--master-addr=127.0.1.1", "--master-port=29500")


@pytest.fixture
def pair(trio):
    (trio.shared / "train.py").write_text(SCRIPT)
    return trio


def test_torchrun_with_the_first_hosts_name_fails_in_gloo(pair, tmp_path):
    run = Together(pair, ["n1", "n2"], [*TORCHRUN, *SIZE, *NAMED, "train.py"], tmp_path)
    # Each tells the other its own name's address, and the other then calls itself.
    codes = run.wait_for("remote=[127.0.1.1]", 90.0)
    said = run.said("n1") + run.said("n2")
    assert "remote=[127.0.1.1]" in said
    assert 0 not in codes.values()
    assert "sum" not in said


@pytest.mark.parametrize("endpoint", [OWN_NAME, STATIC], ids=["hostname", "hostname -i"])
@pytest.mark.lab
def test_torchrun_with_each_hosts_own_name_waits_in_silence(pair, tmp_path, endpoint):
    rank = ("--node-rank=0",) if endpoint is STATIC else ()
    words = [*TORCHRUN, *SIZE, *endpoint, *rank, "train.py"]
    run = Together(pair, ["n1", "n2"], words, tmp_path)
    assert run.wait(10.0) == {"n1": None, "n2": None}
    assert "sum" not in run.said("n1") + run.said("n2")


def test_muster_torchrun_with_the_first_hosts_name_trains(pair, tmp_path):
    words = [*MUSTER, "torchrun", *SIZE, *NAMED, "train.py"]
    run = Together(pair, ["n1", "n2"], words, tmp_path, env=muster_environment(pair))
    assert run.wait(60.0) == {"n1": 0, "n2": 0}, run.said("n1") + run.said("n2")
    assert "sum 2 rank 0 on n1" in run.said("n1")
    assert "sum 2 rank 1 on n2" in run.said("n2")
    assert "by hsn0" in run.said("n1")


@pytest.mark.lab
def test_muster_torchrun_with_each_hosts_own_name_says_what_it_waits_for(pair, tmp_path):
    words = [*MUSTER, "torchrun", *SIZE, *OWN_NAME, "train.py"]
    run = Together(pair, ["n1", "n2"], words, tmp_path, env=muster_environment(pair))
    assert run.wait_for("waiting for 1 of 2 nodes", 60.0) == {"n1": None, "n2": None}
    assert "waiting for 1 of 2 nodes" in run.said("n1") + run.said("n2")


# A firewall that lets the endpoint through and nothing else: the run says so, not after torch's time-out.

NAMES = ("10.10.0.1 n1", "10.10.0.2 n2")
STORE_WORDS = (
    "--nnodes=2",
    "--nproc-per-node=1",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=n1:29500",
)
NEW = 'iifname != "lo" tcp dport != 29500 tcp flags & (syn|ack) == syn'


@pytest.mark.parametrize(
    "verdict", ["drop", pytest.param("reject with tcp reset", marks=pytest.mark.lab)]
)
def test_closed_port_of_the_store_ends_the_run_before_torch_does(make_lab, tmp_path, verdict):
    lab = make_lab([Host("n1", hosts=NAMES), Host("n2", hosts=NAMES)])
    (lab.shared / "train.py").write_text(SCRIPT.replace("seconds=20", "seconds=300"))
    lab.deny("n1", NEW, verdict=verdict)
    words = [*MUSTER, "torchrun", *STORE_WORDS, "train.py"]
    run = Together(lab, ["n1", "n2"], words, tmp_path, env=muster_environment(lab))
    codes = run.wait(150.0)  # torch's time-out is 300 s
    said = run.said("n1")
    assert 0 not in codes.values(), said
    assert None not in codes.values(), said
    assert "error: " in said
    assert "hint: " in said
