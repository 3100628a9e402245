import pytest

from torchmuster.launcher.spec.scalars import FileProblems
from torchmuster.workflow.spec.check import check_workflow, is_label_key, is_label_value
from unit.workflow.spec.workflow_files import one


def findings(*, top=None, groups=None, **keys):
    """Check a workflow; by default one of a bare task with these keys."""
    found = FileProblems()
    body = {"groups": groups} if groups else {"tasks": [{"name": "a", "command": ["x"], **keys}]}
    check_workflow({"name": "digits", **body, **(top or {})}, found)
    return found


def a_task(name, **keys):
    return {"name": name, "command": ["x"], **keys}


def test_a_right_workflow_has_no_findings():
    found = findings(groups=[{"name": "g", "tasks": [a_task("a", lead=True), a_task("b")]}])

    assert (found.errors, found.warnings) == ([], [])


def test_a_wrong_type_in_one_place_hides_no_mistake_in_another():
    found = findings(top={"labels": 5, "resources": []}, inputs=7, args=["{{input:0}}"])

    assert one(found, "names an input, but").path[-2:] == ("args", 0)


@pytest.mark.parametrize(
    "names", [("a", "a"), ("Train_1", "train-1"), ("a", "a-group")], ids=lambda names: names[1]
)
def test_two_tasks_can_t_have_one_name(names):
    found = FileProblems()
    check_workflow({"name": "w", "tasks": [a_task(name) for name in names]}, found)

    assert len(found.errors) == 1


def test_a_task_can_t_have_the_name_of_its_group():
    found = findings(groups=[{"name": "train", "tasks": [a_task("Train")]}])

    assert one(found.errors, "have the same name").path == (
        *("workflow", "groups", 0, "tasks", 0, "name"),
    )


@pytest.mark.parametrize(("leads", "words"), [([], "no lead"), ([0, 1], "2 leads")])
def test_a_group_of_several_has_one_lead(leads, words):
    tasks = [a_task(f"t{i}", lead=i in leads) for i in range(2)]

    assert one(findings(groups=[{"name": "g", "tasks": tasks}]), words)


def test_a_lead_in_words_counts():
    tasks = [a_task("a", lead="yes"), a_task("b", lead="no")]

    assert findings(groups=[{"name": "g", "tasks": tasks}]).errors == []


@pytest.mark.parametrize(
    "codes",
    [{"FAIL": "1-5", "RESCHEDULE": "5-9"}, {"FAIL": 3, "COMPLETE": "1,3"}, {"FAIL": "1-3,2"}],
)
def test_an_exit_code_has_one_action(codes):
    assert one(findings(exitActions=codes).errors, "exit code")


def test_exit_codes_side_by_side_do_not_overlap():
    found = findings(exitActions={"FAIL": "1-4", "reschedule": "5-9,3001"})

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
    found = findings(**{key: value})

    assert found.errors == []
    assert one(found.warnings, f"`{key}` has no effect").why


@pytest.mark.parametrize("key", ["privileged", "hostNetwork"])
def test_a_flag_that_asks_for_nothing_is_no_warning(key):
    assert findings(**{key: False}).warnings == []


@pytest.mark.parametrize("key", ["platform", "nodesExcluded", "topology"])
def test_a_wish_for_certain_nodes_is_a_warning(key):
    found = findings(top={"resources": {"default": {key: ["n1"]}}})

    assert one(found.warnings, f"`{key}` has no effect")


def test_files_can_t_share_a_place():
    paths = ["/tmp/a", "/tmp//a", "/tmp/a/b", "c/d", "c"]
    found = findings(files=[{"path": path, "contents": ""} for path in paths])

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
    found = FileProblems()
    check_workflow(raw, found)

    assert one(found, "expected a map")
