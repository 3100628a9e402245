"""The story of a run: what its record tells, and what of a damaged or foreign one can still be said."""

import json
import math
import os

import pytest

from kit.command import call
from kit.records import (
    BEGAN,
    EVENTS,
    TRAINING,
    event,
    failure,
    lines,
    make_run,
    over,
    result,
    sample,
    start,
)
from kit.values import run_plan
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.plan import NodeSetup
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import HIDDEN
from torchmuster.errors import NotFoundError, UsageError
from torchmuster.multirun.sweep.plan import MetricChoice, MetricGoal, SweepPlan
from torchmuster.report.cli.report import report
from torchmuster.report.find import find_story
from torchmuster.report.page import render_page
from torchmuster.report.read import hide_in_arguments
from torchmuster.report.sheet import sheet_of


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    os.makedirs(tmp_path / "runs")
    return tmp_path / "runs" / "20260101-000000-train-ab12"


def story_of(folder):
    """Read a story, and see that it can be shown and is strict JSON."""
    found = find_story(str(folder))
    assert "<h1>" in render_page(found)
    json.dumps(codec.to_plain(found), allow_nan=False)
    return found


def test_attempts_are_joined_with_what_was_trained_in_them(folder):
    make_run(folder, ended=result())

    first, second = story_of(folder).attempts

    assert (first.has_failed, first.cause_rank) == (True, 3)
    assert first.ended_by == "SIGKILL in rank 3 on n2"
    assert (first.first_step, first.last_step, first.kept_step) == (0, 150, 100)
    assert first.kept_at == BEGAN + 9
    assert (second.first_step, second.last_step) == (100, 200)
    assert second.ended_by == "all workers ended well"
    # The others were asked to.
    assert [(end.rank, end.what) for end in first.ends] == [(3, "SIGKILL")]


def test_steps_that_were_done_again_are_kept_apart(folder):
    make_run(folder, ended=result())

    training = story_of(folder).training
    (loss,) = training.series

    assert (loss.steps, loss.values) == ((50, 100, 150, 200), (2.0, 1.0, 0.8, 0.5))
    assert (loss.redone_steps, loss.redone_values) == ((150,), (0.9,))
    assert (training.step, training.steps_done) == (200, 250)
    assert training.order == (("seed", "0"), ("num_samples", "40"))
    assert training.saves[0].done_at == BEGAN + 9.5


def test_each_node_second_is_of_one_kind(folder):
    make_run(folder, ended=result())

    cost = story_of(folder).cost

    assert cost.held_s == pytest.approx(2 * 25)
    assert cost.starting_s == pytest.approx(2 * 5)
    assert cost.lost_s == pytest.approx(2 * 2)  # from the save at 9 s to the failure at 11 s
    assert cost.restarting_s == pytest.approx(2 * 4)
    assert cost.kept_s == pytest.approx(2 * (4 + 10))
    assert cost.goodput == cost.most_goodput == pytest.approx(28 / 50)


def test_without_the_library_goodput_is_a_range(folder):
    make_run(folder, training=None, ended=result())

    found = story_of(folder)

    assert found.training is None
    # The last attempt's workers, 13 s to 25 s.
    assert found.cost.goodput == pytest.approx(2 * 12 / 50)
    assert found.cost.most_goodput == pytest.approx(2 * (12 + 8) / 50)
    assert any("does not use torchmuster.train" in gap for gap in found.gaps)


def test_a_run_that_ended_badly_has_lost_what_it_did_not_save(folder):
    events = [*EVENTS[:-1], failure(25, 1), over(25, "failed")]
    ended = result(RunState.FAILED, "rank 3 was killed", exit_code=137, saved_step=100)
    make_run(folder, events=events, ended=ended)

    found = story_of(folder)

    assert (found.ending.state, found.ending.sentence) == ("failed", "rank 3 was killed")
    assert found.ending.because[0] == "it said so"
    assert found.attempts[-1].kept_step == 100
    assert found.cost.kept_s == pytest.approx(2 * 4)


