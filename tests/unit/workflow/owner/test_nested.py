"""The run inside of a training task: what is planned on its node, from what the agent of the task hands over."""

import json
import sys

import pytest

from torchmuster.core.model import codec
from torchmuster.core.model.plan import Limits, NodeSetup
from torchmuster.errors import ManyErrors
from torchmuster.workflow.owner.nested import plan_training
from torchmuster.workflow.plan import GroupNodes, TaskNode, TrainingInput, TrainingPlan

GPUS = ("0", "1", "2", "3")


def start(tmp_path, script="train.py", **training):
    (tmp_path / "train.py").touch()
    nodes = {"t": (TaskNode(name="n1", gpus=("0",)), TaskNode(name="n2"))}
    return TrainingInput(
        task="t",
        training=TrainingPlan(
            **{"nodes": "2", "nproc_per_node": None, "script": script, **training}
        ),
        folder=str(tmp_path / "training"),
        snapshots=str(tmp_path / "snapshots"),
        cwd=str(tmp_path),
        grace_s=7.5,
        node_setup=NodeSetup(lines=("module load cuda",), origin="muster.toml"),
        nodes=GroupNodes(engine="slurm", tasks=nodes),
    )


def test_what_is_handed_over_stays_what_it_is(tmp_path):
    one = start(tmp_path, args=("--lr", "0.1"))
    assert codec.from_plain(TrainingInput, json.loads(json.dumps(codec.to_plain(one)))) == one


def test_nothing_unknown_is_taken(tmp_path):
    with pytest.raises(codec.CodecError, match="unknown field python"):
        codec.from_plain(TrainingInput, codec.to_plain(start(tmp_path)) | {"python": []})


def test_the_plan_has_what_the_task_says(tmp_path):
    one = start(tmp_path, nodes="1:3", nproc_per_node="2", max_restarts=1, args=("--lr", "0.1"))
    plan = plan_training(one, (), ())
    assert (plan.min_nodes, plan.max_nodes, plan.workers_per_node) == (1, 3, (2,))
    assert plan.limits == Limits(max_restarts=1, grace_s=7.5)
    assert plan.node_names == ("n1", "n2", "n3")
    assert (plan.program.args, plan.program.python) == (("--lr", "0.1"), (sys.executable,))
    assert (plan.node_setup, plan.stdin_rank) == (one.node_setup, None)


@pytest.mark.parametrize("text", [None, "gpu", "4"])
def test_each_node_of_a_cluster_has_gpus_of_its_own(tmp_path, text):
    plan = plan_training(start(tmp_path, nproc_per_node=text), GPUS, ("a", "b"))
    assert (plan.workers_per_node, plan.node_names) == ((4,), ("a", "b"))


def test_simulated_nodes_share_the_gpus_of_their_machine(tmp_path):
    assert plan_training(start(tmp_path), GPUS, ()).workers_per_node == (2,)
    with pytest.raises(ManyErrors, match="2 simulated nodes ask for 8 GPUs"):
        plan_training(start(tmp_path, nproc_per_node="4"), GPUS, ())


def test_a_script_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ManyErrors, match="the script does not exist"):
        plan_training(start(tmp_path, script="tain.py"), (), ())
