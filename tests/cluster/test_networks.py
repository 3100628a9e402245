"""Real agents on nodes with several networks: which one is chosen, what workers get, what it costs."""

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pytest

from cluster.netns import Nodes
from kit.command import MUSTER, SOURCE, spawned
from kit.namespaces import why_no_networks
from kit.values import run_plan
from kit.waiting import wait_until
from torchmuster.core import proc
from torchmuster.core.engines.local import agent_argv
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.events import parse
from torchmuster.core.model.narration import narrate
from torchmuster.core.model.plan import Limits, Tee
from torchmuster.core.net.address import new_secret, write_secret
from torchmuster.core.node.options import AgentOrder

HERE = Path(__file__).parent
# Answers nobody: an address of the fast network's subnet that no node has.
BLACK_HOLE = "10.10.0.99"
HEADS = (BLACK_HOLE, "172.17.0.1", "192.168.50.1", "10.10.0.1")
LIMIT_S = 90.0
SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
said = {name: os.environ.get(name) for name in names}
said["total"] = total.item()
with open(f"{sys.argv[1]}/rank-{dist.get_rank()}.json", "w") as file:
    json.dump(said, file)
"""


@pytest.fixture
def nodes(request):
    """Return as many nodes as the test's `num_nodes` says."""
    if (reason := why_no_networks()) is not None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with Nodes(request.param) as nodes:
        yield nodes


@dataclass
class FinishedRun:
    """What a run on nodes has left."""

    folder: Path
    codes: list[int]
    events: list[dict] = field(default_factory=list)

    def event(self, name):
        return next(event for event in self.events if event["event"] == name)

    def seconds(self, first, last):
        begin, end = (self.event(name)["time"] for name in (first, last))
        return seconds_of(end) - seconds_of(begin)

    def lines(self):
        told = (narrate(one.event) for one in map(parse, self.events) if one is not None)
        return [line for line in told if line is not None]

    def worker(self, rank):
        return json.loads((self.folder / f"rank-{rank}.json").read_text())


def seconds_of(stamp):
    return datetime.fromisoformat(stamp).timestamp()


def run_on(nodes, folder, *, env=None, heads=HEADS, limit_s=LIMIT_S):
    """Run the script with one agent and one worker on every node, all of the head's addresses in hand."""
    run_dir = RunDir(str(folder / "run"))
    os.makedirs(run_dir.logs)
    (folder / "script.py").write_text(SCRIPT)
    names = tuple(f"n{number}" for number in range(1, nodes.num_nodes + 1))
    plan = run_plan(
        len(names),
        run_id="networks",
        target=str(folder / "script.py"),
        args=(str(folder),),
        python=(sys.executable,),
        cwd=str(folder),
        limits=Limits(max_restarts=0, join_timeout_s=30.0),
        node_names=names,
        tee=Tee.NONE,
        stdin_rank=None,
    )
    atomic.write_json(run_dir.plan, codec.to_plain(plan))
    write_secret(run_dir.secret, new_secret())
    codes = start_and_wait(nodes, run_dir, folder, env or {}, heads, limit_s)
    lines = Path(run_dir.events).read_text().splitlines()
    return FinishedRun(folder, codes, [json.loads(line) for line in lines])


def torchrun_on(nodes, folder, limit_s=LIMIT_S):
    """Run the script with `muster torchrun` typed once on every node; return the head's run and all output."""
    (folder / "script.py").write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_SOCKET_IFNAME")}
    environment |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    agents = []
    with contextlib.ExitStack() as stack:
        for node in range(1, nodes.num_nodes + 1):
            argv = [*MUSTER, "torchrun", "--nproc-per-node=1"]
            argv += [f"--nnodes={nodes.num_nodes}", f"--node-rank={node - 1}"]
            argv += ["--master-addr=10.10.0.1", "--master-port=29511"]
            agents.append(
                spawned(
                    nodes.argv(node, [*argv, str(folder / "script.py"), str(folder)]),
                    env=environment | {"MUSTER_HOME": str(folder / "home")},
                )
            )
            stack.callback(agents[-1].kill)
        told = [agent.communicate(timeout=limit_s)[0] for agent in agents]
    (events,) = (folder / "home" / "runs").glob("*/events.jsonl")
    lines = events.read_text().splitlines()
    codes = [agent.returncode for agent in agents]
    return FinishedRun(folder, codes, [json.loads(line) for line in lines]), told


