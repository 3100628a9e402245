"""No workflow file, however odd, makes the loader raise anything but our own errors, or think for long."""

import contextlib
import json
import os

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kit.tables import words
from kit.work import num_calls
from torchmuster.core.model import codec
from torchmuster.errors import ManyErrors, MusterError
from torchmuster.workflow.plan import WorkflowPlan
from torchmuster.workflow.spec import load as template
from torchmuster.workflow.spec import schema
from torchmuster.workflow.spec.load import LoadOptions, load_workflow, plan_workflow

LIMIT_S = 25.0  # of processors; each file takes about one, and what is refused for its size would take minutes
COMMAND = {"name": "train", "command": ["python", "train.py"]}

TOKENS = st.sampled_from(
    ["{{output}}", "{{input:0}}", "{{input:9}}", "{{ host:a }}", "{{host:}}", "{{input:t{{x}}}}"]
)
WORDS = st.sampled_from(
    [
        *words("a train train-group - ../x /etc/passwd s3://b/k true 1 -5m 1h 64Gi 1e999 ٣ 1-2,3"),
        *words("2:4 gpu COMPLETE default ( (a+)+$ mnist:latest"),
        *("", "a b", "9" * 5000, "\0", "\ud7ff", "x" * 3000, "e\u0301", "\U0001f600"),
    ]
)
NUMBERS = st.sampled_from([0, 1, -1, 2**63, 10**40, 16**3500, 0.5, 1e308, float("inf"), -0.0])
SCALARS = st.none() | st.booleans() | WORDS | TOKENS | NUMBERS | st.text(max_size=8)
MODELS = [one for one in vars(schema).values() if isinstance(one, type)]
KEYS = st.sampled_from(sorted({key for one in MODELS for key in getattr(one, "model_fields", ())}))
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | WORDS, inner, max_size=5),
    max_leaves=12,
)


def nearly(good, wrong=ANYTHING):
    """Return a strategy that is right five times out of six."""
    return st.integers(0, 5).flatmap(lambda n: wrong if n == 0 else good)