def test_ranks_are_compared_by_their_own_work(folder):
    slow = [sample(10 * n, steps=(n * 100,) * 3, data=(0.5, 0.5, 2.0)) for n in range(1, 6)]
    make_run(folder, samples=slow, ended=result())

    ranks, slowest = story_of(folder).ranks, story_of(folder).slowest

    assert (slowest.rank, slowest.node) == (2, "n2")
    assert slowest.own_s == pytest.approx((2.0 + 1.0 + 2.0) / 100)
    assert slowest.over_median == pytest.approx(5.0 / 3.5 - 1, abs=1e-3)
    assert ranks.totals[0].wait_s == pytest.approx(4.0)
    assert {value for row in ranks.own_ms for value in row[2:]} == {35.0, 50.0}


def test_the_first_sample_of_an_attempt_counts_for_no_rank(folder):
    first = sample(10, steps=(1000, 1000), data=(77.0, 77.0))
    make_run(folder, samples=[first, sample(20, steps=(1100, 1100))], ended=result())

    totals = story_of(folder).ranks.totals

    assert [(one.steps, one.phased_steps) for one in totals] == [(1100, 100), (1100, 100)]
    assert totals[0].own_s == pytest.approx((0.1 + 1.0 + 2.0) / 100)


def test_a_rank_of_which_a_sample_tells_no_phases_is_not_taken_for_a_fast_one(folder):
    partly = {**sample(20, steps=(200, 200)), "data_s": [1.0, None], "rest_s": [3.0, None]}
    rows = [sample(10, steps=(100, 100), data=()), partly, sample(30, steps=(300, 300))]
    make_run(folder, samples=rows, ended=result())

    assert [one.phased_steps for one in story_of(folder).ranks.totals] == [200, 100]
    assert [one.data_s for one in story_of(folder).ranks.totals] == [1.1, 0.1]


def test_after_a_few_steps_no_rank_is_called_slow(folder):
    rows = [sample(10 * n, steps=(n * 5,) * 2, data=(0.1, 9.0)) for n in (1, 2, 3)]
    make_run(folder, samples=rows, ended=result())

    assert story_of(folder).slowest is None


def test_a_sample_that_stands_for_a_long_time_fills_it(folder):
    long = [sample(0, steps=(1, 1)), sample(100, steps=(101, 101), over_s=100.0)]
    make_run(folder, samples=long, ended=result())

    row = story_of(folder).ranks.own_ms[0]

    assert len(row) > 8
    assert None not in row[2:]


def test_a_long_run_has_a_bounded_number_of_spans_of_time(folder):
    many = [sample(10 * n, steps=(n * 10,) * 2) for n in range(1, 1000)]
    make_run(folder, samples=many, ended=result())

    ranks = story_of(folder).ranks

    assert ranks.num_spans <= 240
    assert ranks.num_samples == 999
    assert ranks.totals[0].phased_steps == 9980  # all but the first sample's
    assert ranks.totals[0].data_s == pytest.approx(99.8)


def test_secrets_of_a_command_line_are_hidden(folder):
    args = ("--api-key", "abcdef", "--hf-token=xyz", "--num-tokens", "7", "http://u:pw1234@h/x")
    environment = (("WANDB_API_KEY", "abc"), ("OMP_NUM_THREADS", "4"))
    make_run(folder, ended=result(), args=args, node_setup=NodeSetup(environment=environment))

    what = story_of(folder).what

    assert what.command == (
        *("train.py", "--api-key", "<hidden>", "--hf-token=<hidden>", "--num-tokens", "7"),
        "http://u:<hidden>@h/x",
    )
    assert what.environment == (("WANDB_API_KEY", "<hidden>"), ("OMP_NUM_THREADS", "4"))


# What is missing, damaged, older, foreign or hostile.


def test_a_run_that_is_gone_is_named_and_so_is_a_folder_that_is_none(folder):
    with pytest.raises(NotFoundError, match="there is no run `gone`"):
        find_story("gone")
    with pytest.raises(NotFoundError, match="no run directory"):
        find_story(os.path.dirname(folder))


