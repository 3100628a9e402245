import base64
import os

import pytest

from torchmuster.workflow.plan import InputKind
from unit.workflow.spec.workflow_files import load, one


def only_task(loaded):
    assert loaded.errors == []
    ((task,),) = (group.tasks for group in loaded.groups)
    return task


def with_file(**keys):
    text = ", ".join(f"{key}: {value}" for key, value in keys.items())
    return f"tasks:\n- name: a\n  command: [x]\n  files:\n  - {{path: /tmp/x, {text}}}\n"


def test_a_bare_task_gets_a_group_and_is_its_lead(tmp_path):
    loaded = load(tmp_path, "tasks:\n- name: a\n  command: [x, y]\n  args: [1]\n")

    assert loaded.groups[0].name == "a-group"
    assert only_task(loaded).lead
    assert only_task(loaded).command == ("x", "y", "1")


def test_a_group_comes_after_those_whose_tasks_it_reads(tmp_path):
    body = """\
        groups:
        - name: first
          tasks: [{name: a, command: [x]}]
        - name: second
          tasks: [{name: b, command: [x], inputs: [{task: a}, {url: 's3://b/c'}, {task: 'run:z'}]}]
        """
    first, second = load(tmp_path, body).groups

    assert (first.after, second.after) == ((), ("first",))
    kinds = [entry.kind for entry in second.tasks[0].inputs]
    assert kinds == [InputKind.TASK, InputKind.URL, InputKind.TASK]
    assert second.tasks[0].inputs[2].run_id == "run"


def test_times_and_resources_reach_the_plan_as_numbers(tmp_path):
    body = """\
        timeout: {exec_timeout: 1h30m}
        resources: {big: {cpu: '2', memory: 1Gi}}
        tasks: [{name: a, command: [x], resource: big, exitActions: {reschedule: '3,7-9'}}]
        """
    loaded = load(tmp_path, body)
    task = only_task(loaded)

    assert loaded.groups[0].exec_timeout_s == 5400
    assert (task.resources.cpu, task.resources.memory_bytes) == (2, 1 << 30)
    actions = [task.action(code).name for code in (3, 8, 0, 1)]
    assert actions == ["RESCHEDULE", "RESCHEDULE", "COMPLETE", "FAIL"]


def test_an_unknown_exit_action_is_an_error_and_no_crash(tmp_path):
    body = "tasks: [{name: a, command: [x], exitActions: {RETRY: 1}}]\n"

    assert one(load(tmp_path, body).errors, "`RETRY` is not an exit action")


def test_outputs_of_every_kind_reach_the_plan(tmp_path):
    body = """\
        tasks:
        - name: a
          command: [x]
          outputs:
          - {url: 's3://b/c'}
          - {dataset: {name: d, path: p}}
          - {update_dataset: {name: e, paths: [q, r]}}
        """
    outputs = only_task(load(tmp_path, body)).outputs

    assert [entry.kind.name for entry in outputs] == ["URL", "DATASET", "UPDATE_DATASET"]
    assert [entry.paths for entry in outputs] == [(), ("p",), ("q", "r")]


def test_a_local_file_is_read_and_its_tokens_stay_as_they_are(tmp_path):
    (tmp_path / "run.sh").write_text("echo {{output}} {% if %}\n")
    os.chmod(tmp_path / "run.sh", 0o755)
    (entry,) = only_task(load(tmp_path, with_file(localpath="run.sh"))).files

    assert entry.content == "echo {{output}} {% if %}\n"
    assert not entry.tokens
    assert entry.mode == 0o755


def test_a_local_file_of_any_bytes_is_kept(tmp_path):
    (tmp_path / "x.bin").write_bytes(bytes(range(256)))
    (entry,) = only_task(load(tmp_path, with_file(localpath="x.bin"))).files

    assert entry.is_base64
    assert base64.b64decode(entry.content) == bytes(range(256))


def test_a_local_template_gets_the_values(tmp_path):
    (tmp_path / "run.sh").write_text("--lr {{ lr }} {{output}}")
    body = with_file(localpath="run.sh", templated="true")
    loaded = load(tmp_path, body, sets=["lr=3"])

    assert only_task(loaded).files[0].content == "--lr 3 {{output}}"
    assert loaded.warnings == [], "the local template uses the value"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"localpath": "no.sh"}, "there is no file `no.sh`"),
        ({"localpath": "."}, "`.` is a folder"),
        ({"contents": "'###'", "base64": "true"}, "not base64"),
    ],
)
def test_a_file_that_can_t_be_had_is_an_error_at_its_key(tmp_path, keys, words):
    error = one(load(tmp_path, with_file(**keys)).errors, words)

    assert "train.yaml:7:" in error.where


def test_too_large_a_local_file_is_refused(tmp_path):
    with open(tmp_path / "x.bin", "wb") as file:
        file.truncate(17 << 20)

    assert one(load(tmp_path, with_file(localpath="x.bin")).errors, "too large")


def test_a_script_beside_the_file_becomes_absolute(tmp_path):
    (tmp_path / "train.py").write_text("")
    body = "tasks: [{name: a, script: train.py, nodes: 2:4, nproc_per_node: gpu, args: [x]}]\n"
    task = only_task(load(tmp_path, body))

    assert task.training.script == str(tmp_path / "train.py")
    assert (task.training.nodes, task.num_nodes) == ("2:4", 4)
    assert (task.command, task.training.args) == ((), ("x",))


def test_a_script_that_is_not_there_has_a_near_miss(tmp_path):
    (tmp_path / "train.py").write_text("")
    body = "tasks: [{name: a, script: trian.py}]\n"

    assert one(load(tmp_path, body).errors, "there is no script").fix == "did you mean `train.py`?"


def test_a_script_among_the_task_s_files_is_not_looked_for_here(tmp_path):
    body = "tasks: [{name: a, script: /tmp/x.py, files: [{path: /tmp/x.py, contents: a}]}]\n"

    assert only_task(load(tmp_path, body)).training.script == "/tmp/x.py"
