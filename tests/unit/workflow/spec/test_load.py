"""From the text of a workflow file to a plan: its sections, its template, its mistakes."""

import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.tables import rows
from torchmuster.core import proc
from torchmuster.core.spec.problems import Problems
from torchmuster.errors import ManyErrors, UsageError
from torchmuster.workflow.spec import load as loader
from torchmuster.workflow.spec.source import MAX_BYTES, Source
from torchmuster.workflow.tokens import find_tokens
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
    errors = loader.load_workflow(loader.LoadOptions(path=write(tmp_path, TEMPLATE))).errors

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
        loader.read_source(str(tmp_path / "trian.yaml"))

    assert caught.value.fix == f"did you mean `{tmp_path}/train.yaml`?"


@pytest.mark.parametrize("data", [b"\xff\xfe", b"a: \x80"])
def test_a_file_that_is_no_text_is_refused(tmp_path, data):
    (tmp_path / "train.yaml").write_bytes(data)
    with pytest.raises(UsageError, match="not UTF-8 text") as caught:
        loader.read_source(str(tmp_path / "train.yaml"))

    assert caught.value.where == f"{tmp_path}/train.yaml:1"


def test_a_huge_file_is_refused(tmp_path):
    write(tmp_path, "#" * (5 << 20))
    with pytest.raises(UsageError, match="larger than 4 MiB"):
        loader.read_source(str(tmp_path / "train.yaml"))


def test_the_values_of_a_file_have_their_help(tmp_path):
    (value,) = loader.list_values(write(tmp_path, TEMPLATE))

    assert (value.name, value.value, value.help) == ("n_nodes", 2, "how many nodes")


def test_rendering_stops_with_every_problem(tmp_path):
    text = "workflow:\n  name: {{a}}\n  pool: {{b}}\n"
    with pytest.raises(ManyErrors) as caught:
        loader.render_workflow(loader.LoadOptions(path=write(tmp_path, text)))

    assert len(caught.value.errors) == 2


def test_rendering_does_not_check_what_comes_out(tmp_path):
    text, warnings = loader.render_workflow(
        loader.LoadOptions(path=write(tmp_path, TEMPLATE), sets=["n_nodes=1"])
    )

    assert text.count("comand") == 1
    assert warnings == []


def test_a_plan_names_the_file_and_its_folder(tmp_path):
    plan = loader.plan_workflow(load(tmp_path, ONE_TASK), "r", grace_s=7.0)

    assert (plan.run_id, plan.name, plan.grace_s) == ("r", "digits", 7)
    assert (plan.spec_path, plan.cwd) == (str(tmp_path / "train.yaml"), str(tmp_path))


def split(text):
    problems = Problems()
    return loader.split_sections(Source(path="f.yaml", text=text), problems), problems.found


def test_sections_know_their_first_line():
    found, problems = split(
        "# a comment\n\nworkflow:\n  name: a\n\ndefault-values:\n  n: 1\nversion: 2\n"
    )
    assert problems == []
    assert {name: (one.line, one.text) for name, one in found.items()} == {
        "workflow": (3, "workflow:\n  name: a\n"),
        "default-values": (6, "default-values:\n  n: 1"),
        "version": (8, "version: 2"),
    }


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_every_kind_of_newline_ends_a_line(newline):
    found, problems = split(f"workflow:{newline}  a: 1{newline}version: 2{newline}")
    assert (found["version"].line, problems) == (3, [])


@pytest.mark.parametrize(
    ("text", "where", "what", "fix"),
    [
        ("workflow:\n  a: 1\nversoin: 2", "f.yaml:3:1", "`versoin` is not a top", "`version`"),
        ("workflow:\n  a: 1\ngroups:\n- a", "f.yaml:3:1", "`groups` is not a top", "under `workflow:`"),
        ("workflow:\n  a: 1\nworkflow:\n", "f.yaml:3", "occurs twice", ""),
        ("{% set x = 1 %}\nworkflow:\n", "f.yaml:1", "would be dropped", "below `workflow:`"),
        ("garbage\nworkflow:\n", "f.yaml:1", "would be dropped", "below `workflow:`"),
        ("groups:\n- name: a", "f.yaml:1", "`groups:` is at the top", "with a `name:`"),
        ("name: a\ntasks:\n- a", "f.yaml:1", "`name:` and `tasks:` are at the top", "put it under `workflow:`"),
        ("", "f.yaml", "no top-level key `workflow:`", "workflow:"),
        ("workfow:\n  a: 1", "f.yaml:1:1", "`workfow` is not a top-level key", "`workflow`"),
        ("workflow:\n  a: |\n    x\nset: y", "f.yaml:4:1", "`set` is not a top", "begins in line 2"),
    ],
)  # fmt: skip
def test_a_mistake_at_the_top_is_named_with_its_line(text, where, what, fix):
    _, (problem,) = split(text)
    assert problem.where == where
    assert what in problem.what
    assert fix in (problem.fix or "")


