import math
import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kit.tables import words
from kit.work import num_calls
from torchmuster.core.spec.problems import Problems, parse_set_env
from torchmuster.errors import UsageError
from torchmuster.workflow.spec.source import (
    MAX_BYTES,
    default_values,
    parse_set_strings,
    parse_sets,
    parse_yaml,
)

TASK = (
    "  - name: task-{}\n    image: image\n    lead: false\n    args: [/tmp/run.sh, --x, '1']\n"
    "    files:\n    - path: /tmp/run.sh\n      contents: |\n        set -ex\n        torchrun\n"
)
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)


def refusal(text):
    with pytest.raises(UsageError) as caught:
        parse_yaml(text, "f.yaml")
    return caught.value


def test_keys_and_values_know_their_line_and_column():
    document = parse_yaml("a: 1\nb:\n  - c: x\n  - [y, z]\n", "f.yaml")
    assert document.value == {"a": 1, "b": [{"c": "x"}, ["y", "z"]]}
    assert document.keys[("b", 0, "c")] == (3, 5)
    assert document.values[("b", 0, "c")] == (3, 8)
    assert document.values[("b", 1, 1)] == (4, 9)
    assert document.where(("b", 0, "c"), at_key=True) == "f.yaml:3:5"


def test_a_path_that_is_missing_has_the_place_of_the_key_above():
    document = parse_yaml("a:\n  b: 1\n", "f.yaml")
    assert document.where(("a", "missing", "deep")) == "f.yaml:1:1"


def test_places_go_through_locate():
    document = parse_yaml("a: 1\nb: 2\n", "f.yaml", lambda line, _: (line + 10, None))
    assert document.where(("b",)) == "f.yaml:12"
    with pytest.raises(UsageError) as caught:
        parse_yaml("a: @\n", "f.yaml", lambda line, _: (line + 10, None))
    assert caught.value.where == "f.yaml:11"


@pytest.mark.parametrize(
    "text",
    [
        "a: on\nb: 1_000\nc: 0x10\ne: ~\nf: .5\ng: 'no'\nh: no\ni: !!str 5\nj: 1e3",
        "x: &x {a: 1, b: 2}\ny:\n  <<: *x\n  a: 3",
        "x: &x [1]\ny: [*x, *x]",
        "a: {b: c, d}\ne: >-\n  one\n  two\nf: |\n  x\n   y\n\nt: 2024-01-02",
        "",
        "\ufeffa: 1",
        "- a\n-\n- ''",
    ],
)
def test_values_are_those_of_the_safe_loader(text):
    assert parse_yaml(text, "f.yaml").value == yaml.safe_load(text)


