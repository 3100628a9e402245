"""The story of a workflow: its groups and tasks, and the runs of its training tasks."""

import json
import os

import pytest

from kit.records import BEGAN, event, lines, make_run, result
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.report.find import find_story
from torchmuster.report.page import render_page

PLAN = {
    "name": "pipe",
    "groups": [
        {"name": "prepare", "after": [], "tasks": [{"name": "make", "lead": True}]},
        {"name": "learn", "after": ["prepare"], "tasks": [{"name": "train"}, {"name": "watch"}]},
    ],
}
OUTCOME = {
    "group": "learn",
    "state": "FAILED",
    "exit_code": 3,
    "elapsed_s": 5.0,
    "report": {"error": "task train failed: exit code 3"},
}


def state(after_s, task, word, attempt=0, **fields):
    return event(after_s, "task_state", task=task, state=word, attempt=attempt, **fields)


@pytest.fixture
def run_dir(tmp_path):
    made = RunDir(str(tmp_path / "20260101-000000-pipe-ab12"))
    for group in ("prepare", "learn"):
        os.makedirs(made.group(group).path)
    with open(made.workflow, "w") as file:
        json.dump(PLAN, file)
    lines(
        made.events,
        [event(0, "workflow_started"), event(1, "group_state", group="prepare", state="COMPLETED")],
    )
    started = [event(1, "task_started", task="make"), state(1, "make", "RUNNING")]
    lines(made.group("prepare").events, [*started, state(4, "make", "COMPLETED", code=0)])
    tries = [
        event(5, "task_started", task="train"),
        state(6, "train", "RESCHEDULED"),
        event(7, "task_started", task="train", attempt=1),
    ]
    lines(
        made.group("learn").events,
        [*tries, state(9, "train", "FAILED", attempt=1, why="exit code 3", code=3)],
    )
    with open(made.group("learn").result, "w") as file:
        json.dump(OUTCOME, file)
    return made


def story_of(run_dir):
    found = find_story(run_dir.path)
    json.dumps(codec.to_plain(found), allow_nan=False)
    return found, render_page(found)


def test_tasks_have_their_times_attempts_and_ends(run_dir):
    story, page = story_of(run_dir)

    assert story.kind == "workflow"
    (make,), (train, watch) = (group.tasks for group in story.groups)
    assert (make.state, make.began, make.ended, make.attempts) == (
        "COMPLETED",
        BEGAN + 1,
        BEGAN + 4,
        1,
    )
    assert (train.state, train.attempts, train.why, train.code) == ("FAILED", 2, "exit code 3", 3)
    assert (watch.began, watch.attempts) == (None, 0)
    assert [(g.name, g.state, g.after) for g in story.groups] == [
        ("prepare", "COMPLETED", ()),
        ("learn", "FAILED", ("prepare",)),
    ]
    assert "task train failed: exit code 3" in page


def test_a_training_task_has_its_own_run_in_the_page(run_dir):
    for attempt in (0, 1):
        make_run(
            os.path.join(run_dir.training_folder("train", attempt), f"run-{attempt}"),
            ended=result(),
        )

    story, page = story_of(run_dir)

    ((name, training),) = story.trainings
    assert (name, training.name, training.training.step) == ("train", "run-1", 200)
    assert 'href="#t0-run"' in page
    assert 'id="t0-run"' in page
    assert page.count('id="t0-metrics"') == 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"groups": 3}',
        '{"groups": [1, {"name": "../x", "tasks": [2, {"name": "/y"}]}]}',
    ],
)
def test_a_damaged_plan_is_said(run_dir, content):
    with open(run_dir.workflow, "w") as file:
        file.write(content)

    story, page = story_of(run_dir)

    assert story.name == "pipe-ab12"
    assert "<h1>" in page


def test_two_workflows_are_not_compared(run_dir):
    from torchmuster.errors import UsageError
    from torchmuster.report.cli.report import report

    with pytest.raises(UsageError, match="is a workflow"):
        report.main([run_dir.path, run_dir.path], standalone_mode=False)