def test_all_mistakes_at_the_top_are_reported_together():
    _, problems = split("workflow:\na: 1\nb: 2\nworkflow:\n")
    assert len(problems) == 3


def test_a_key_inside_a_jinja_comment_is_none():
    found, problems = split("workflow:\n  {# old:\nold: 1\n  #}\n  a: 1\n")
    assert (list(found), problems) == (["workflow"], [])


@pytest.mark.parametrize("line", ["http://host/x", "a:b", "  deep: 1", "- x: 1", "# c: 1"])
def test_what_only_looks_like_a_key_begins_no_section(line):
    found, problems = split(f"workflow:\n{line}\n")
    assert (list(found), problems) == (["workflow"], [])


@pytest.mark.parametrize(
    "text", ["a:\n" * 300_000, "workflow:\n" * 100_000, "workflow:\n" + "{#\nx:\n" * 99_999]
)
def test_a_file_full_of_keys_is_refused_with_a_few_of_them_soon(text):
    began = time.process_time()
    _, problems = split(text)
    assert 1 <= len(problems) <= 21
    assert time.process_time() - began < 20  # it takes less than one; a quadratic search, minutes


# Comparing these two takes 2**40 steps inside one operation, where no Python handler runs.
LONG_IN_C = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(40) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}"
)
HEAD = "workflow:\n  name: a\n"
NODES = """\
# Trains on n nodes.
workflow:
  name: train
  resources:
    default: {{ sizes }}
  groups:
  - name: training
    tasks:
    {% for item in range(n_nodes) %}
    {% if item == 0 %}
    - name: master
      lead: true
    {% else %}
    - name: worker_{{item}}  # talks to the master
    {% endif %}
      args: ["{{host:master}}", "{{ host:worker_{{item}} }}", "{{rank}}"]
      files:
      - path: /tmp/run.sh
        contents: |
          torchrun --nnodes {{n_nodes}} --node_rank {{item}} \\
                    --master_addr {{host:master}} --snapshot {{output}}/snapshot.pth
    {% endfor %}

default-values:
  n_nodes: 2  # how many nodes
  sizes: {gpu: 8, cpu: 16}
version: 2
"""


def rendered(text, sets=None, strings=None):
    problems = Problems()
    found = loader.render_file(
        Source(path="f.yaml", text=text), sets or {}, strings or {}, problems
    )
    assert problems.found == []
    return found


def refused(text, sets=None):
    problems = Problems()
    found = loader.render_file(Source(path="f.yaml", text=text), sets or {}, {}, problems)
    assert found is None
    return problems.found


def cpu_s():
    """Return the CPU time of this process and of its children that have ended, in seconds."""
    return sum(os.times()[:4])


def line_of(found, text):
    return next(n for n, line in enumerate(found.text.split("\n"), 1) if text in line)


def seed(name):
    """Return a workflow file of the tutorial that the format comes from."""
    return (Path(__file__).parents[3] / "seeds" / "osmo" / f"{name}.yaml").read_text()


def test_the_seed_s_two_nodes_need_no_rendering():
    found = rendered(seed("two_nodes"))
    assert not found.is_template
    tasks = yaml.safe_load(found.text)["workflow"]["groups"][0]["tasks"]
    assert [task["name"] for task in tasks] == ["master", "worker"]
    assert "--master_addr {{host:master}}" in tasks[1]["files"][0]["contents"]


def test_the_seed_s_template_makes_as_many_tasks_as_asked_for():
    found = rendered(seed("any_nodes"), {"n_nodes": 4, "n_gpus_per_node": 4})
    workflow = yaml.safe_load(found.text)["workflow"]
    names = [task["name"] for task in workflow["groups"][0]["tasks"]]
    assert names == ["master", "worker_1", "worker_2", "worker_3"]
    assert workflow["resources"]["default"]["gpu"] == 4
    assert found.values["n_nodes"] == 4
    assert found.warnings == ()


def test_the_seed_s_fragment_is_told_what_misses_around_it():
    (problem,) = refused(seed("barrier"))
    assert problem.fix == "put it under `workflow:` with a `name:`"