def start_and_wait(nodes, run_dir, folder, env, heads, limit_s):
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_SOCKET_IFNAME")}
    environment |= {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    lifeline, held = os.pipe()
    agents = []
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: [agent.wait(20) for agent in agents])
            stack.callback(os.close, held)  # agents that are still there end

            def start(node, argv):
                log = stack.enter_context(open(folder / f"agent-{node}.err", "wb"))
                agents.append(
                    spawned(
                        nodes.argv(node, argv),
                        env=environment | env.get(node, {}),
                        stdout=log,
                        pass_fds=[lifeline],
                    )
                )

            where = folder / "address"
            head = [sys.executable, str(HERE / "network_head.py"), str(where), run_dir.path]
            start(1, [*head, str(lifeline)])
            wait_until(where.exists, "the head's address")
            port = where.read_text()
            for node in range(2, nodes.num_nodes + 1):
                order = AgentOrder(
                    run_dir=run_dir.path,
                    place=node - 1,
                    head=tuple(f"{host}:{port}" for host in heads),
                    lifeline_fd=lifeline,
                )
                start(node, agent_argv(order))
            deadline = time.monotonic() + limit_s
            return [agent.wait(max(deadline - time.monotonic(), 0.1)) for agent in agents]
    finally:
        os.close(lifeline)


@pytest.mark.parametrize("nodes", [2, pytest.param(3, marks=pytest.mark.lab)], indirect=True)
def test_workers_use_the_network_on_which_all_nodes_reach_each_other(nodes, tmp_path):
    ran = run_on(nodes, tmp_path)

    assert ran.codes == [0] * nodes.num_nodes
    for rank in range(nodes.num_nodes):
        assert ran.worker(rank) == {
            "MASTER_ADDR": "10.10.0.1",
            "GLOO_SOCKET_IFNAME": "hsn0",
            "NCCL_SOCKET_IFNAME": "=hsn0",
            "TP_SOCKET_IFNAME": "hsn0",
            "total": float(nodes.num_nodes),
        }


@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_one_line_says_which_network_and_why_not_the_others(nodes, tmp_path):
    ran = run_on(nodes, tmp_path)

    (line,) = [line for line in ran.lines() if line.startswith("network: ")]
    speed, _, rest = line.removeprefix("network: hsn0 (10.10.0.0/24), 2 nodes, ").partition("; ")
    assert speed.endswith(" ms")
    assert " Gbit/s, " in speed
    unused = set(rest.removeprefix("not used: ").split(", "))
    assert unused == {"docker0 (same address on 2 nodes)", "mgmt0 (not reachable from n2)"}


@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_the_survey_adds_nothing_to_the_start_although_two_addresses_are_black_holes(
    nodes, tmp_path
):
    ran = run_on(nodes, tmp_path)

    network = ran.event("network")
    assert network["survey_s"] < 2.0
    assert network["waited_s"] < 0.1  # by spawners that were ready before it was known
    joined = [seconds_of(e["time"]) for e in ran.events if e["event"] == "agent_joined"]
    assert joined[1] - joined[0] < 2.0  # the first address that n2 called answers nobody


@pytest.mark.parametrize("nodes", [2], indirect=True)
@pytest.mark.lab
def test_interface_names_may_differ_between_the_nodes(nodes, tmp_path):
    nodes.ip(2, "link set hsn0 down", "link set hsn0 name ens5", "link set ens5 up")

    ran = run_on(nodes, tmp_path)

    assert [ran.worker(rank)["GLOO_SOCKET_IFNAME"] for rank in range(2)] == ["hsn0", "ens5"]
    assert [ran.worker(rank)["NCCL_SOCKET_IFNAME"] for rank in range(2)] == ["=hsn0", "=ens5"]


@pytest.mark.parametrize("nodes", [2], indirect=True)
@pytest.mark.lab
def test_point_to_point_addresses_that_are_routed_make_a_network(nodes, tmp_path):
    for node, other in ((1, 2), (2, 1)):
        nodes.ip(
            node,
            f"addr del 10.10.0.{node}/24 dev hsn0",
            f"addr add 10.10.0.{node}/32 dev hsn0",
            f"route add 10.10.0.{other}/32 dev hsn0",
        )

    ran = run_on(nodes, tmp_path)

    assert ran.codes == [0, 0]
    assert ran.event("network")["interface"] == "hsn0"
    assert ran.worker(1)["MASTER_ADDR"] == "10.10.0.1"


