import os
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmuster.core import proc
from torchmuster.core.spec.problems import Problems
from torchmuster.workflow.spec.load import protect_tokens, render_file
from torchmuster.workflow.spec.source import MAX_BYTES, Source
from torchmuster.workflow.tokens import find_tokens

SEEDS = [folder / "shared/seeds/osmo-multi-node-training.rst" for folder in Path(__file__).parents]
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
    found = render_file(Source(path="f.yaml", text=text), sets or {}, strings or {}, problems)
    assert problems.found == []
    return found


def refused(text, sets=None):
    problems = Problems()
    found = render_file(Source(path="f.yaml", text=text), sets or {}, {}, problems)
    assert found is None
    return problems.found


def cpu_s():
    """Return the CPU time of this process and of its children that have ended, in seconds."""
    return sum(os.times()[:4])


def line_of(found, text):
    return next(n for n, line in enumerate(found.text.split("\n"), 1) if text in line)


def seed_blocks():
    seed = next((path for path in SEEDS if path.exists()), None)
    if seed is None:
        pytest.skip("the seed is not here")
    blocks = re.findall(r"\.\. code-block:: (?:yaml|jinja)\n\n((?:  .*\n|\n)+)", seed.read_text())
    return [re.sub(r"^  ", "", block, flags=re.MULTILINE) for block in blocks]


def test_the_seed_s_two_nodes_need_no_rendering():
    found = rendered(seed_blocks()[0])
    assert not found.is_template
    tasks = yaml.safe_load(found.text)["workflow"]["groups"][0]["tasks"]
    assert [task["name"] for task in tasks] == ["master", "worker"]
    assert "--master_addr {{host:master}}" in tasks[1]["files"][0]["contents"]


def test_the_seed_s_template_makes_as_many_tasks_as_asked_for():
    found = rendered(seed_blocks()[1], {"n_nodes": 4, "n_gpus_per_node": 4})
    workflow = yaml.safe_load(found.text)["workflow"]
    assert [task["name"] for task in workflow["groups"][0]["tasks"]] == [
        "master", "worker_1", "worker_2", "worker_3",
    ]  # fmt: skip
    assert workflow["resources"]["default"]["gpu"] == 4
    assert found.values["n_nodes"] == 4
    assert found.warnings == ()


def test_the_seed_s_fragment_is_told_what_misses_around_it():
    (problem,) = refused(seed_blocks()[2])
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


def test_a_token_with_an_expression_inside_names_the_task():
    found = rendered(HEAD + "  {% for i in range(2) %}\n  {{host:t{{i}}}}{% endfor %}")
    assert "{{host:t0}}" in found.text
    assert "{{host:t1}}" in found.text


def test_the_old_way_to_write_such_a_token_works_too():
    text = "{% raw %}{{host:t{% endraw %}{{i}}{% raw %}}}{% endraw %}"
    assert "x: {{host:t3}}" in rendered(f"{HEAD}  x: {text}", {"i": 3}).text


def test_a_raw_block_keeps_what_is_in_it():
    text = "{% raw %}{{foo}} ${#a[@]} {{output}}{% endraw %}"
    assert "x: {{foo}} ${#a[@]} {{output}}" in rendered(f"{HEAD}  x: {text}").text


def test_a_value_may_hold_a_token():
    assert "x: {{output}}/y" in rendered(f"{HEAD}  x: {{{{ p }}}}", {"p": "{{output}}/y"}).text


def test_string_beats_set_beats_default():
    text = HEAD + "  x: {{ a }} {{ b }} {{ c }}\ndefault-values:\n  a: 1\n  b: 1\n  c: 1\n"
    assert "x: 1 2 3" in rendered(text, {"b": 2, "c": 2}, {"c": "3"}).text


def test_false_is_false():
    text = HEAD + "  x: {% if flag %}yes{% else %}no{% endif %}"
    assert "x: no" in rendered(text, {"flag": False}).text


def test_a_default_named_like_a_token_counts_where_spaces_stand():
    text = HEAD + "  x: {{output}} {{ output }}\ndefault-values:\n  output: mine\n"
    found = rendered(text)
    assert "x: {{output}} mine" in found.text
    (warning,) = found.warnings
    assert "`output` is also the name of a token" in warning.what
    assert warning.where == "f.yaml:5"


def test_a_variable_named_like_a_token_of_ours_is_the_variable():
    text = HEAD + "  x: {{port}} {{ port }}\ndefault-values:\n  port: 29400\n"
    assert "x: 29400 29400" in rendered(text).text
    loop = HEAD + "  x: {% for rank in range(2) %}{{rank}}{% endfor %}"
    assert "x: 01" in rendered(loop).text
    assert "x: 3" in rendered(HEAD + "  {% set port = 3 %}\n  x: {{port}}").text


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
    hidden, restore = protect_tokens(text, frozenset())
    assert restore(hidden) == text
    assert find_tokens(hidden) == []


@settings(max_examples=20)
@given(st.lists(st.sampled_from(["workflow:", "\n", "  a: ", "{{ x }}", "{% if x %}", "{% endif %}",
                                 "default-values:", "{{output}}", "{#", "#}", "version: 1", "foo:",
                                 "{{", "- ", "é\x00\ud800", "\r", "|"])).map("".join) | st.text())  # fmt: skip
def test_no_text_crashes(text):
    problems = Problems()
    found = render_file(Source(path="f.yaml", text=text), {"x": 1}, {}, problems)
    assert (found is None) == bool(problems.found)


def test_a_child_that_its_time_limit_ended_in_the_middle_is_told_as_that(tmp_path, monkeypatch):
    stderr = b"Traceback ...\ntorchmuster.workflow.spec.sandbox.TooLongError"
    dead = proc.CommandOutput(status=1, stdout=b"", stderr=stderr)
    monkeypatch.setattr(proc, "ask", lambda *_: dead)

    problems = Problems()
    assert (
        render_file(Source(path="f.yaml", text="workflow: {{x}}"), {"x": 1}, {}, problems) is None
    )

    (error,) = problems.found
    assert error.what == "the template takes too much time"
    assert "TooLongError" not in f"{error.why}"