def test_a_loop_makes_tasks_and_leaves_the_tokens():
    found = rendered(NODES, {"n_nodes": 3})
    workflow = yaml.safe_load(found.text)["workflow"]
    tasks = workflow["groups"][0]["tasks"]
    assert [task["name"] for task in tasks] == ["master", "worker_1", "worker_2"]
    assert tasks[2]["args"] == ["{{host:master}}", "{{ host:worker_2 }}", "{{rank}}"]
    assert "{{output}}/snapshot.pth" in tasks[0]["files"][0]["contents"]
    assert workflow["resources"]["default"] == {"gpu": 8, "cpu": 16}


def test_each_place_leads_back_to_the_user_s_line():
    found = rendered(NODES)
    written = NODES.split("\n")
    for text, same_column in [("name: train", True), ("lead: true", True), ("worker_1  #", False)]:
        line = line_of(found, text)
        column = found.text.split("\n")[line - 1].index(text) + 1
        origin, origin_column = found.locate(line, column)
        assert (text.replace("_1", "_{{item}}")) in written[origin - 1]
        assert origin_column == column
        assert (found.locate(line, column + len(text))[1] is not None) == same_column


def test_a_file_without_jinja_keeps_lines_and_columns():
    found = rendered("# c\n\nworkflow:\n  name: '{{workflow_id}}'\n")
    assert (found.text, found.workflow_lines) == ("workflow:\n  name: '{{workflow_id}}'", (3, 4))
    assert found.locate(2, 5) == (4, 5)


@pytest.mark.parametrize("token", ["{{output}}", "{{ output }}", "{{ input:0 }}", "{{host:a}}",
                                   "{{ host:a }}", "{{uuid}}", "{{ workflow_id }}", "{{port}}",
                                   "{{ port:web }}", "{{ip:a}}", "{{attempt}}", "{{num_tasks}}"])  # fmt: skip
def test_a_token_survives_with_and_without_spaces(token):
    for text in (f"{HEAD}  x: {token}", f"{HEAD}  x: {token}{{{{ 1 }}}}"):
        assert f"x: {token}" in rendered(text).text


COMES_TO = r"""
    expression in a token  {% for i in (0, 1) %}{{host:t{{i}}}}{% endfor %}  {{host:t0}}{{host:t1}}
    the old way to write it  {% raw %}{{host:t{% endraw %}{{i}}{% raw %}}}{% endraw %}  {{host:t3}}
    raw text is kept  {% raw %}{{foo}} ${#a[@]} {{output}}{% endraw %}  {{foo}} ${#a[@]} {{output}}
    a value may hold a token  {{ p }}  {{output}}/y
    a string beats a set beats a default  {{ a }} {{ b }} {{ c }}  1 2 3
    false is false  {% if flag %}yes{% else %}no{% endif %}  no
    a variable named like a token of ours  {{port}} {{ port }}  29400 29400
    a loop's variable named like it  {% for rank in range(2) %}{{rank}}{% endfor %}  01
    one that is set in the text  {% set attempt = 3 %}{{attempt}}  3
"""


@pytest.mark.parametrize(
    ("text", "shown"), [pytest.param(*row, id=claim) for claim, *row in rows(COMES_TO, 3)]
)
def test_what_a_line_of_a_template_comes_to(text, shown):
    defaults = "default-values: {a: 1, b: 1, c: 1, port: 29400}\n"
    sets = {"b": 2, "c": 2, "i": 3, "p": "{{output}}/y", "flag": False}
    found = rendered(f"{HEAD}  x: {text}\n{defaults}", sets, {"c": "3"})
    assert f"x: {shown}" in found.text


def test_a_default_named_like_a_token_counts_where_spaces_stand():
    text = HEAD + "  x: {{output}} {{ output }}\ndefault-values:\n  output: mine\n"
    found = rendered(text)
    assert "x: {{output}} mine" in found.text
    (warning,) = found.warnings
    assert "`output` is also the name of a token" in warning.what
    assert warning.where == "f.yaml:5"


def test_a_missing_name_has_its_line_and_a_near_miss():
    text = HEAD + "  x: {{ nodes }}\n  # {{ other }}\ndefault-values:\n  n_nodes: 1\n"
    first, second = refused(text)
    assert (first.where, first.fix) == ("f.yaml:3", "did you mean `n_nodes`?")
    assert second.where == "f.yaml:4"
    assert "YAML comment" in second.why
    assert "--set other=..." in second.fix


def test_a_token_in_an_expression_is_told_apart_from_a_missing_name():
    (problem,) = refused(HEAD + "  x: {{ rank + 1 }}")
    assert "`rank` can't be part of a Jinja expression" in problem.what


@pytest.mark.parametrize("text", ["${#arr[@]}", "'{%d}'", "f'{{x + }}'"])
def test_a_script_that_jinja_can_t_read_gets_raw_as_a_hint(text):
    (problem,) = refused(f"{HEAD}  x: |\n    {text}\n")
    assert problem.where == "f.yaml:4"
    assert "{% raw %}" in problem.fix


