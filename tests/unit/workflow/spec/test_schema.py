import pytest
from pydantic import ValidationError

from torchmuster.workflow.spec.schema import Workflow

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
