"""The story of a run: what its record tells, and what of a damaged or foreign one can still be said."""

import json
import math
import os

import pytest

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
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import HIDDEN
from torchmuster.errors import NotFoundError
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

    assert (first.has_failed, first.ended_by, first.cause_rank) == (
        True,
        "SIGKILL in rank 3 on n2",
        3,
    )
    assert (first.first_step, first.last_step, first.kept_step) == (0, 150, 100)
    assert first.kept_at == BEGAN + 9
    assert (second.first_step, second.last_step, second.ended_by) == (
        100,
        200,
        "all workers ended well",
    )
    assert [(end.rank, end.what) for end in first.ends] == [
        (3, "SIGKILL")
    ]  # the others were asked to


def test_steps_that_were_done_again_are_kept_apart(folder):
    make_run(folder, ended=result())

    training = story_of(folder).training
    (loss,) = training.series

    assert dict(zip(loss.steps, loss.values, strict=True)) == {
        50: 2.0,
        100: 1.0,
        150: 0.8,
        200: 0.5,
    }
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
    assert found.cost.goodput == pytest.approx(
        2 * 12 / 50
    )  # the last attempt's workers, 13 s to 25 s
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
    from torchmuster.core.model.plan import NodeSetup

    make_run(folder, ended=result(), args=args, node_setup=NodeSetup(environment=environment))

    what = story_of(folder).what

    assert what.command == (
        *("train.py", "--api-key", "<hidden>", "--hf-token=<hidden>", "--num-tokens", "7"),
        "http://u:<hidden>@h/x",
    )
    assert what.environment == (("WANDB_API_KEY", "<hidden>"), ("OMP_NUM_THREADS", "4"))


# What is missing, damaged, older, foreign or hostile.


def test_a_run_that_is_gone_is_named(folder):
    with pytest.raises(NotFoundError, match="there is no run `gone`"):
        find_story("gone")


def test_a_folder_that_is_no_run_is_said(tmp_path):
    with pytest.raises(NotFoundError, match="no run directory"):
        find_story(str(tmp_path))


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


@pytest.mark.parametrize(
    ("name", "values", "first"),
    [
        (
            "loss",
            [1.0, math.nan, math.inf],
            ("Has it learned?", "last loss +inf (since step 2)", "bad"),
        ),
        ("loss", [1.0, math.nan, 0.5], ("How did it end?", "succeeded", "good")),
        ("f1", [1.0, math.nan, math.nan], ("How did it end?", "succeeded", "good")),
    ],
)
def test_the_first_card_of_a_run_whose_loss_is_not_finite_says_so(folder, name, values, first):
    rows = [event(6 + n, "metrics", step=n + 1, values={name: v}) for n, v in enumerate(values)]
    make_run(folder, training=[TRAINING[0], *rows], ended=result())

    card, *others = sheet_of(story_of(folder)).answers

    assert (card.question, card.answer, card.tone) == first
    last = (
        "0.5"
        if values[-1] == 0.5
        else f"{'+inf' if values[-1] == math.inf else 'nan'} (since step 2)"
    )
    assert f"last {name} {last}" in [one.more for one in others]


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
    events = [
        event(0, "run_started"),
        start(1, 0, why=HOSTILE, nodes=nodes),
        event(2, "notice", text=HOSTILE),
        event(3, "worker_ended", attempt=0, rank=1, node=HOSTILE, what=HOSTILE),
        event(3, "worker_ended", attempt=0, rank=2, node=HOSTILE, what=HOSTILE),
        failure(3, 0, what=HOSTILE, node=HOSTILE, tail=[HOSTILE]),
        event(
            4,
            "network",
            interface=HOSTILE,
            nodes=[HOSTILE, "b"],
            pairs=[[0, 1, HOSTILE, None, None]],
        ),
        event(4, "preflight", form="short", findings=[], software=[{"python": HOSTILE}]),
    ]
    training = [event(2, "resumed", step=0, folder=HOSTILE, order={HOSTILE: HOSTILE})]
    training += [event(2 + n, "metrics", step=n, values={HOSTILE: 1.0}) for n in (1, 2)]
    samples = [{**sample(n * 10, steps=(n, n)), "nodes": [HOSTILE, HOSTILE]} for n in (1, 2)]
    made = make_run(
        folder, events, training, samples, result(RunState.FAILED, HOSTILE), args=(HOSTILE,)
    )
    code = {
        "root": HOSTILE,
        "branch": HOSTILE,
        "commit": "c",
        "difference": f"+{HOSTILE}",
        "num_changed": 1,
        "changed": [HOSTILE],
    }
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
    lines(
        RunDir(str(folder)).samples,
        [1, [], "x", {"time": "yesterday", "nodes": ["a"]}, {"nodes": 3}],
    )

    found = story_of(folder)

    assert found.ranks is None
    assert any("samples.jsonl" in gap for gap in found.gaps)


def test_the_word_after_an_option_is_hidden():
    assert hide_in_arguments(["--token", "abc", "--lr", "1", "--token", "--x"]) == (
        "--token",
        HIDDEN,
        "--lr",
        "1",
        "--token",
        "--x",
    )
