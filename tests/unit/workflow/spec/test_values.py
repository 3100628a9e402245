import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.spec.problems import Problems, parse_set_env
from torchmuster.workflow.spec.source import default_values, parse_set_strings, parse_sets


def accepted(parse, *words):
    problems = Problems()
    found = parse(words, problems)
    assert problems.found == []
    return found


def refused(parse, *words):
    problems = Problems()
    parse(words, problems)
    return problems.found


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
    found = accepted(parse_sets, f"name={text}")["name"]
    assert found == value
    assert type(found) is type(value)


def test_of_a_name_given_twice_the_last_counts():
    assert accepted(parse_sets, "a=1", "b=2", "a=3") == {"a": 3, "b": 2}


def test_set_string_keeps_text():
    assert accepted(parse_set_strings, "a=07", "b=true") == {"a": "07", "b": "true"}


def test_the_value_of_a_variable_may_hold_equals_signs():
    assert accepted(parse_set_env, "A=b=c", "B=") == {"A": "b=c", "B": ""}


@pytest.mark.parametrize("word", ["A", "=x", "1A=x", "A-B=x", "A=\0"])
def test_a_bad_variable_is_refused(word):
    assert len(refused(parse_set_env, word)) == 1


@pytest.mark.parametrize("parse", [parse_sets, parse_set_strings])
@pytest.mark.parametrize(
    "word",
    ["a", "=1", "a.b=1", "a-b=1", "1a=1", "output=x", "input=x", "host=x", "workflow_id=x", "uuid=x",
     "if=1", "true=1", "é=1"],
)  # fmt: skip
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
        problems = Problems()
        assert len(parse([word], problems)) + len(problems.found) == 1


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