def test_a_run_of_another_user_is_said(folder, monkeypatch):
    make_run(folder)
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(folder))

    with pytest.raises(NotFoundError, match="can't be read") as raised:
        find_story(folder.name)
    assert "runs are private" in raised.value.why


def test_nothing_but_a_plan_is_a_story(folder):
    made = make_run(folder)
    for path in (made.events, made.training):
        os.remove(path)

    found = story_of(folder)

    assert found.num_attempts == 0
    assert any("has no event" in gap for gap in found.gaps)


@pytest.mark.parametrize(
    "name",
    ["plan.json", "result.json", "origin.json", "events.jsonl", "training.jsonl", "samples.jsonl"],
)
@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"time": 1, "event": {}}', "\x00\xff", "[" * 3000]
)
def test_a_damaged_file_is_said_and_the_rest_is_shown(folder, name, content):
    made = make_run(folder, samples=[sample(10)], ended=result())
    with open(os.path.join(made.path, name), "w", encoding="latin-1") as file:
        file.write(content)

    assert story_of(folder).name == "train-ab12"


def test_a_torn_last_line_is_counted(folder):
    made = make_run(folder, ended=result())
    with open(made.training, "a") as file:
        file.write('{"time": "2026')

    found = story_of(folder)

    assert found.training.step == 200
    assert any(gap.startswith("1 line of training.jsonl") for gap in found.gaps)


def test_a_result_of_another_version_is_read_as_far_as_it_goes(folder):
    events = [*EVENTS[:-1], over(25, "failed")]
    odd = {**result(RunState.FAILED, "rank 1 failed"), "new_field": 1}
    make_run(folder, events=events, ended=odd)

    ending = story_of(folder).ending

    assert (ending.state, ending.sentence) == ("failed", "rank 1 failed")


def test_values_that_are_no_numbers_are_named_and_leave_a_gap(folder):
    worst = [float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 10**400]
    rows = [
        TRAINING[0],
        *(event(6 + n, "metrics", step=n + 1, values={"loss": v}) for n, v in enumerate(worst)),
    ]
    make_run(folder, training=rows, ended=result())

    (loss,) = story_of(folder).training.series

    assert loss.not_finite == ((1, "nan"), (2, "+inf"), (3, "-inf"))
    assert loss.values == (None, None, None, 1e308, -1e308)


IS_BAD = ("Has it learned?", "last loss +inf (since step 2)", "bad")
HAS_SUCCEEDED = ("How did it end?", "succeeded", "good")


@pytest.mark.parametrize(
    ("name", "values", "first", "last"),
    [
        ("loss", [1.0, math.nan, math.inf], IS_BAD, "last loss +inf (since step 2)"),
        ("loss", [1.0, math.nan, 0.5], HAS_SUCCEEDED, "last loss 0.5"),
        ("f1", [1.0, math.nan, math.nan], HAS_SUCCEEDED, "last f1 nan (since step 2)"),
    ],
)
def test_the_first_card_of_a_run_whose_loss_is_not_finite_says_so(
    folder, name, values, first, last
):
    rows = [event(6 + n, "metrics", step=n + 1, values={name: v}) for n, v in enumerate(values)]
    make_run(folder, training=[TRAINING[0], *rows], ended=result())

    card, *others = sheet_of(story_of(folder)).answers

    assert (card.question, card.answer, card.tone) == first
    assert last in [one.more for one in others]


def test_of_ten_thousand_attempts_the_first_and_the_last_are_kept(folder):
    events = [event(0, "run_started")]
    for n in range(10_000):
        events += [start(n, n), failure(n + 0.5, n, what=f"cause {n % 3}")]
    make_run(folder, events=events, training=None, ended=result(RunState.FAILED, "no more"))

    found = story_of(folder)

    assert found.num_attempts == 10_000
    assert (len(found.attempts), found.attempts[-1].number) == (200, 9_999)
    assert dict(found.causes) == {"cause 0": 3334, "cause 1": 3333, "cause 2": 3333}
    assert len(render_page(found)) < 2_000_000


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'\x1b[31m\x00\u202e"


