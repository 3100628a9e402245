import time

import pytest

from torchmuster.core.spec.problems import Problems
from torchmuster.workflow.spec.load import split_sections
from torchmuster.workflow.spec.source import Source


def split(text):
    problems = Problems()
    return split_sections(Source(path="f.yaml", text=text), problems), problems.found


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


def test_all_mistakes_are_reported_together():
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
