"""Two runs: what differs, and from which step on."""

import json
from dataclasses import replace

import pytest

from kit.records import TRAINING, event, make_run, result
from torchmuster.core.model import codec
from torchmuster.launcher.owner.origin import CodeVersion, Origin
from torchmuster.report.compare import compare, first_difference
from torchmuster.report.find import find_story
from torchmuster.report.pair_page import render_comparison

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
    other = [*TRAINING[:-1], event(24.15, "metrics", step=150, values={"loss": 0.8 + 1e-12})]

    first = shown(run("a"), run("b", training=other)).first

    assert (first.step, first.metric, first.equal_until, first.num_common) == (150, "loss", 100, 4)
    assert (first.one, first.other) == (0.8, 0.8 + 1e-12)


def test_of_a_step_that_was_done_again_the_last_counts(run):
    again = [*TRAINING, event(30, "metrics", step=50, values={"loss": 7.0})]

    assert shown(run("a"), run("b", training=again)).first.step == 50


def test_a_metric_that_only_one_run_has_is_no_difference():
    assert first_difference({1: {"a": 1.0}}, {1: {"b": 2.0}}) == (None, 1)
    assert first_difference({1: {"a": 1.0}}, {2: {"a": 2.0}}) == (None, 0)


def test_values_that_are_not_finite_are_alike():
    assert first_difference({1: {"a": None}}, {1: {"a": None}})[0] is None
    assert first_difference({1: {"a": None}}, {1: {"a": 1.0}})[0].step == 1


def test_code_command_and_order_of_the_data_are_compared(run):
    code = replace(CODE, commit="c2", difference="+b\n")
    training = [{**TRAINING[0], "order": {"seed": 1, "num_samples": 40}}, *TRAINING[1:]]

    both = shown(
        run("a"),
        run("b", training=training, origin=replace(ORIGIN, code=code), args=("--epochs", "3")),
    )

    assert differing(both.code) == {
        "commit": ("c1", "c2"),
        "difference from the commit": ("one", "another one"),
    }
    assert both.code_difference[-2:] == ("-+a", "++b")
    assert differing(both.environment) == {
        "command": ("train.py --epochs 2", "train.py --epochs 3")
    }
    assert differing(both.data) == {"seed": ("0", "1")}
    assert "different: code, command or environment, order of the data" in both.sentence


def test_runs_without_metrics_say_so(run):
    both = shown(run("a", training=None), run("b"))

    assert both.num_common == 0
    assert "No step was recorded by both" in both.sentence


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
    def training(values):
        return [*TRAINING[:-1], event(24.15, "metrics", step=150, values=values)]

    both = shown(run("a", training=training(one)), run("b", training=training(other)))
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