NAMES = nearly(st.sampled_from(["a", "b", "c", "d", "e", "f", "g"]))
INPUTS = st.fixed_dictionaries({}, optional={"task": NAMES, "url": nearly(st.just("s3://b/k"))})
FILES = st.fixed_dictionaries(
    {"path": nearly(st.sampled_from(["/tmp/a", "b", "b/c"]))},
    optional={"contents": nearly(st.just("x")), "base64": ANYTHING, "localpath": WORDS},
)
TASKS = st.fixed_dictionaries(
    {"name": NAMES, "command": nearly(st.just(["python"]))},
    optional={
        "args": nearly(st.lists(SCALARS, max_size=3)),
        "lead": nearly(st.booleans()),
        "environment": nearly(st.dictionaries(WORDS, SCALARS, max_size=3)),
        "credentials": ANYTHING,
        "inputs": nearly(st.lists(nearly(INPUTS), max_size=3)),
        "outputs": nearly(st.lists(nearly(INPUTS), max_size=2)),
        "files": nearly(st.lists(nearly(FILES), max_size=3)),
        "exitActions": nearly(st.dictionaries(WORDS, SCALARS, max_size=3)),
        "checkpoint": ANYTHING,
        "resource": nearly(st.just("default")),
        "script": WORDS,
        "nodes": SCALARS,
        "nproc_per_node": SCALARS,
        "volumeMounts": ANYTHING,
    },
)
GROUPS = st.fixed_dictionaries({"name": NAMES, "tasks": st.lists(TASKS, max_size=3)})
WORKFLOWS = st.fixed_dictionaries(
    {"name": NAMES},
    optional={
        "tasks": nearly(st.lists(nearly(TASKS), max_size=3)),
        "groups": nearly(st.lists(nearly(GROUPS), max_size=3)),
        "labels": nearly(st.dictionaries(WORDS, SCALARS, max_size=3)),
        "resources": nearly(st.dictionaries(WORDS, ANYTHING, max_size=2)),
        "timeout": ANYTHING,
        "pool": ANYTHING,
    },
)
fuzz = settings(
    max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def load(folder, text):
    """Load a text as a workflow file."""
    path = folder / "train.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    return load_workflow(LoadOptions(path=str(path)))


def dump(workflow):
    """Return a workflow as YAML; JSON is YAML, and quick to write."""
    return f"workflow:\n  {json.dumps(workflow)}\n"


def check(loaded):
    """A file has errors, each with a place, or a plan that survives being written and read."""
    for error in [*loaded.errors, *loaded.warnings]:
        assert isinstance(error, MusterError)
        assert error.what
        assert error.where
        assert "Traceback" not in error.what
    if not loaded.errors:
        plan = plan_workflow(loaded, "r")
        written = json.dumps(codec.to_plain(plan), allow_nan=False)
        assert codec.from_plain(WorkflowPlan, json.loads(written)) == plan


@fuzz
@given(WORKFLOWS)
@example({"name": "a", "tasks": 5})
@example({"name": "a", "groups": [{"name": "b", "tasks": 5}]})
@example({"name": "a", "groups": [{"name": 10**4000, "tasks": [{"name": [1]}]}]})
@example({"name": "a", "resources": {"b": {}}, "tasks": [{**COMMAND, "resource": ["b"]}]})
@example({"name": "a", "tasks": [{**COMMAND, "exitActions": {"RETRY": 1, "FAIL": 10**4000}}]})
@example({"name": "a", "tasks": [{**COMMAND, "volumeMounts": 7, "args": [10**4000]}]})
@example({"name": "a", "tasks": [{**COMMAND, "inputs": {"a": 1}, "files": [[], None]}]})
def test_no_structure_of_values_is_more_than_an_error(tmp_path, workflow):
    text = yaml.safe_dump({"workflow": workflow})
    with contextlib.suppress(MusterError, ManyErrors):
        check(load(tmp_path, text))


PIECES = st.sampled_from(
    [
        *words("workflow: tasks: { } [ ] {{ }} {% %} {# | > &a *a ' # default-values: {{output}}"),
        *words('" --- 0xffffffffffffffffffffffffffffffff 2026-99-99 .inf'),
        *("\n", "  ", "- ", "name: a", "<<: ", "!!int ", "\t", ": ", "\r", "version: 2", "\ufeff"),
        *("command: [a]", "\x85", "? ", "\u2028", "for x in y"),
    ]
)


@fuzz
@given(st.lists(PIECES | st.text(max_size=5), max_size=25).map("".join))
def test_no_text_is_more_than_an_error(tmp_path, text):
    with contextlib.suppress(MusterError, ManyErrors):
        check(load(tmp_path, text))


@fuzz
@given(st.binary(max_size=60))
def test_no_bytes_are_more_than_an_error(tmp_path, data):
    with contextlib.suppress(MusterError, ManyErrors):
        check(load(tmp_path, data))


@st.composite
def right_workflows(draw):
    """Draw a workflow without a mistake: every task reads from groups that stand before its own."""
    groups: list[dict] = []
    before: list[str] = []
    for i in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 3))
        tasks = []
        for j in range(size):
            inputs = draw(st.lists(st.sampled_from(before), max_size=2)) if before else []
            command = ["a", *[f"{{{{input:{n}}}}}" for n in range(len(inputs))]]
            last = draw(st.text("aé{}: #", max_size=5))
            value = draw(st.booleans() | st.integers(-(10**20), 10**20) | st.text("ab"))
            one = {
                "name": f"t{i}-{j}",
                "command": [*command, f"{{{{host:t{i}-0}}}}", last],
                "inputs": [{"task": name} for name in inputs],
                "outputs": [{"url": "s3://b/{{workflow_id}}"}] * draw(st.integers(0, 1)),
                "environment": {"A": value},
                "exitActions": {"RESCHEDULE": draw(st.sampled_from([3, "3,10-20"]))},
            }
            tasks.append(one | ({"lead": True} if j == 0 and size > 1 else {}))
        groups.append({"name": f"g{i}", "tasks": tasks})
        before += [task["name"] for task in tasks]
    return {"name": "right", "groups": groups}


@fuzz
@given(right_workflows())
def test_a_workflow_without_a_mistake_has_a_plan_that_survives_its_file(tmp_path, workflow):
    text = "default-values:\n" + yaml.safe_dump({"workflow": workflow})
    if "{" in "".join(t["command"][-1] for g in workflow["groups"] for t in g["tasks"]):
        text = text.replace("workflow:", "workflow:\n  {% raw %}", 1) + "\n  {% endraw %}\n"
    loaded = load(tmp_path, text)

    assert loaded.errors == []
    assert [group.name for group in loaded.groups] == [g["name"] for g in workflow["groups"]]
    check(loaded)


def task(**keys):
    """Return a file of one task with these keys."""
    return dump({"name": "digits", "tasks": [{**COMMAND, **keys}]})


