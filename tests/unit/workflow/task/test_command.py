import os
from types import SimpleNamespace

import pytest

from kit.workflows import workflow_plan
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, WorkingFolder
from torchmuster.core.model import codec
from torchmuster.errors import MusterError
from torchmuster.workflow.plan import (
    GroupNodes,
    GroupPlan,
    TaskNode,
    TaskPlan,
    TrainingInput,
    TrainingPlan,
)
from torchmuster.workflow.task.command import make_folders, training_words
from torchmuster.workflow.task.setup import TaskFacts


def test_the_folder_of_a_file_that_an_argument_names_in_the_output_is_made(tmp_path):
    output = str(tmp_path / "output")

    make_folders(["--out", f"{output}/models/w.pt", f"--log={output}/logs/x/log"], output)

    assert (tmp_path / "output" / "models").is_dir()
    assert (tmp_path / "output" / "logs" / "x").is_dir()
    assert not (tmp_path / "output" / "models" / "w.pt").exists()


def test_no_folder_is_made_outside_of_the_output(tmp_path):
    output = str(tmp_path / "output")
    outside = [f"{tmp_path}/data/x", f"{output}/../up/x", f"{output}-2/x", "x/y", output]

    make_folders(["--data", *outside], output)

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_be_made_is_named(tmp_path):
    (tmp_path / "models").write_text("a file")

    with pytest.raises(MusterError) as caught:
        make_folders([f"{tmp_path}/models/w.pt"], str(tmp_path))

    assert caught.value.where == str(tmp_path / "models")


@pytest.mark.parametrize(
    "nodes", [None, GroupNodes(engine="slurm", tasks={"t": (TaskNode(name="n1"),)})]
)
def test_a_training_task_hands_over_a_start_without_tokens(tmp_path, nodes):
    run_dir, place = RunDir(str(tmp_path)), WorkingFolder(str(tmp_path / "place"))
    training = TrainingPlan(
        nodes="2", nproc_per_node=None, script="{{output}}/train.py", args=("{{output}}/m/w",)
    )
    task = TaskPlan(name="t", training=training)
    group = GroupPlan(name="g", tasks=(task,))
    plan = workflow_plan(group, cwd="/home/me", grace_s=3.0)
    os.makedirs(run_dir.group("g").path)
    os.makedirs(place.path)
    if nodes is not None:
        atomic.write_json(run_dir.group("g").nodes, codec.to_plain(nodes))
    known = {"hosts": {}, "addresses": {}, "ports": {}}
    facts = TaskFacts(workflow=plan, group=group, task=task, attempt=2, place=place, **known)

    words = training_words(facts, SimpleNamespace(run_dir=run_dir, plan=plan))

    start = codec.from_plain(TrainingInput, atomic.read_json(words[-1]))
    assert words[-2] == "training-task"
    assert start.training.script == f"{place.output}/train.py"
    assert start.training.args == (f"{place.output}/m/w",)
    assert os.path.isdir(f"{place.output}/m")
    assert start.folder == run_dir.training_folder("t", 2)
    assert (start.cwd, start.grace_s, start.nodes) == ("/home/me", 3.0, nodes)
