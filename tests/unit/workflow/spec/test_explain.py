import pytest

from torchmuster.launcher.spec.scalars import FileProblems, show_path
from torchmuster.workflow.spec.schema import validate
from unit.workflow.spec.workflow_files import one


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
