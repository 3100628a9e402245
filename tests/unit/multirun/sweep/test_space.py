"""The words behind `--grid` and `--zip`."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.spec.problems import Problems
from torchmuster.multirun.sweep.space import plan_members

TOO_MANY = "a sweep has at most 10,000 members, these values make"


def members_of(*grid, zipped=()):
    problems = Problems()
    names, members = plan_members(grid, zipped, problems)
    assert problems.found == []
    return names, members


def problems_of(*grid, zipped=()):
    problems = Problems()
    assert plan_members(grid, zipped, problems)[1] == ()
    return [error.what for error in problems.found]


def test_every_combination_is_a_member_and_the_last_name_varies_fastest():
    names, members = members_of("lr=1e-3,1e-4", "seed=0:3")
    assert names == ("lr", "seed")
    assert members == tuple(itertools.product(("1e-3", "1e-4"), ("0", "1", "2")))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2", ["1", "2"]),
        ("0:10:4", ["0", "4", "8"]),
        ("3:0:-1", ["3", "2", "1"]),
        ("7,0:2", ["7", "0", "1"]),
        ('"a,b",c', ["a,b", "c"]),
        ('"0:3"', ["0:3"]),
        ('""', [""]),
        ('"say ""hi"""', ['say "hi"']),
        ("two words,x=y", ["two words", "x=y"]),
        ("it's", ["it's"]),
        ("10:20:30:40", ["10:20:30:40"]),
        ("12:30pm", ["12:30pm"]),
    ],
)
def test_values_are_lists_ranges_and_quoted_texts(text, values):
    assert [m[0] for m in members_of(f"x={text}")[1]] == values


def test_rows_of_zip_go_together_and_with_each_combination():
    names, members = members_of("seed=0:2", zipped=("lr=1,2", "batch=32,64"))
    assert names == ("seed", "lr", "batch")
    assert members == (("0", "1", "32"), ("0", "2", "64"), ("1", "1", "32"), ("1", "2", "64"))


@pytest.mark.parametrize(
    ("grid", "zipped", "what"),
    [
        ((), (), "a sweep needs values to try"),
        (("lr",), (), "`lr` has no values"),
        (("lr=",), (), "`lr` has an empty value"),
        (("lr=1,,2",), (), "`lr` has an empty value"),
        (("2lr=1",), (), "`2lr` can't be the name of a value"),
        (("--lr=1",), (), "`--lr` can't be the name of a value"),
        (("lr=1", "lr=2"), (), "`lr` is given 2 times"),
        (("lr=1",), ("lr=2",), "`lr` is given 2 times"),
        (("a.b=1", "a_b=2"), (), "`a_b` and `a.b` can't be told apart"),
        (("member=1",), (), "`member` and the number of the member can't be told apart"),
        (("x=1,2,1",), (), "`x` has the value `1` 2 times"),
        (("lr=[0.1, 0.3]",), (), "the values of `lr` stand in brackets"),
        (("lr=0.1:0.5:0.1",), (), "`0.1:0.5:0.1` of `lr` is no range"),
        (("lr=1e-4..1e-3",), (), "`1e-4..1e-3` of `lr` is no range"),
        (("x=3:3",), (), "the range `3:3` of `x` is empty"),
        (("x=0:3:0",), (), "the range `0:3:0` of `x` has a step of 0"),
        (('x="a',), (), "a quotation mark of `x` is not closed"),
        (("x=a\nb",), (), "a value of `x` has a newline or a control character"),
        ((), ("a=1,2", "b=1"), "the values of `--zip` are of different number"),
        (("x=0:1000000000",), (), f"{TOO_MANY} 1,000,000,000"),
        (("x=0:101", "y=0:100"), (), f"{TOO_MANY} 10,100"),
    ],
)
def test_what_is_wrong_is_said(grid, zipped, what):
    assert problems_of(*grid, zipped=zipped) == [what]


@given(st.lists(st.text(), max_size=4))
def test_any_text_gives_members_or_problems(words):
    problems = Problems()
    names, members = plan_members([f"x{n}={word}" for n, word in enumerate(words)], (), problems)
    assert bool(members) != bool(problems.found)
    assert all(len(member) == len(names) for member in members)


@given(
    st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126)), min_size=1, unique=True)
)
def test_every_text_can_be_quoted(values):
    quoted = ",".join('"' + value.replace('"', '""') + '"' for value in values)
    assert [member[0] for member in members_of(f"x={quoted}")[1]] == values
