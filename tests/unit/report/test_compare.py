"""Two runs: what differs, and from which step on."""

import json
from dataclasses import replace

import pytest

from kit.records import TRAINING, event, make_run, result
from torchmuster.core.model import codec
from torchmuster.launcher.owner.origin import CodeVersion, Origin
from torchmuster.report.compare import Point, compare, first_difference
from torchmuster.report.find import find_story
from torchmuster.report.page import render_comparison

CODE = CodeVersion(
    root="/c", commit="c1", branch="main", difference="+a\n", num_changed=1, changed=("a.py",)
)
ORIGIN = Origin(user="u", host="h", torchmuster="1", python="3", code=CODE)


@pytest.fixture
def run(tmp_path):
    def make(name, training=TRAINING, origin=ORIGIN, **plan):
        made = make_run(tmp_path / name, training=training, ended=result(), **plan)
        with open(made.origin, "w") as file:
            json.dump(codec.to_plain(origin), file)
        return find_story(made.path)

    return make


def with_metrics_at_150(values):
    return [*TRAINING[:7], event(20, "metrics", step=150, values=values), *TRAINING[8:]]


def differing(rows):
    return {row.what: (row.one, row.other) for row in rows if row.differs}


def shown(one, other):
    both = compare(one, other)
    assert both.sentence.replace("'", "&#39;") in render_comparison(both, one, other)
    json.dumps(codec.to_plain(both), allow_nan=False)
    return both


def test_a_run_is_the_same_as_itself(run):
    both = shown(run("a"), run("b"))

    assert both.first is None
    assert both.num_common == 4
    assert "the same at all 4 steps" in both.sentence
    parts = (both.code, both.environment, both.data, both.loss)
    assert [differing(part) for part in parts] == [{}, {}, {}, {}]
    assert both.code_difference == ()


def test_the_first_step_that_differs_is_found_however_small_the_difference(run):
    other = with_metrics_at_150({"loss": 0.8 + 1e-12})

    first = shown(run("a"), run("b", training=other)).first

    assert (first.step, first.metric, first.equal_until, first.num_common) == (150, "loss", 100, 4)
    assert (first.one, first.other) == (0.8, 0.8 + 1e-12)


def test_of_a_step_that_was_done_again_the_last_counts(run):
    resumed = event(29, "resumed", step=0, world_size=4, folder="/snapshots")
    again = [*TRAINING, resumed, event(30, "metrics", step=50, values={"loss": 7.0})]

    both = shown(run("a"), run("b", training=again))
    assert (both.first.step, both.num_common) == (50, 1)


def test_means_of_other_steps_are_not_compared_after_a_run_was_continued_between_two_values(run):
    continued = [
        *TRAINING[:5],
        event(15, "resumed", step=110, world_size=4, folder="/snapshots"),
        event(20, "metrics", step=150, values={"loss": 0.79}),  # of 40 steps
        *TRAINING[8:],
    ]
    both = shown(run("a"), run("b", training=continued))
    assert both.first is None
    assert both.num_common == 3


def test_runs_that_record_more_and_less_often_are_not_called_the_same():
    one = {step: {"loss": Point(1.0, step - 10)} for step in (10, 20, 30, 40)}
    other = {step: {"loss": Point(2.0, step - 20)} for step in (20, 40)}
    assert first_difference(one, other) == (None, 0)
    other[40]["val"], one[40]["val"] = Point(1.0, 0), Point(2.0, 0)
    first, num_common = first_difference(one, other)
    assert (first.metric, first.equal_until, num_common) == ("val", None, 1)


def test_metrics_that_were_recorded_apart_at_one_step_are_both_compared(run):
    values = [event(24.3, "metrics", step=200, values={"val": value}) for value in (1.0, 2.0)]
    mine, theirs = ([*TRAINING, value] for value in values)
    both = shown(run("a", training=mine), run("b", training=theirs))
    assert (both.first.metric, both.first.step) == ("val", 200)
    theirs[8] = event(24, "metrics", step=200, values={"loss": 0.6})
    assert shown(run("c", training=mine), run("d", training=theirs)).first.metric == "loss"


