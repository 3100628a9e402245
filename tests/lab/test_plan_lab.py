"""What `muster plan` predicts of a step on two nodes, against what it takes on a network of that bandwidth.

Everything that the prediction is made of is measured: the network by the test job, a step by the probe, alone. No
number is adjusted. The two hosts have one core each of two; they run at the highest weight of the scheduler, for
what else this machine does would be measured too.
"""

import json
import os
import subprocess
import sys

import pytest

from kit.command import SOURCE
from lab.netlab import Host, NetLab, Network
from torchmuster.diagnose.cli.plan_measure import _read_measured, read_cluster
from torchmuster.diagnose.plan import step_probe, tiny_job
from torchmuster.diagnose.plan.scaling import predict

pytestmark = pytest.mark.netns
TRAIN = SOURCE.parent / "tests" / "lab" / "plan_train.py"
LONG = os.environ.get("MUSTER_LAB") == "1"
# A bucket of tokens passes at once: small, so that little does.
BURSTS = {"100mbit": "64kb", "1gbit": "128kb"}
# Layers, width, batch: 1, 10 and 42 MB of gradients.
MODELS = {"1 MB": (4, 256, 2048), "10 MB": (6, 640, 384), "42 MB": (10, 1024, 384)}
STEPS = 15  # the first three are not counted
FIRST = 'echo -20 >/proc/self/autogroup 2>/dev/null; exec "$@"'
LIMIT_S = 150.0


@pytest.fixture(scope="module", params=list(BURSTS) if LONG else ["100mbit"])
def network(request, allowed):
    """Return a lab whose network has this bandwidth, and what the test job sees of it."""
    net = Network(name="hsn0", subnet="10.10.0")
    hosts = [Host("n1", ssh="none"), Host("n2", ssh="none")]
    options = {"networks": (net,), "controller_on": ("hsn0",), "ssh_over": "hsn0"}
    with NetLab(hosts, **options) as lab:
        for host in lab.hosts:
            shape(lab, host, request.param)
        (said, _) = together(lab, [tiny_job.__file__], 29500)
        yield lab, json.loads(said)


def shape(lab, host, rate):
    words = ["tc", "qdisc", "replace", "dev", "hsn0", "root", "tbf", "rate", rate]
    done = lab.run(host, [*words, "burst", BURSTS[rate], "latency", "100ms"])
    assert done.returncode == 0, done.stderr


def together(lab, words, port, *, alone=False):
    """Run a script on both hosts at once, as one world or each for itself; return what each printed."""
    children = []
    for rank, host in enumerate(lab.hosts):
        head = host if alone else "n1"
        world = {"RANK": "0" if alone else str(rank), "WORLD_SIZE": "1" if alone else "2"}
        meeting = {"MASTER_ADDR": lab.address(head, "hsn0"), "MASTER_PORT": str(port)}
        env = {**world, **meeting, "LOCAL_RANK": "0", "GROUP_RANK": str(rank)}
        env["GLOO_SOCKET_IFNAME"] = "hsn0"
        argv = ["setsid", "-w", "sh", "-c", FIRST, "sh", sys.executable, *map(str, words)]
        children.append(lab.start(host, argv, env=env, stdout=subprocess.PIPE, text=True))
    try:
        said = [child.communicate(timeout=LIMIT_S)[0] for child in children]
    finally:
        for child in children:
            child.kill()
        for host in lab.hosts:
            lab.kill(host)
    assert [child.returncode for child in children] == [0, 0], said
    return said


def measure_alone(lab, shape_of_model):
    words = [step_probe.__file__, "12", "60", TRAIN, *shape_of_model, "1000"]
    found = []
    for text in together(lab, words, 29501, alone=True):
        lines = [line for line in text.splitlines() if line.startswith(step_probe.MARK)]
        found.append(_read_measured(json.loads(lines[-1].removeprefix(step_probe.MARK))).work)
    return max(found, key=lambda work: work.alone_s)  # a step is as slow as the slower one


@pytest.mark.slow
@pytest.mark.parametrize("size", list(MODELS) if LONG else ["10 MB"])
@pytest.mark.lab
def test_the_predicted_step_is_within_20_percent_of_the_measured_one(network, size):
    lab, seen = network
    cluster, words = read_cluster(seen)
    work = measure_alone(lab, MODELS[size])
    predicted = predict(work, cluster, 2)
    measured = json.loads(together(lab, [TRAIN, *MODELS[size], STEPS], 29502)[0])
    assert measured["steps"] >= 10
    deviation = predicted.step_s / measured["step_s"] - 1
    summary = (
        f"{predicted.step_s:.3f} s predicted, {measured['step_s']:.3f} s measured: {deviation:+.1%}"
    )
    print(f"{size}: alone {work.alone_s:.3f} s, {summary}; {words}; {predicted}")
    assert abs(deviation) < 0.2, summary


def test_the_tiny_job_finds_the_bandwidth_of_the_network(network, request):
    _, seen = network
    cluster, _ = read_cluster(seen)
    rate = request.node.callspec.params.get("network", "100mbit")
    line = {"100mbit": 12.5e6, "1gbit": 125e6}[rate]
    assert seen["right"]
    assert seen["world_size"] == 2
    assert 0.85 * line < cluster.between.bytes_per_s < 1.05 * line
    assert cluster.between.latency_s < 0.005
