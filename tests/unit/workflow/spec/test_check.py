import pytest

from torchmuster.launcher.spec.scalars import FileProblems
from torchmuster.workflow.spec.check import check_workflow, is_label_key, is_label_value
from unit.workflow.spec.workflow_files import one


def check(workflow):
    found = FileProblems()
    check_workflow(workflow, found)
    return found


def findings(*groups, **keys):
    """Check groups that are given as lists of tasks."""
    named = [{"name": f"g{i}", "tasks": tasks} for i, tasks in enumerate(groups)]
    return check({"name": "digits", "groups": named, **keys})


def findings_of(**keys):
    """Check a workflow of a task with these keys."""
    return check({"name": "digits", "tasks": [a_task("a", **keys)]})


def a_task(name, *words, reads=(), **keys):
    return {"name": name, "command": ["x", *words], "inputs": [{"task": t} for t in reads], **keys}


def test_a_right_workflow_has_no_findings():
    found = findings([a_task("a", lead=True), a_task("b")])

    assert (found.errors, found.warnings) == ([], [])


def test_a_wrong_type_in_one_place_hides_no_mistake_in_another():
    found = findings([a_task("a", "{{input:0}}", inputs=7)], labels=5, resources=[])

    assert one(found, "names an input, but").path[-2:] == ("command", 1)


@pytest.mark.parametrize(
    "names", [("a", "a"), ("Train_1", "train-1"), ("a", "a-group")], ids=lambda names: names[1]
)
def test_two_tasks_can_t_have_one_name(names):
    found = check({"name": "w", "tasks": [a_task(name) for name in names]})

    assert len(found.errors) == 1


def test_a_task_can_t_have_the_name_of_its_group():
    found = findings([a_task("G0")])

    path = ("workflow", "groups", 0, "tasks", 0, "name")
    assert one(found.errors, "have the same name").path == path


@pytest.mark.parametrize(("leads", "words"), [([], "no lead"), ([0, 1], "2 leads")])
def test_a_group_of_several_has_one_lead(leads, words):
    tasks = [a_task(f"t{i}", lead=i in leads) for i in range(2)]

    assert one(findings(tasks), words)


def test_a_lead_in_words_counts():
    tasks = [a_task("a", lead="yes"), a_task("b", lead="no")]

    assert findings(tasks).errors == []


@pytest.mark.parametrize(
    "codes",
    [{"FAIL": "1-5", "RESCHEDULE": "5-9"}, {"FAIL": 3, "COMPLETE": "1,3"}, {"FAIL": "1-3,2"}],
)
def test_an_exit_code_has_one_action(codes):
    assert one(findings_of(exitActions=codes).errors, "exit code")


def test_exit_codes_side_by_side_do_not_overlap():
    found = findings_of(exitActions={"FAIL": "1-4", "reschedule": "5-9,3001"})

    assert (found.errors, found.warnings) == ([], [])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kpis", [{"index": "a", "path": "b"}]),
        ("cacheSize", "1Gi"),
        ("privileged", True),
        ("hostNetwork", "yes"),
        ("volumeMounts", ["/a"]),
        ("backend", "k8s"),
    ],
)
def test_a_key_without_effect_is_a_warning(key, value):
    found = findings_of(**{key: value})

    assert found.errors == []
    assert one(found.warnings, f"`{key}` has no effect").why


@pytest.mark.parametrize("key", ["privileged", "hostNetwork"])
def test_a_flag_that_asks_for_nothing_is_no_warning(key):
    assert findings_of(**{key: False}).warnings == []


@pytest.mark.parametrize("key", ["platform", "nodesExcluded", "topology"])
def test_a_wish_for_certain_nodes_is_a_warning(key):
    found = findings([a_task("a")], resources={"default": {key: ["n1"]}})

    assert one(found.warnings, f"`{key}` has no effect")


def test_files_can_t_share_a_place():
    paths = ["/tmp/a", "/tmp//a", "/tmp/a/b", "c/d", "c"]
    found = findings_of(files=[{"path": path, "contents": ""} for path in paths])

    assert [error.path[-2] for error in found.errors] == [1, 2, 4]