HEAD = "workflow:\n  name: digits\n  tasks:\n  - name: train\n    command: [a]\n"
CHECKPOINT = {"url": "s3://b/c", "frequency": "10m"}
HOSTILE = {
    "a_walk_to_the_globals": HEAD + "    args: ['{{ range.__globals__ }}']\n",
    "a_file_that_climbs": task(files=[{"path": "../../etc/cron.d/x", "contents": "x"}]),
    "a_file_of_the_kernel": task(files=[{"path": "/proc/self/mem", "contents": "x"}]),
    "an_absolute_dataset_output": task(outputs=[{"dataset": {"name": "d", "path": "/etc"}}]),
    "an_absolute_update": task(outputs=[{"update_dataset": {"name": "d", "paths": ["/etc/x"]}}]),
    "an_output_that_climbs": task(outputs=[{"dataset": {"name": "d", "path": "../../x"}}]),
    "a_url_that_climbs": task(outputs=[{"url": "s3://bucket/../other"}]),
    "a_dataset_name_that_climbs": task(inputs=[{"dataset": {"name": "../../x"}}]),
    "a_checkpoint_that_climbs": task(checkpoint=[{**CHECKPOINT, "path": "../.."}]),
    "many_exit_codes": task(exitActions={"FAIL": ",".join(["1"] * 200_000)}),
    "a_huge_number": HEAD + f"    max_retries: 0x{'f' * 100_000}\n",
    "many_unknown_hosts": task(args=[f"{{{{host:t{i}}}}}" for i in range(20_000)]),
    "many_unknown_keys": task(**{f"key{i}": i for i in range(5_000)}),
}


def spent_s():
    """Return the seconds of processors that this process and the templates' processes have had."""
    return sum(os.times()[:4])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_at_once(tmp_path, name, monkeypatch):
    # What ends a template is its share of a processor.
    monkeypatch.setattr(template, "_WALL_S", 3600.0)
    began = spent_s()

    errors = load(tmp_path, HOSTILE[name]).errors

    assert errors
    assert spent_s() - began < LIMIT_S


def test_a_thousand_files_in_one_task_are_checked_at_once(tmp_path):
    files = [{"path": f"/{'d/' * 50}{i}", "contents": "x"} for i in range(5_000)]
    began = spent_s()

    assert load(tmp_path, task(files=files)).errors == []
    assert spent_s() - began < LIMIT_S


def chain(size):
    """Return a file of bare tasks, each of which reads what the one before wrote."""
    tasks = [{"name": "t0", "command": ["bash", "-c", "date"]}]
    tasks += [
        {"name": f"t{i}", "command": ["cat", "{{input:0}}/x"], "inputs": [{"task": f"t{i - 1}"}]}
        for i in range(1, size)
    ]
    return yaml.safe_dump({"workflow": {"name": "chain", "tasks": tasks}})


def many_groups(size):
    """Return a file of groups of one task."""
    tasks = [{"name": f"t{i}", "command": ["date"]} for i in range(size)]
    groups = [{"name": f"g{i}", "tasks": [one]} for i, one in enumerate(tasks)]
    return yaml.safe_dump({"workflow": {"name": "wide", "groups": groups}})


def one_group(size):
    """Return a file of one group whose tasks all name the lead."""
    join = ["join", "{{host:t0}}"]
    tasks = [{"name": f"t{i}", "command": join, "lead": i == 0} for i in range(size)]
    return yaml.safe_dump({"workflow": {"name": "gang", "groups": [{"name": "g", "tasks": tasks}]}})


@pytest.mark.parametrize("make", [chain, many_groups, one_group])
def test_twice_as_many_tasks_are_planned_with_twice_the_work(tmp_path, make):
    def plan(size, text):
        loaded = load(tmp_path, text)
        plan = plan_workflow(loaded, "r")
        assert loaded.errors == []
        assert sum(len(group.tasks) for group in plan.groups) == size

    half, whole = make(200), make(400)
    assert num_calls(lambda: plan(400, whole)) < 2.5 * num_calls(lambda: plan(200, half))


@pytest.mark.parametrize(
    "line",
    [
        "name: {}",
        "labels: {{a: {}}}",
        "timeout: {{exec_timeout: {}}}",
        "resources: {{default: {{cpu: {0}, memory: {0}}}}}",
        "tasks: [{{name: {}, command: [a]}}]",
        "tasks: [{{name: t, command: [{}]}}]",
        "tasks: [{{name: t, script: {0}, nodes: {0}, nproc_per_node: {0}}}]",
        "tasks: [{{name: t, command: [a], environment: {{A: {}}}}}]",
        "tasks: [{{name: t, command: [a], environment: {{{}: a}}}}]",
        "tasks: [{{name: t, command: [a], exitActions: {{FAIL: {}}}}}]",
        "tasks: [{{name: t, command: [a], exitActions: {{{}: 1}}}}]",
        "tasks: [{{name: t, command: [a], {}: 1}}]",
        "tasks: [{{name: t, command: [a], inputs: [{{task: {0}, url: {0}}}]}}]",
    ],
)
def test_a_number_of_any_length_is_an_error_wherever_it_stands(tmp_path, line):
    text = "workflow:\n  " + line.format("0x" + "f" * 10_000) + "\n"

    errors = load(tmp_path, text).errors

    assert errors
    assert all(len(error.what) < 500 for error in errors)