def test_hostile_names_are_text(folder):
    nodes = [{"node": HOSTILE, "host": HOSTILE, "ranks": HOSTILE}]
    pair = [0, 1, HOSTILE, None, None]
    events = [
        event(0, "run_started"),
        start(1, 0, why=HOSTILE, nodes=nodes),
        event(2, "notice", text=HOSTILE),
        event(3, "worker_ended", attempt=0, rank=1, node=HOSTILE, what=HOSTILE),
        event(3, "worker_ended", attempt=0, rank=2, node=HOSTILE, what=HOSTILE),
        failure(3, 0, what=HOSTILE, node=HOSTILE, tail=[HOSTILE]),
        event(4, "network", interface=HOSTILE, nodes=[HOSTILE, "b"], pairs=[pair]),
        event(4, "preflight", form="short", findings=[], software=[{"python": HOSTILE}]),
    ]
    training = [event(2, "resumed", step=0, folder=HOSTILE, order={HOSTILE: HOSTILE})]
    training += [event(2 + n, "metrics", step=n, values={HOSTILE: 1.0}) for n in (1, 2)]
    samples = [{**sample(n * 10, steps=(n, n)), "nodes": [HOSTILE, HOSTILE]} for n in (1, 2)]
    ended = result(RunState.FAILED, HOSTILE)
    made = make_run(folder, events, training, samples, ended, args=(HOSTILE,))
    code = {"root": HOSTILE, "branch": HOSTILE, "commit": "c", "difference": f"+{HOSTILE}"}
    code |= {"num_changed": 1, "changed": [HOSTILE]}
    origin = {"user": HOSTILE, "host": HOSTILE, "torchmuster": "1", "python": "3", "code": code}
    with open(made.origin, "w") as file:
        json.dump(origin, file)

    page = render_page(find_story(str(folder)))

    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert" not in page
    assert "<img" not in page
    assert page.count("<script>") == 1
    assert not {"\x1b", "\x00", "\u202e"} & set(page)


def test_a_link_or_name_cannot_leave_the_record(folder):
    made = make_run(folder)
    os.remove(made.events)
    os.mkdir(made.events)

    assert any("events.jsonl can't be read" in gap for gap in story_of(folder).gaps)


def test_only_lines_that_are_objects_count(folder):
    make_run(folder, ended=result())
    odd = [1, [], "x", {"time": "yesterday", "nodes": ["a"]}, {"nodes": 3}]
    lines(RunDir(str(folder)).samples, odd)

    found = story_of(folder)

    assert found.ranks is None
    assert any("samples.jsonl" in gap for gap in found.gaps)


# The story of a workflow: its groups and tasks, and the runs of its training tasks.


PLAN = {
    "name": "pipe",
    "groups": [
        {"name": "prepare", "after": [], "tasks": [{"name": "make", "lead": True}]},
        {"name": "learn", "after": ["prepare"], "tasks": [{"name": "train"}, {"name": "watch"}]},
    ],
}
OUTCOME = {"group": "learn", "state": "FAILED", "exit_code": 3, "elapsed_s": 5.0}
OUTCOME |= {"report": {"error": "task train failed: exit code 3"}}


def state(after_s, task, word, attempt=0, **fields):
    return event(after_s, "task_state", task=task, state=word, attempt=attempt, **fields)


@pytest.fixture
def run_dir(tmp_path):
    made = RunDir(str(tmp_path / "20260101-000000-pipe-ab12"))
    for group in ("prepare", "learn"):
        os.makedirs(made.group(group).path)
    with open(made.workflow, "w") as file:
        json.dump(PLAN, file)
    prepared = event(1, "group_state", group="prepare", state="COMPLETED")
    lines(made.events, [event(0, "workflow_started"), prepared])
    started = [event(1, "task_started", task="make"), state(1, "make", "RUNNING")]
    lines(made.group("prepare").events, [*started, state(4, "make", "COMPLETED", code=0)])
    tries = [event(5, "task_started", task="train"), state(6, "train", "RESCHEDULED")]
    tries += [event(7, "task_started", task="train", attempt=1)]
    ended = state(9, "train", "FAILED", attempt=1, why="exit code 3", code=3)
    lines(made.group("learn").events, [*tries, ended])
    with open(made.group("learn").result, "w") as file:
        json.dump(OUTCOME, file)
    return made


