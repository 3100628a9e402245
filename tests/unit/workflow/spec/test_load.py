import pytest

from torchmuster.errors import ManyErrors, UsageError
from torchmuster.workflow.spec.load import (
    LoadOptions,
    list_values,
    load_workflow,
    plan_workflow,
    read_source,
    render_workflow,
)
from unit.workflow.spec.workflow_files import ONE_TASK, load, one

TEMPLATE = """\
default-values:
  n_nodes: 2  # how many nodes
workflow:
  name: digits
  tasks:
{% for i in range(n_nodes) %}
  - name: t{{i}}
    command: [x]
    comand: [y]
{% endfor %}
"""


def write(folder, text):
    path = folder / "train.yaml"
    path.write_text(text)
    return str(path)


def test_errors_come_in_the_order_of_the_file_each_once(tmp_path):
    body = "timeout: {exec_timeout: -1}\ntasks:\n- name: 1a\n  command: []\n  gpus: 1\n"
    places = [int(error.where.split(":")[1]) for error in load(tmp_path, body).errors]

    assert places == [3, 5, 6, 7]


def test_an_error_behind_a_template_is_at_the_line_that_the_user_wrote(tmp_path):
    errors = load_workflow(LoadOptions(path=write(tmp_path, TEMPLATE))).errors

    assert len(errors) == 2
    assert all(f"{tmp_path}/train.yaml:9:5" in error.where for error in errors)
    assert errors[1].where.endswith("workflow.tasks[1].comand")


def test_a_file_with_very_many_problems_shows_the_first_and_counts_the_rest(tmp_path):
    body = ONE_TASK + "".join(f"  key{i}: 1\n" for i in range(500))
    errors = load(tmp_path, body).errors

    assert len(errors) == 201
    assert "300 more" in errors[-1].what


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"set_env": ["1A=x"]}, "not a valid name of an environment variable"),
        ({"set_env": ["A"]}, "has no value"),
        ({"labels": ["team"]}, "has no value"),
        ({"labels": ["a b=c"]}, "key of a label"),
        ({"labels": ["a=b c"]}, "value of a label"),
        ({"sets": ["a-b=1"]}, "not a valid name of a value"),
    ],
)
def test_a_wrong_word_of_the_command_line_is_an_error_of_the_option(tmp_path, options, words):
    error = one(load(tmp_path, ONE_TASK, **options).errors, words)

    assert error.where.startswith("--")


def test_wrong_options_and_a_wrong_file_are_told_together(tmp_path):
    errors = load(tmp_path, "tasks: 5\n", set_env=["A"], labels=["team"]).errors

    assert len(errors) == 3
    assert "expected a list" in errors[-1].what


def test_variables_and_labels_of_the_command_line_win(tmp_path):
    body = "labels: {team: a, b: c}\n" + ONE_TASK + "  environment: {A: x, B: y}\n"
    loaded = load(tmp_path, body, set_env=["A=1=2"], labels=["team=z"])

    assert loaded.groups[0].tasks[0].environment == {"A": "1=2", "B": "y"}
    assert loaded.labels == {"team": "z", "b": "c"}


def test_a_value_without_use_is_a_warning_and_no_error(tmp_path):
    loaded = load(tmp_path, ONE_TASK, sets=["n_nodes=4"])

    assert loaded.errors == []
    assert one(loaded.warnings, "never uses `n_nodes`")


def test_a_missing_file_has_a_near_miss(tmp_path):
    write(tmp_path, "")
    with pytest.raises(UsageError, match="does not exist") as caught:
        read_source(str(tmp_path / "trian.yaml"))

    assert caught.value.fix == f"did you mean `{tmp_path}/train.yaml`?"


@pytest.mark.parametrize("data", [b"\xff\xfe", b"a: \x80"])
def test_a_file_that_is_no_text_is_refused(tmp_path, data):
    (tmp_path / "train.yaml").write_bytes(data)
    with pytest.raises(UsageError, match="not UTF-8 text") as caught:
        read_source(str(tmp_path / "train.yaml"))

    assert caught.value.where == f"{tmp_path}/train.yaml:1"


def test_a_huge_file_is_refused(tmp_path):
    write(tmp_path, "#" * (5 << 20))
    with pytest.raises(UsageError, match="larger than 4 MiB"):
        read_source(str(tmp_path / "train.yaml"))


def test_the_values_of_a_file_have_their_help(tmp_path):
    (value,) = list_values(write(tmp_path, TEMPLATE))

    assert (value.name, value.value, value.help) == ("n_nodes", 2, "how many nodes")


def test_rendering_stops_with_every_problem(tmp_path):
    text = "workflow:\n  name: {{a}}\n  pool: {{b}}\n"
    with pytest.raises(ManyErrors) as caught:
        render_workflow(LoadOptions(path=write(tmp_path, text)))

    assert len(caught.value.errors) == 2


def test_rendering_does_not_check_what_comes_out(tmp_path):
    text, warnings = render_workflow(
        LoadOptions(path=write(tmp_path, TEMPLATE), sets=["n_nodes=1"])
    )

    assert text.count("comand") == 1
    assert warnings == []


def test_a_plan_names_the_file_and_its_folder(tmp_path):
    plan = plan_workflow(load(tmp_path, ONE_TASK), "r", grace_s=7.0)

    assert (plan.run_id, plan.name, plan.grace_s) == ("r", "digits", 7)
    assert (plan.spec_path, plan.cwd) == (str(tmp_path / "train.yaml"), str(tmp_path))
