"""The page of a sweep: members with their values, sorted by the metric; two sweeps are not compared."""

import json
import math
import os

import pytest

from kit.records import event, lines
from kit.values import run_plan
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.errors import UsageError
from torchmuster.multirun.sweep.plan import MetricChoice, MetricGoal, SweepPlan
from torchmuster.report.cli.report import _two
from torchmuster.report.find import find_story
from torchmuster.report.page import render_page

VALUES = [0.5, math.nan, 0.25, None, 0.9]


def made(folder, goal=MetricGoal.MIN, values=VALUES):
    run_dir = RunDir(str(folder / "20270115-080000-tune-3f2a"))
    os.makedirs(run_dir.path)
    run = run_plan(run_id="20270115-080000-tune-3f2a", target="train.py", python=("python",))
    plan = SweepPlan(
        run=run,
        names=("lr", "<b>"),
        members=tuple((f"1e-{n}", "x<y") for n in range(len(values))),
        metric=MetricChoice(name="loss", goal=goal),
    )
    with open(run_dir.sweep, "w") as file:
        json.dump(codec.to_plain(plan), file)
    rows = [event(0, "sweep_started")]
    for number, value in enumerate(values):
        rows.append(event(1, "member_started", member=number, attempt=0))
        state, why = ("succeeded", None) if value is not None else ("failed", "exit code 3")
        ended = {"state": state, "exit_code": 0, "elapsed_s": 5.0, "why": why}
        told = {"value": value, "step": 10} if value is not None else {}
        rows.append(event(9, "member_ended", member=number, **ended, **told))
    lines(run_dir.events, [*rows, event(10, "sweep_ended")])
    return run_dir


@pytest.mark.parametrize(
    ("goal", "order"), [(MetricGoal.MIN, [2, 0, 4, 1, 3]), (MetricGoal.MAX, [4, 0, 2, 1, 3])]
)
def test_members_are_sorted_by_the_metric(tmp_path, goal, order):
    story = find_story(made(tmp_path, goal).path)
    assert [member.number for member in story.sweep.members] == order
    assert story.sweep.best == order[0]
    assert [member.not_finite for member in story.sweep.members][3] == "nan"
    json.dumps(codec.to_plain(story), allow_nan=False)


def test_the_page_has_a_table_of_members(tmp_path):
    page = render_page(find_story(made(tmp_path).path))
    assert "<h1>Sweep tune-3f2a</h1>" in page
    assert "Which member is the best?" in page
    assert page.count('<th scope="row" class="n">') == len(VALUES)
    assert "exit code 3" in page
    assert "x&lt;y" in page
    assert "samples.jsonl" not in page, "no gaps of a run that it is not"


def test_the_page_shows_each_parameter_against_the_metric(tmp_path):
    page = render_page(find_story(made(tmp_path).path))
    assert "<h3>loss against lr</h3>" in page
    assert (page.count('class="dot best"'), page.count('class="dot"')) == (1, 2)


def test_a_sweep_of_another_version_says_what_is_not_known(tmp_path):
    run_dir = made(tmp_path)
    with open(run_dir.sweep, "w") as file:
        file.write("{}")
    story = find_story(run_dir.path)
    assert any("sweep.json can't be read" in gap for gap in story.gaps)
    assert "No member is known" in render_page(story)


def test_sweeps_are_not_compared_but_their_members_are(tmp_path):
    story = find_story(made(tmp_path).path)
    with pytest.raises(UsageError, match="is a sweep") as caught:
        _two(story, story, None, as_json=False)
    assert caught.value.fix == "two of its members are: muster report tune-3f2a.0 tune-3f2a.1"