@pytest.mark.parametrize("text", [BOMB, "a: &a [*a]", "[" * 100_000, "a: [" + "x," * 2_000_000 + "]",
                                  "x: " + "y" * MAX_BYTES, "x: " + "é" * (MAX_BYTES // 2)])  # fmt: skip
def test_hostile_files_are_refused_soon(text):
    began = time.process_time()
    refusal(text)
    assert (
        time.process_time() - began < 20
    )  # it takes one at most; all that the aliases mean, hours


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("a: 1\nb: 2\na: 3", "f.yaml:3:1", "the key `a` occurs twice"),
        ("a:\n\tb: 1", "f.yaml:2:1", "a tab"),
        ("a:b\nc: d", "f.yaml:2:2", "a space is missing after `:`"),
        ("p: {{output}}/x", "f.yaml:1:14", "`{{` without quotes"),
        ("- {{x}}", "f.yaml:1:4", "a map can't be a key"),
        ("a: *.py", "f.yaml:1:5", "can't begin with `*`"),
        ("a: *py", "f.yaml:1:4", "`*py` names an anchor that does not exist"),
        ("a: & b", "f.yaml:1:5", "can't begin with `&`"),
        ("a: @b", "f.yaml:1:4", "can't begin with `@`"),
        ("a: %b", "f.yaml:1:4", "can't begin with `%`"),
        ("a: !!python/object/apply:os.system [x]", "f.yaml:1:4", "!!python/object/apply:os.system"),
        ("a: !mine 1", "f.yaml:1:4", "the YAML tag `!mine`"),
        ("a: 1\n--- \nb: 1", "f.yaml:2:1", "more than one YAML document"),
        ("b: 1\na: 'x\n", "f.yaml:2:4", "a quotation mark is not closed"),
        ("a: 1\nb: \x01", "f.yaml:2:4", "not YAML"),
        ("a: 2024-99-99", "f.yaml:1:4", "not a valid timestamp"),
        ("a: b: c", "f.yaml:1:5", "a `key:` is not allowed here"),
    ],
)
def test_a_mistake_is_named_with_its_place(text, where, what):
    error = refusal(text)
    assert error.where == where
    assert what in error.what


def test_a_key_that_stands_twice_names_both_lines():
    assert refusal("x:\n  a: 1\n  b: 2\n  a: 3").why == "the other one is in line 2"


@pytest.mark.parametrize("value", ["1", "{b: [1, 2], c: x}", "null"])
def test_a_key_that_stands_twice_and_says_the_same_is_a_warning(value):
    document = parse_yaml(f"a: {value}\nb: 2\na: {value}", "f.yaml")

    (warning,) = document.twice
    assert (warning.what, warning.where) == ("the key `a` occurs twice", "f.yaml:3:1")
    assert warning.why == "the other one is in line 1 with the same value: remove one of them"
    assert list(document.value) == ["a", "b"]


@pytest.mark.parametrize(("first", "second"), [("1", "true"), ("1", "'1'"), ("[1]", "[1, 2]")])
def test_values_that_only_look_alike_are_an_error(first, second):
    assert "occurs twice" in refusal(f"a: {first}\na: {second}").what


def test_twice_as_many_tasks_are_parsed_with_twice_the_work():
    def parse(num_tasks):
        text = "workflow:\n  tasks:\n" + "".join(TASK.format(index) for index in range(num_tasks))
        document = parse_yaml(text, "f.yaml")
        assert len(document.value["workflow"]["tasks"]) == num_tasks

    assert num_calls(lambda: parse(400)) < 2.5 * num_calls(lambda: parse(200))


@given(st.text() | st.lists(st.sampled_from(
    ["a", ": ", "\n", "  ", "- ", "{", "}", "[", "]", "&a ", "*a", "!", "'", '"', "|", ">", "#",
     "\t", "<<", "? ", "%", "@", "---\n", "1", "~", "!!int ", "=", "2024-13-01"])).map("".join))  # fmt: skip
def test_no_text_crashes(text):
    try:
        document = parse_yaml(text, "f.yaml")
    except UsageError as error:
        caught = error.where
        assert caught
    else:
        assert all(document.position(path) >= (1, 1) for path in document.values)


def test_two_numbers_with_a_colon_are_text_and_not_sixty_to_the_unit():
    assert parse_yaml("nodes: 2:4\nport: 8:30", "f.yaml").value == {"nodes": "2:4", "port": "8:30"}


@pytest.mark.parametrize("key", ["on", "no", "null", "~", "true"])
def test_a_key_that_yaml_reads_as_a_value_needs_quotes(key):
    with pytest.raises(UsageError, match="a key is read as") as caught:
        parse_yaml(f"environment:\n  {key}: 1", "f.yaml")

    assert caught.value.where == "f.yaml:2:3"
    assert parse_yaml(f"'{key}': 1", "f.yaml").value == {key: 1}


def parsed(parse, *words):
    problems = Problems()
    return parse(words, problems), problems.found


def refused(parse, *words):
    return parsed(parse, *words)[1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("07", 7), ("1e3", 1000.0), ("1_000", 1000), ("-2", -2), ("0.5", 0.5), ("", ""),
        ("true", True), ("false", False), ("null", "null"), ("text", "text"), ("a=b", "a=b"),
        ("[1, 2]", [1, 2]), ('{"a": null}', {"a": None}), ("{{output}}/x", "{{output}}/x"),
        ("inf", math.inf), ("9" * 5000, "9" * 5000), ("__import__('os')", "__import__('os')"),
    ],
)  # fmt: skip
def test_a_value_is_what_it_looks_like(text, value):
    found, problems = parsed(parse_sets, f"name={text}")
    assert (found, problems) == ({"name": value}, [])
    assert type(found["name"]) is type(value)


