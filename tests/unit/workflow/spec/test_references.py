import pytest

from torchmuster.launcher.spec.scalars import FileProblems
from torchmuster.workflow.spec.check import check_workflow
from unit.workflow.spec.workflow_files import one


def findings(*groups, **top):
    """Check groups that are given as lists of tasks."""
    named = [{"name": f"g{i}", "tasks": tasks} for i, tasks in enumerate(groups)]
    found = FileProblems()
    check_workflow({"name": "digits", "groups": named, **top}, found)
    return found


def task(name, *words, reads=(), **keys):
    return {"name": name, "command": ["x", *words], "inputs": [{"task": t} for t in reads], **keys}


@pytest.mark.parametrize("token", ["{{host:b}}", "{{ host:b }}", "{{ip:a}}", "{{output}}"])
def test_a_token_of_the_same_group_is_right(token):
    assert findings([task("a", token, lead=True), task("b")]).errors == []


def test_a_host_of_another_group_is_refused_because_it_runs_at_another_time():
    error = one(findings([task("a")], [task("b", "{{host:a}}")]), "names no task of this group")

    assert "another group" in error.why


def test_an_unknown_host_is_refused_with_a_near_miss():
    error = one(findings([task("master", "{{host:mastr}}")]), "names no task of this group")

    assert error.fix == "did you mean `master`?"


@pytest.mark.parametrize("token", ["{{input:0}}", "{{input:a}}", "{{ input:0 }}"])
def test_an_input_has_a_number_and_a_name(token):
    assert findings([task("a")], [task("b", token, reads=["a"])]).errors == []


@pytest.mark.parametrize("token", ["{{input:1}}", "{{input:9}}", "{{input:x}}", "{{input:-1}}"])
def test_an_input_that_is_not_there_is_refused(token):
    assert one(findings([task("a")], [task("b", token, reads=["a"])]), "names no input")


def test_tokens_are_found_at_any_depth():
    files = [{"path": "/tmp/a", "contents": "a\n{{input:0}}"}]

    assert one(findings([task("a", files=files)]), "names an input").path[-3:] == (
        *("files", 0, "contents"),
    )


def test_an_unknown_task_is_refused_with_a_near_miss():
    error = one(findings([task("prepare")], [task("b", reads=["prepar"])]), "there is no task")

    assert error.fix == "did you mean `prepare`?"


def test_the_task_of_another_run_is_not_looked_for():
    assert findings([task("a", reads=["digits-7:train"])]).errors == []


def test_a_task_that_comes_later_is_a_warning_alone():
    found = findings([task("a", reads=["b"])], [task("b")])

    assert found.errors == []
    assert one(found.warnings, "comes later in the file")


def test_a_circle_is_refused_and_shown():
    error = one(
        findings(
            [task("a", reads=["c"])], [task("b", reads=["a"])], [task("c", reads=["b"])]
        ).errors,
        "wait for each other",
    )

    assert error.what.count("->") == 3


@pytest.mark.parametrize("reads", ["a", "b"])
def test_a_task_can_t_read_from_its_own_group(reads):
    found = findings([task("a", reads=[reads], lead=True), task("b")])

    assert len(found.errors) == 1


def test_an_unknown_resource_is_refused_with_a_near_miss():
    found = findings([task("a", resource="big_gpu")], resources={"default": {}, "big-gpu": {}})

    assert one(found, "there is no resource").fix == "did you mean `big-gpu`?"


def test_resources_without_a_default_need_a_name():
    assert one(findings([task("a")], resources={"big": {}}).errors, "names no `resource`")


def test_a_resource_that_no_task_uses_is_a_warning():
    found = findings([task("a")], resources={"default": {}, "big": {}})

    assert found.errors == []
    assert one(found.warnings, "no task uses the resource `big`")