def test_a_value_that_is_never_used_is_a_warning_with_a_near_miss():
    text = HEAD + "  x: {{ n_nodes }}\ndefault-values:\n  n_nodes: 1\n"
    (warning,) = rendered(text, {"nnodes": 3}).unused.values()
    assert "never uses `nnodes`" in warning.what
    assert warning.fix == "did you mean `n_nodes`?"


def test_a_default_value_that_is_never_used_is_a_warning_with_its_line():
    text = HEAD + "  x: {{ n_nodes }}\ndefault-values:\n  n_nodes: 1\n  unused: 2\n"
    (warning,) = rendered(text, {}).unused.values()
    assert "never uses the default value `unused`" in warning.what
    assert warning.where == "f.yaml:6"


def test_a_version_without_effect_is_a_warning():
    assert rendered(HEAD + "version: 2\n").warnings == ()
    (warning,) = rendered(HEAD + "version: 3\n").warnings
    assert (warning.where, "no effect" in warning.what) == ("f.yaml:3", True)


def test_all_mistakes_of_the_sections_are_reported_together():
    assert len(refused(HEAD + "vresion: 2\ndefault-values: 3\n")) == 2


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", 4),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", 4),
        ("{{ 'a' * 10**9 }}", 4),
        ("{{ 'x'|center(10**9) }}", 4),
        ("{{ '{:1000000000d}'.format(1) }}", 4),
        ("{{ ('a'*900000)|replace('a', 'b'*900000) }}", 4),
        ("{% for i in range(90000) %}{{ 'x' * 100 }}{% endfor %}", 4),
        ("{{ lipsum(n=1000000) }}", 4),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", 4),
        ("{{ (9**999)|string|list|map('int')|sum ** 9999 }}", 4),
        ("{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}", None),
        ("{{ ''.__class__.__mro__ }}", 4),
        (LONG_IN_C, None),
    ],
)
def test_a_hostile_template_is_refused_within_a_second_of_work(text, line):
    before = cpu_s()
    (problem,) = refused(f"{HEAD}  y: 1\n  x: {text}\n")
    assert cpu_s() - before < 1
    assert problem.where == ("f.yaml" if line is None else f"f.yaml:{line}")


@pytest.mark.parametrize(
    "text",
    ["'{{output}}'[:26]", "'{{output}}'[:24] ~ '9999999'", "'{{output}}'|truncate(29, leeway=0)"],
)
def test_a_token_that_is_cut_is_an_error(text):
    (problem,) = refused(f"{HEAD}  x: {{{{ {text} }}}}")
    assert problem.what == "the template cuts a runtime token"


def test_a_file_with_thousands_of_expressions_has_the_time_it_needs():
    found = rendered(HEAD + "".join(f"  k{n}: {{{{ n }}}}\n" for n in range(4000)), {"n": 1})
    assert found.text.endswith("k3999: 1")


def test_a_file_over_the_limit_is_refused():
    (problem,) = refused(HEAD + "#" * MAX_BYTES)
    assert "larger than 4 MiB" in problem.what


@given(st.lists(st.sampled_from(["{{", "}}", "output", "host:", "a", " ", "\n", "{{i}}", "rank",
                                 "{{port}}", "{{host:t{{i}}}}", "1", ":"])).map("".join))  # fmt: skip
def test_hiding_the_tokens_and_bringing_them_back_changes_nothing(text):
    hidden, restore = loader.protect_tokens(text, frozenset())
    assert restore(hidden) == text
    assert find_tokens(hidden) == []


@settings(max_examples=20)
@given(st.lists(st.sampled_from(["workflow:", "\n", "  a: ", "{{ x }}", "{% if x %}", "{% endif %}",
                                 "default-values:", "{{output}}", "{#", "#}", "version: 1", "foo:",
                                 "{{", "- ", "é\x00\ud800", "\r", "|"])).map("".join) | st.text())  # fmt: skip
def test_no_text_crashes(text):
    problems = Problems()
    found = loader.render_file(Source(path="f.yaml", text=text), {"x": 1}, {}, problems)
    assert (found is None) == bool(problems.found)


def test_a_child_that_its_time_limit_ended_in_the_middle_is_told_as_that(monkeypatch):
    stderr = b"Traceback ...\ntorchmuster.workflow.spec.sandbox.TooLongError"
    dead = proc.CommandOutput(status=1, stdout=b"", stderr=stderr)
    monkeypatch.setattr(proc, "ask", lambda *_: dead)

    (error,) = refused("workflow: {{x}}", {"x": 1})
    assert error.what == "the template takes too much time"
    assert "TooLongError" not in f"{error.why}"