def test_a_metric_that_only_one_run_has_is_no_difference():
    mine, theirs = Point(1.0, 0), Point(2.0, 0)
    assert first_difference({1: {"a": mine}}, {1: {"b": theirs}}) == (None, 0)
    assert first_difference({1: {"a": mine}}, {2: {"a": theirs}}) == (None, 0)


def test_values_that_are_not_finite_are_alike():
    nan, one = Point("nan", 0), Point(1.0, 0)
    assert first_difference({1: {"a": nan}}, {1: {"a": nan}})[0] is None
    assert first_difference({1: {"a": nan}}, {1: {"a": one}})[0].step == 1


def test_code_command_and_order_of_the_data_are_compared(run):
    code = replace(CODE, commit="c2", difference="+b\n")
    training = [{**TRAINING[0], "order": {"seed": 1, "num_samples": 40}}, *TRAINING[1:]]

    origin, args = replace(ORIGIN, code=code), ("--epochs", "3")
    both = shown(run("a"), run("b", training=training, origin=origin, args=args))

    of_commit = {"difference from the commit": ("one", "another one")}
    assert differing(both.code) == {"commit": ("c1", "c2"), **of_commit}
    assert both.code_difference[-2:] == ("-+a", "++b")
    commands = ("train.py --epochs 2", "train.py --epochs 3")
    assert differing(both.environment) == {"command": commands}
    assert differing(both.data) == {"seed": ("0", "1")}
    assert "different: code, command or environment, order of the data" in both.sentence


def test_runs_without_metrics_say_so(run):
    both = shown(run("a", training=None), run("b"))

    assert both.num_common == 0
    assert "no value of the same steps was recorded by both" in both.sentence


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ({"loss": float("nan")}, {"loss": float("inf")}, "loss: nan and inf"),
        ({"loss": float("nan")}, {"loss": 0.5}, "loss: nan and 0.5"),
        ({"loss": float("nan")}, {"loss": float("nan")}, None),
        ({"loss": 0.8}, {"loss": 0.8, "other": 0.9}, "Only b records other."),
        ({"loss": 0.5}, {}, "loss: 0.5 and none"),
    ],
)
def test_what_is_no_number_and_what_is_missing_are_not_the_same(run, one, other, told):
    mine, theirs = with_metrics_at_150(one), with_metrics_at_150(other)
    both = shown(run("a", training=mine), run("b", training=theirs))
    assert (told in both.sentence) if told else both.first is None


def test_packages_that_differ_are_named(run):
    mine = replace(ORIGIN, packages=("numpy==1.26.4", "torch==2.13.0"))
    theirs = replace(ORIGIN, packages=("numpy==2.4.6", "torch==2.13.0", "wandb==0.22"))
    both = shown(run("a", origin=mine), run("b", origin=theirs))
    assert differing(both.environment) == {
        "packages": ("2", "3"),
        "package numpy": ("1.26.4", "2.4.6"),
        "package wandb": ("not installed", "0.22"),
    }
    assert "different: command or environment" in both.sentence


def test_code_outside_of_git_is_compared_by_what_rank_0_has_run(run):
    nowhere = replace(ORIGIN, code=None, why_no_code="the script is in no git work tree")
    one, other = run("a", origin=nowhere), run("b", origin=nowhere)
    assert "the code is not known" in shown(one, other).sentence
    assert "not known" in render_comparison(compare(one, other), one, other)

    def with_file(story, digest):
        return replace(story, what=replace(story.what, ran=(("train.py", digest, False),)))

    both = shown(with_file(one, "a" * 64), with_file(other, "b" * 64))
    assert differing(both.code) == {"file train.py": ("a" * 12, "b" * 12)}
    assert "different: code" in both.sentence
    same = shown(with_file(one, "a" * 64), with_file(other, "a" * 64))
    assert "code, command and order of the data are the same" in same.sentence


def test_a_run_that_is_much_slower_is_said_to_be_with_its_slowest_rank(run):
    def took(story, seconds):
        return replace(story, training=None, ending=replace(story.ending, elapsed_s=seconds))

    one, other = took(run("a"), 10.0), run("b")
    assert "times as long" not in shown(one, took(other, 11.0)).sentence
    told = " All of b took 2.9 times as long as of a (29.0 s and 10.0 s)."
    assert shown(one, took(other, 29.0)).sentence.endswith(told)
