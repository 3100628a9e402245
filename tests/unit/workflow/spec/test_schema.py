import pytest
from pydantic import ValidationError

from torchmuster.launcher.spec.scalars import FileProblems, show_path
from torchmuster.workflow.spec.schema import Workflow, validate
from unit.workflow.spec.workflow_files import one

EVERY_KEY = {
    "name": "my-run",
    "labels": {"team": "vision"},
    "timeout": {"exec_timeout": "8h", "queue_timeout": "6h"},
    "resources": {
        "default": {
            "cpu": "8",
            "gpu": 4,
            "memory": "64Gi",
            "storage": "100Gi",
            "platform": "dgx-h100",
            "nodesExcluded": ["node-7"],
            "topology": [{"key": "rack", "group": "default", "requirementType": "required"}],
        }
    },
    "groups": [
        {
            "name": "training",
            "barrier": "no",
            "ignoreNonleadStatus": True,
            "tasks": [
                {
                    "name": "master",
                    "lead": True,
                    "image": "registry/repo:tag",
                    "command": ["bash"],
                    "args": ["/tmp/run.sh", 1, 0.5],
                    "environment": {"NCCL_DEBUG": "WARN", "N": 1, "B": True},
                    "credentials": {"wandb": {"KEY": "key"}, "github": "/tmp/github"},
                    "resource": "default",
                    "inputs": [
                        {"task": "prep", "regex": r".*\.pt$"},
                        {"url": "s3://bucket/data", "regex": ""},
                        {"dataset": {"name": "mnist:latest", "localpath": "data"}},
                    ],
                    "outputs": [
                        {"url": "s3://bucket/run/{{workflow_id}}/"},
                        {"dataset": {"name": "mnist", "path": "a", "labels": ["a=b"]}},
                        {"update_dataset": {"name": "mnist", "paths": ["a", "b"]}},
                    ],
                    "files": [
                        {"path": "/tmp/run.sh", "contents": "...", "base64": False},
                        {"path": "/tmp/train.py", "localpath": "train.py", "templated": True},
                    ],
                    "checkpoint": [{"path": "/tmp/ckpt", "url": "s3://b/ckpt", "frequency": "10m"}],
                    "exitActions": {"COMPLETE": "0", "RESCHEDULE": "3,3001", "FAIL": "1-2"},
                    "privileged": False,
                    "hostNetwork": False,
                    "volumeMounts": ["/dev/shm", "/opt:/home/opt"],
                    "downloadType": "download",
                    "cacheSize": "50%",
                    "kpis": [{"index": "loss", "path": "loss.json"}],
                    "max_retries": 2,
                }
            ],
        }
    ],
}


def test_every_key_of_the_format_is_taken():
    workflow = Workflow.model_validate(EVERY_KEY)
    task = workflow.groups[0].tasks[0]

    assert not workflow.groups[0].barrier
    assert workflow.resources["default"].cpu == 8
    assert task.args == ["/tmp/run.sh", "1", "0.5"]
    assert task.environment == {"NCCL_DEBUG": "WARN", "N": "1", "B": "True"}
    assert task.credentials == {"wandb": {"KEY": "key"}, "github": "/tmp/github"}


@pytest.mark.parametrize("path", [(), ("groups", 0), ("groups", 0, "tasks", 0), ("timeout",)])
def test_an_unknown_key_is_an_error_at_every_level(path):
    def changed(value, rest):
        if not rest:
            return {**value, "no_such_key": 1}
        if isinstance(value, list):
            return [changed(value[0], rest[1:])]
        return {**value, rest[0]: changed(value[rest[0]], rest[1:])}

    with pytest.raises(ValidationError) as caught:
        Workflow.model_validate(changed(EVERY_KEY, path))

    assert caught.value.errors()[0]["loc"] == (*path, "no_such_key")


def test_all_wrong_values_are_reported_together():
    with pytest.raises(ValidationError) as caught:
        Workflow.model_validate(
            {"name": "-", "timeout": {"exec_timeout": -1}, "resources": {"a": {"cpu": 0.5}}}
        )

    assert len(caught.value.errors()) == 3


def findings(**keys):
    """Validate a task with these keys."""
    found = FileProblems()
    task = {"name": "a", "command": ["x"], **keys}
    assert validate({"name": "w", "tasks": [task]}, found) is None
    return found


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("env", "did you mean `environment`?"),
        ("exit_actions", "did you mean `exitActions`?"),
        ("comand", "did you mean `command`?"),
        ("exec_timeout", "`exec_timeout` belongs into `timeout`"),
    ],
)
def test_an_unknown_key_has_a_near_miss_or_its_right_place(key, hint):
    assert one(findings(**{key: 1}), f"unknown key `{key}`").fix == hint


@pytest.mark.parametrize("key", ["cpu", "gpus", "memory"])
def test_the_size_of_a_task_belongs_into_its_resource(key):
    assert "workflow.resources" in one(findings(**{key: 1}), "unknown key").fix


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"credentials": {"a": [1]}}, "workflow.tasks[0].credentials.a"),
        ({"credentials": {"a": {"B": []}}}, "workflow.tasks[0].credentials.a.B"),
        ({"environment": {"a b": "x"}}, "workflow.tasks[0].environment.a b"),
        ({"environment": {"A": None}}, "workflow.tasks[0].environment.A"),
        ({"args": ["a", True]}, "workflow.tasks[0].args[1]"),
        ({"inputs": [{"dataset": {"name": "-/-/-"}}]}, "workflow.tasks[0].inputs[0].dataset.name"),
    ],
)
def test_a_finding_has_the_path_of_the_file_and_nothing_of_the_schema(keys, path):
    (error,) = findings(**keys).errors

    assert show_path(error.path) == path


def test_a_missing_key_is_told_at_what_lacks_it():
    error = one(findings(checkpoint=[{"path": "a", "url": "s3://b/c"}]), "`frequency` is missing")

    assert error.path == ("workflow", "tasks", 0, "checkpoint", 0)


@pytest.mark.parametrize(
    ("keys", "hint"),
    [
        ({"inputs": ["prepare"]}, "- task: prepare"),
        ({"inputs": ["s3://b/c"]}, "- url: s3://b/c"),
        ({"inputs": [{"dataset": "mnist"}]}, "{name: mnist}"),
        ({"inputs": {"task": "a"}}, "begin each entry with `- `"),
        ({"environment": ["A=b"]}, "write `key: value`, without `- `"),
    ],
)
def test_a_word_in_place_of_a_map_is_shown_as_the_map(keys, hint):
    (error,) = findings(**keys).errors

    assert error.fix == hint