@pytest.mark.parametrize("key", ["team", "example.com/team", "a.b_c-d", "a" * 63])
def test_keys_of_labels_are_taken(key):
    assert is_label_key(key)


@pytest.mark.parametrize("key", ["", "a b", "-a", "a" * 64, "/a", "a/b/c"])
def test_other_keys_of_labels_are_refused(key):
    assert not is_label_key(key)


def test_a_value_of_a_label_is_not_empty():
    assert is_label_value("vision")
    assert not is_label_value("")


@pytest.mark.parametrize("raw", [None, [], "tasks", 5])
def test_a_workflow_is_a_map(raw):
    assert one(check(raw), "expected a map")


@pytest.mark.parametrize("token", ["{{host:b}}", "{{ host:b }}", "{{ip:a}}", "{{output}}"])
def test_a_token_of_the_same_group_is_right(token):
    assert findings([a_task("a", token, lead=True), a_task("b")]).errors == []


def test_a_host_of_another_group_is_refused_because_it_runs_at_another_time():
    error = one(findings([a_task("a")], [a_task("b", "{{host:a}}")]), "names no task of this group")

    assert "another group" in error.why


def test_an_unknown_host_is_refused_with_a_near_miss():
    error = one(findings([a_task("master", "{{host:mastr}}")]), "names no task of this group")

    assert error.fix == "did you mean `master`?"


@pytest.mark.parametrize("token", ["{{input:0}}", "{{input:a}}", "{{ input:0 }}"])
def test_an_input_has_a_number_and_a_name(token):
    assert findings([a_task("a")], [a_task("b", token, reads=["a"])]).errors == []


@pytest.mark.parametrize("token", ["{{input:1}}", "{{input:9}}", "{{input:x}}", "{{input:-1}}"])
def test_an_input_that_is_not_there_is_refused(token):
    assert one(findings([a_task("a")], [a_task("b", token, reads=["a"])]), "names no input")


def test_tokens_are_found_at_any_depth():
    files = [{"path": "/tmp/a", "contents": "a\n{{input:0}}"}]

    error = one(findings([a_task("a", files=files)]), "names an input")
    assert error.path[-3:] == ("files", 0, "contents")


def test_an_unknown_task_is_refused_with_a_near_miss():
    error = one(findings([a_task("prepare")], [a_task("b", reads=["prepar"])]), "there is no task")

    assert error.fix == "did you mean `prepare`?"


def test_the_task_of_another_run_is_not_looked_for():
    assert findings([a_task("a", reads=["digits-7:train"])]).errors == []


def test_a_task_that_comes_later_is_a_warning_alone():
    found = findings([a_task("a", reads=["b"])], [a_task("b")])

    assert found.errors == []
    assert one(found.warnings, "comes later in the file")


def test_a_circle_is_refused_and_shown():
    found = findings(*([a_task(name, reads=[of])] for name, of in ("ac", "ba", "cb")))

    error = one(found.errors, "wait for each other")
    assert error.what.count("->") == 3


@pytest.mark.parametrize("reads", ["a", "b"])
def test_a_task_can_t_read_from_its_own_group(reads):
    found = findings([a_task("a", reads=[reads], lead=True), a_task("b")])

    assert len(found.errors) == 1


def test_an_unknown_resource_is_refused_with_a_near_miss():
    found = findings([a_task("a", resource="big_gpu")], resources={"default": {}, "big-gpu": {}})

    assert one(found, "there is no resource").fix == "did you mean `big-gpu`?"


def test_resources_without_a_default_need_a_name():
    assert one(findings([a_task("a")], resources={"big": {}}).errors, "names no `resource`")


def test_a_resource_that_no_task_uses_is_a_warning():
    found = findings([a_task("a")], resources={"default": {}, "big": {}})

    assert found.errors == []
    assert one(found.warnings, "no task uses the resource `big`")