def story_and_page(run_dir):
    found = find_story(run_dir.path)
    json.dumps(codec.to_plain(found), allow_nan=False)
    return found, render_page(found)


def test_tasks_have_their_times_attempts_and_ends(run_dir):
    story, page = story_and_page(run_dir)

    assert story.kind == "workflow"
    (make,), (train, watch) = (group.tasks for group in story.groups)
    assert (make.state, make.attempts) == ("COMPLETED", 1)
    assert (make.began, make.ended) == (BEGAN + 1, BEGAN + 4)
    assert (train.state, train.attempts, train.why, train.code) == ("FAILED", 2, "exit code 3", 3)
    assert (watch.began, watch.attempts) == (None, 0)
    assert [(g.name, g.state, g.after) for g in story.groups] == [
        ("prepare", "COMPLETED", ()),
        ("learn", "FAILED", ("prepare",)),
    ]
    assert "task train failed: exit code 3" in page


def test_a_training_task_has_its_own_run_in_the_page(run_dir):
    for attempt in (0, 1):
        folder = run_dir.training_folder("train", attempt)
        make_run(os.path.join(folder, f"run-{attempt}"), ended=result())

    story, page = story_and_page(run_dir)

    ((name, training),) = story.trainings
    assert (name, training.name, training.training.step) == ("train", "run-1", 200)
    assert 'href="#t0-run"' in page
    assert 'id="t0-run"' in page
    assert page.count('id="t0-metrics"') == 1


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", '{"groups": 3}'),
        '{"groups": [1, {"name": "../x", "tasks": [2, {"name": "/y"}]}]}',
    ],
)
def test_a_damaged_plan_is_said(run_dir, content):
    with open(run_dir.workflow, "w") as file:
        file.write(content)

    story, page = story_and_page(run_dir)

    assert story.name == "pipe-ab12"
    assert "<h1>" in page


def test_two_workflows_are_not_compared(run_dir):
    with pytest.raises(UsageError, match="is a workflow"):
        call(report, run_dir.path, run_dir.path)


# The page of a sweep: members with their values, sorted by the metric; two sweeps are not compared.


VALUES = [0.5, math.nan, 0.25, None, 0.9]


def made(folder, goal=MetricGoal.MIN, values=VALUES):
    run_dir = RunDir(str(folder / "20270115-080000-tune-3f2a"))
    os.makedirs(run_dir.path)
    run = run_plan(run_id="20270115-080000-tune-3f2a", target="train.py", python=("python",))
    members = tuple((f"1e-{n}", "x<y") for n in range(len(values)))
    metric = MetricChoice(name="loss", goal=goal)
    plan = SweepPlan(run=run, names=("lr", "<b>"), members=members, metric=metric)
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


def test_the_page_has_a_table_of_members_and_each_parameter_against_the_metric(tmp_path):
    page = render_page(find_story(made(tmp_path).path))
    assert "<h1>Sweep tune-3f2a</h1>" in page
    assert "Which member is the best?" in page
    assert page.count('<th scope="row" class="n">') == len(VALUES)
    assert "exit code 3" in page
    assert "x&lt;y" in page
    assert "samples.jsonl" not in page, "no gaps of a run that it is not"
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
    sweep = made(tmp_path).path
    with pytest.raises(UsageError, match="is a sweep") as caught:
        call(report, sweep, sweep)
    assert caught.value.fix == "two of its members are: muster report tune-3f2a.0 tune-3f2a.1"


def test_the_word_after_an_option_is_hidden():
    hidden = hide_in_arguments(["--token", "abc", "--lr", "1", "--token", "--x"])
    assert hidden == ("--token", HIDDEN, "--lr", "1", "--token", "--x")