@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_what_the_user_has_set_is_kept_and_a_wrong_name_is_said(nodes, tmp_path):
    env = {2: {"NCCL_SOCKET_IFNAME": "ib0", "TP_SOCKET_IFNAME": "mgmt0"}}

    ran = run_on(nodes, tmp_path, env=env)

    assert ran.worker(1)["NCCL_SOCKET_IFNAME"] == "ib0"
    assert ran.worker(0)["NCCL_SOCKET_IFNAME"] == "=hsn0"
    said = " ".join(ran.lines())
    assert "NCCL_SOCKET_IFNAME=ib0 on n2 names no interface of this node" in said
    assert "TP_SOCKET_IFNAME=mgmt0 on n2 names mgmt0, which can't connect the nodes" in said


@pytest.mark.parametrize("nodes", [3], indirect=True)
def test_two_nodes_that_do_not_reach_each_other_end_the_run_by_name(nodes, tmp_path):
    # Both reach the head, so both join; only the survey can find it.
    nodes.ip(2, "route add blackhole 10.10.0.3/32")
    nodes.ip(3, "route add blackhole 10.10.0.2/32")

    ran = run_on(nodes, tmp_path)

    assert ran.event("run_ended")["state"] == "failed"
    report = ran.event("run_ended")["report"]
    assert "n2 and n3 don't reach each other" in report["error"]
    assert any("hsn0: n2 calls n3 at 10.10.0.3" in line for line in report["because"])
    assert ran.seconds("run_started", "run_ended") < 20.0


@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_torchrun_on_two_hosts_measures_too(nodes, tmp_path):
    ran, told = torchrun_on(nodes, tmp_path)

    assert ran.codes == [0, 0], told
    assert "network: hsn0 (10.10.0.0/24), 2 nodes" in told[0]
    assert ran.worker(1)["NCCL_SOCKET_IFNAME"] == "=hsn0"


@pytest.mark.parametrize("nodes", [2], indirect=True)
@pytest.mark.lab
def test_torchrun_twice_on_one_host_measures_nothing(nodes, tmp_path):
    both_on_one = OneHost(nodes)

    ran, told = torchrun_on(both_on_one, tmp_path)

    assert ran.codes == [0, 0], told
    assert [e for e in ran.events if e["event"] == "network"] == []
    assert "network:" not in told[0]


@pytest.mark.parametrize("nodes", [2], indirect=True)
@pytest.mark.lab
def test_the_faster_network_wins_over_the_one_that_the_agents_use(nodes, tmp_path):
    slow = "qdisc add dev {} root tbf rate 50mbit burst 32kbit latency 50ms"
    for node in (1, 2):
        nodes.ip(0, f"link set mgmt{node} master fast up")
        shaped = subprocess.run(
            nodes.argv(node, ["tc", *slow.format("mgmt0").split()]),
            capture_output=True,
            check=False,
        )
        if shaped.returncode != 0:
            pytest.skip(f"no link can be made slow here: {shaped.stderr.decode()[:100]}")

    ran = run_on(nodes, tmp_path, heads=["192.168.50.1"])

    network = ran.event("network")
    assert network["interface"] == "hsn0"
    reasons = {unused["name"]: unused["why"] for unused in network["unused"]}
    assert reasons["mgmt0"].startswith("slower (0.0")
    assert ran.worker(1)["MASTER_ADDR"] == "10.10.0.1"


def test_nothing_is_left_of_the_nodes_when_their_maker_is_killed():
    if (reason := why_no_networks()) is not None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from cluster.netns import Nodes\n"
        "with Nodes(2) as nodes:\n"
        "    print(*nodes.pids, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", program, str(HERE.parent)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as maker:
        pids = [int(word) for word in maker.stdout.readline().split()]
        maker.kill()

    assert len(pids) == 3
    wait_until(lambda: not any(proc.is_running(pid) for pid in pids), "the end of all holders")


class OneHost:
    """All nodes are the first."""

    def __init__(self, nodes):
        self.num_nodes = nodes.num_nodes
        self._nodes = nodes

    def argv(self, node, command):
        return self._nodes.argv(1, command)