def test_of_a_name_given_twice_the_last_counts():
    assert parsed(parse_sets, "a=1", "b=2", "a=3") == ({"a": 3, "b": 2}, [])


def test_set_string_keeps_text():
    assert parsed(parse_set_strings, "a=07", "b=true") == ({"a": "07", "b": "true"}, [])


def test_the_value_of_a_variable_may_hold_equals_signs():
    assert parsed(parse_set_env, "A=b=c", "B=") == ({"A": "b=c", "B": ""}, [])


BAD_NAMES = words(
    "a =1 a.b=1 a-b=1 1a=1 output=x input=x host=x workflow_id=x uuid=x if=1 true=1 é=1"
)


@pytest.mark.parametrize(
    ("parse", "word"),
    [
        *((parse_set_env, word) for word in ("A", "=x", "1A=x", "A-B=x", "A=\0")),
        *((parse, word) for parse in (parse_sets, parse_set_strings) for word in BAD_NAMES),
    ],
)
def test_a_bad_name_is_refused(parse, word):
    assert len(refused(parse, word)) == 1


def test_all_bad_words_are_reported_together():
    assert len(refused(parse_sets, "a.b=1", "x", "good=1", "y=[1")) == 3


def test_a_dotted_name_gets_the_map_as_a_hint():
    (problem,) = refused(parse_sets, "a.b=1")
    assert "--set 'a={\"b\": ...}'" in problem.fix


@pytest.mark.parametrize("text", ["[a-z]", "{a}", "[" * 100_000])
def test_a_list_that_is_no_json_is_refused_with_set_string_as_a_hint(text):
    (problem,) = refused(parse_sets, f"a={text}")
    assert "--set-string a=" in problem.fix


@given(st.text())
def test_no_word_crashes(word):
    for parse in (parse_sets, parse_set_strings, parse_set_env):
        assert sum(map(len, parsed(parse, word))) == 1


def defaults_of(text, line=1):
    problems = Problems()
    return default_values(text, "f.yaml", line, problems), problems.found


def test_a_comment_behind_or_above_is_the_help():
    text = """default-values:
  n_nodes: 2  # how many
  # the folder
  # of results
  folder: "a # b"
  plain: it's # odd
  none: 1
  map:  # of sizes
    x: 1
"""
    found, problems = defaults_of(text, line=5)
    assert problems == []
    assert [(one.name, one.value, one.help, one.line) for one in found] == [
        ("n_nodes", 2, "how many", 6),
        ("folder", "a # b", "the folder of results", 9),
        ("plain", "it's", "odd", 10),
        ("none", 1, "", 11),
        ("map", {"x": 1}, "of sizes", 12),
    ]


def test_an_empty_section_has_no_values():
    assert defaults_of("default-values:\n") == ([], [])


@pytest.mark.parametrize(
    "text", ["default-values: 3", "default-values:\n- a", "default-values:\n  1: 2"]
)
def test_what_is_no_map_of_names_is_refused(text):
    found, problems = defaults_of(text)
    assert (found, len(problems)) == ([], 1)


def test_unquoted_jinja_is_refused_with_the_reason_and_the_line_of_the_file():
    _, (problem,) = defaults_of("default-values:\n  a: {{ b }}/x\n", line=11)
    assert "before Jinja" in problem.why
    assert problem.where.startswith("f.yaml:12")
