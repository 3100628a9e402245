"""The picture of a run in 80 columns: step, what is left, what is slow, why attempts ended; and whatever is odd in it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.tables import words
from torchmuster.launcher.model.live import LiveAttempt, LiveRow, LiveTask, ProgressBar
from torchmuster.report.cli.top_screen import read_keys
from torchmuster.report.top import (
    CancelRun,
    Known,
    Leave,
    OnScreen,
    OpenRun,
    Page,
    ShowFile,
    ShowLog,
    ShowStacks,
    ViewState,
    draw,
    press,
    run_picture,
)
from unit.launcher.model.samples import NOW, run_of, sample_of

RUN = ViewState(page=Page.RUN, run_id="20270115-080000-train-3f2a")
SIZES = [(80, 24), (40, 10), (200, 60), (1, 1)]


def shown(run, state=RUN, columns=80, rows=24, unicode=True):
    frame = draw(state, Known(run=run), columns, rows, unicode=unicode)
    return [line.text.rstrip() for line in frame.lines]


@pytest.fixture
def golden_picture(golden):
    """Return a check that the picture of a run is the golden one, and fits."""

    def check(case, run, rows=24):
        first, *lines = shown(run, rows=rows)
        first = first[:-8] + "12:00:00"  # the clock of this machine's zone
        golden("top.txt", case, "\n".join([first, *lines]) + "\n")
        assert max(map(len, [first, *lines])) <= 80

    return check


def test_a_run_in_80_columns(golden_picture):
    run = run_of(sample_of(4, slow=3, gpu_percent=(90, 91, 92, 35), gpu_mib=(70_000,) * 4))
    golden_picture("a run", run)


@pytest.mark.parametrize(("columns", "width"), [(80, 24), (120, 44), (200, 124)])
def test_the_curve_takes_the_columns_that_nothing_else_needs(columns, width):
    falling = tuple(1 / (1 + n) for n in range(400))
    run = run_of(training=replace(run_of().training, curve=falling))
    picture = draw(ViewState(page=Page.RUN), Known(run=run), columns, 40)
    (loss,) = [one.text for one in picture.lines if one.text.startswith("loss")]
    assert sum(letter in "▁▂▃▄▅▆▇█" for letter in loss) == width
    assert len(loss) <= columns


def test_a_plain_script_has_its_bar_and_no_steps(golden_picture):
    bar = ProgressBar(done=369, total=1000, speed="30.1it/s", left="00:21")
    run = run_of(sample_of(4, plain=True), training=None, bar=bar, network="", ends_at=None)
    golden_picture("a plain script", run)


def test_a_queued_run_says_what_it_waits_for(golden_picture):
    nothing = {"elapsed_s": None, "attempts": (), "num_attempts": 0, "training": None}
    nothing |= {"network": "", "ends_at": None}
    job = (
        "job 17 is pending: other jobs have a higher priority (Priority), expected to start"
        " 2027-01-15T09:30:00"
    )
    waits = "n2: staging /data/train.tar: 3 GiB of 12 GiB (25 %), 512 MiB/s, 18 s left"
    run = run_of(state="waiting", job=job, waits=waits, **nothing)
    golden_picture("a queued run", run, rows=8)


@pytest.mark.parametrize(("columns", "rows"), SIZES)
def test_a_picture_has_the_lines_of_its_screen_whatever_the_run(columns, rows):
    odd = run_of(
        sample_of(512, slow=511),
        run_id="x" * 300,
        command="\x1b[31mred\x07\n" * 20,
        place="\u202eevil",
        problems=("plan.json is half written",),
        said=("line\nline",) * 4,
        tasks=(),
        ended_by="why\x00",
    )
    for page in Page:
        frame = draw(replace(RUN, page=page), Known(run=odd, text=["\x1b]0;x\x07"]), columns, rows)
        text = "".join(line.text for line in frame.lines)
        assert len(frame.lines) == max(rows, 2)
        assert not any(ord(letter) < 32 or letter == "\u202e" for letter in text)


def test_numbers_that_are_none_are_shown_by_their_names():
    training = replace(run_of().training, values=(("loss", math.nan),), curve=(1.0, math.nan))
    training = replace(training, not_finite=(("loss", 7),))
    lines = shown(run_of(sample_of(2), training=training))
    assert any(line.startswith("loss        nan (since step 7)") for line in lines)


def test_ten_thousand_attempts_are_counted_and_the_last_are_listed():
    one = LiveAttempt(number=0, num_workers=4, num_nodes=2, began_at=NOW - 10, ended_at=NOW - 9)
    numbers = range(9800, 10_000)
    attempts = tuple(replace(one, number=n, ended_by=f"why {n}") for n in numbers)
    run = run_of(attempts=attempts, num_attempts=10_000)
    text = "\n".join(shown(run))
    assert "attempts    10000" in text
    assert "why 9999" in text
    last = shown(run, replace(RUN, page=Page.ATTEMPTS, first=10_000))
    assert "and 9800 before them" in "\n".join(last)


def test_old_numbers_are_called_old():
    run = run_of(sample_of(2), sample_at=NOW - 90, unheard="the head can't be reached from here")
    text = "\n".join(shown(run))
    assert "as of 1 min 30 s ago, from the record" in text
    assert "head        the head can't be reached from here" in text


def test_without_unicode_everything_is_ascii():
    text = "".join(shown(run_of(sample_of(2)), unicode=False))
    assert text.isascii()


def test_a_workflow_shows_its_tasks():
    task = LiveTask(group="g", name="train", state="FAILED", attempt=2, why="exit code 1")
    assert any("train  FAILED  2" in line for line in shown(run_of(tasks=(task,))))


def test_the_list_of_runs_keeps_the_chosen_one_on_the_screen():
    usual = {"state": "running", "place": "local", "num_workers": 4, "why": "train.py"}
    usual |= {"left_s": 60.0, "elapsed_s": 10.0}
    rows = [LiveRow(run_id=f"20270115-0800{n:02}-train-{n:04}", step=n, **usual) for n in range(50)]
    state = ViewState(chosen_run=rows[49].run_id, first=40)
    lines = [line.text for line in draw(state, Known(runs=rows), 80, 24).lines]
    assert lines[0].split()[:3] == ["RUN", "STATE", "ON"]
    assert any(line.startswith("> train-0049") for line in lines)


def test_as_plain_text_every_rank_is_there():
    lines = run_picture(run_of(sample_of(100, slow=7)), 200)
    assert sum(" n" in line.text and "data" in line.text for line in lines) >= 100


def test_each_metric_has_a_curve_where_there_is_room_else_its_value_behind_the_first():
    curves = (("accuracy", (0.5, 0.7, 0.9, 0.97)), ("lr", (0.01, 0.005)))
    values = (("loss", 0.1312), ("accuracy", 0.97), ("lr", 0.005))
    training = replace(run_of().training, values=values, curves=curves)
    run = run_of(sample_of(4), training=training)

    tall, small = shown(run, rows=40), shown(run, rows=14)

    def of(lines, name):
        return [text for text in lines if text.startswith(name)]

    assert "▁" in of(tall, "accuracy")[0]
    assert "▁" in of(tall, "lr")[0]
    assert "0.5 < 0.97" in of(tall, "accuracy")[0]
    assert not of(small, "accuracy")
    assert "accuracy 0.97  lr 0.005" in of(small, "loss")[0]
    assert sum("RANK" in text for text in small) == 1


@pytest.mark.parametrize(("rows", "is_shown"), [(40, True), (18, False)])
def test_the_end_of_the_log_fills_the_rows_that_are_left(rows, is_shown):
    tail = (2, [f"line {n}" for n in range(50)])
    frame = draw(RUN, Known(run=run_of(sample_of(4)), tail=tail), 80, rows)
    lines = [line.text.rstrip() for line in frame.lines]

    assert len(lines) == rows
    assert ("log of rank 2" in lines) is is_shown
    assert (lines[-2] == "line 49") is is_shown


@pytest.mark.parametrize(("unicode", "bar"), [(True, "█████░ 90%"), (False, "#####. 90%")])
def test_a_wide_table_has_bars(unicode, bar):
    run = run_of(sample_of(4, gpu_percent=(90, 91, 92, 0), gpu_mib=(70_000,) * 4))

    assert not any(bar in text for text in shown(run, columns=100, unicode=unicode))
    wide = shown(run, columns=120, rows=30, unicode=unicode)
    assert any(bar in text for text in wide)
    assert max(map(len, wide)) <= 120


# Keys change what is looked at; a run is cancelled only by two answers.


SHOWN = OnScreen(ranks=tuple(range(100)), num_rows=10)


def type_in(state, keys, shown=SHOWN):
    orders = []
    for key in keys:
        state, order = press(state, key, shown)
        orders += [order] if order is not None else []
    return state, orders


def test_cancel_is_asked_twice():
    assert type_in(RUN, ["c"])[1] == []
    assert type_in(RUN, ["c", "y"])[1] == []
    assert type_in(RUN, ["c", "y", "y"])[1] == [CancelRun()]


@pytest.mark.parametrize("keys", ["cc", "cyn", "cny", "cyq", "yy", "ycy"])
def test_anything_else_than_two_answers_cancels_nothing(keys):
    assert CancelRun() not in type_in(RUN, keys)[1]


def test_a_run_that_has_ended_is_not_cancelled():
    _state, orders = type_in(RUN, ["c", "y", "y"], replace(SHOWN, is_over=True))
    assert orders == []


def test_the_way_into_a_run_its_log_and_back():
    state, orders = type_in(ViewState(), ["down", "enter"], OnScreen(runs=("a", "b"), num_rows=5))
    assert (state.page, orders) == (Page.RUN, [OpenRun("a")])
    state, orders = type_in(state, ["j", "j", "l"])
    assert (state.page, orders) == (Page.TEXT, [ShowLog(1)])
    state, orders = type_in(state, ["q", "s"])
    assert (state.page, orders) == (Page.TEXT, [ShowStacks(1)])
    state, orders = type_in(state, ["escape", "?", "q", "q", "q"])
    assert (state.page, orders) == (Page.OVERVIEW, [OpenRun(None), Leave()])


def test_a_run_that_was_named_ends_with_q():
    assert type_in(replace(RUN, is_alone=True), ["q"])[1] == [Leave()]
    assert type_in(replace(RUN, is_alone=True), ["escape"])[1] == []


def test_a_filter_is_typed_and_taken_away():
    state, orders = type_in(RUN, ["f", *"n1x", "backspace", "enter"])
    assert (state.word, orders) == ("n1", [])
    assert type_in(state, ["escape"])[0].word == ""
    assert type_in(RUN, ["f", *"cyy", "q"])[1] == [], "letters of a filter are no keys"


def test_the_chosen_rank_stays_on_the_screen():
    state, _ = type_in(RUN, ["down"] * 15)
    assert (state.chosen_rank, state.first) == (14, 5)
    state, _ = type_in(state, ["end"])
    assert (state.chosen_rank, state.first) == (99, 90)
    state, _ = type_in(state, ["home"])
    assert (state.chosen_rank, state.first) == (0, 0)


ATTEMPTS = run_of().attempts[::-1]  # the newest first, as they are listed


def test_the_log_of_an_earlier_attempt_is_that_of_the_rank_that_ended_it():
    ended = (ATTEMPTS[0], replace(ATTEMPTS[1], cause_rank=1))
    listed = replace(SHOWN, attempts=ended, num_ranks=4)
    state, orders = type_in(RUN, ["a", "down", "enter"], listed)
    assert (state.page, state.title) == (Page.TEXT, "log of rank 1 in attempt 0")
    assert orders == [ShowLog(1, attempt=0)]
    state, orders = type_in(state, ["n", "n", "n", "p"], listed)
    assert orders[-1] == ShowLog(3, attempt=0), "behind the last comes the first"
    state, _ = type_in(state, ["q"], listed)
    assert state.page is Page.ATTEMPTS
    assert type_in(state, ["q"], listed)[0].page is Page.RUN


def test_a_task_and_a_member_open_their_own_run_and_lead_back():
    first = LiveTask(group="0", name="lr=1", state="running", attempt=0, why="", log="/log")
    second = replace(first, group="1", name="lr=2", state="failed", folder="/m/1", log="/l")
    shown = OnScreen(tasks=(first, second), num_rows=10)
    state, orders = type_in(RUN, ["enter"], shown)
    assert (state.page, orders) == (Page.TEXT, [ShowFile("/log")]), "it has no folder yet"
    state, orders = type_in(state, ["q", "down", "enter"], shown)
    assert (state.page, state.run_id, orders) == (Page.RUN, "/m/1", [OpenRun("/m/1")])
    state, orders = type_in(state, ["q"], replace(SHOWN, ranks=(0,)))
    assert (state.page, state.run_id, orders) == (Page.RUN, RUN.run_id, [OpenRun(RUN.run_id)])
    assert type_in(state, ["down", "l"], shown)[1] == [ShowFile("/l")]


NAMES = words("up down page-up page-down home end enter escape backspace left")
KEYS = st.sampled_from([*NAMES, *"qjkgGlsacf/o?hynpN3 "])


@given(st.lists(KEYS, max_size=40), st.integers(1, 100), st.integers(1, 30), st.integers(0, 3))
def test_no_order_of_keys_breaks_the_view_or_the_picture(keys, columns, rows, num_tasks):
    task = LiveTask(group="g", name="t", state="FAILED", attempt=1, why="", folder="/f", log="/l")
    run = run_of(sample_of(9, slow=2), tasks=(task,) * num_tasks)
    known = Known(runs=[], run=run, text=["a", "b"] * 30)
    state = RUN
    for key in keys:
        frame = draw(state, known, columns, rows)
        assert len(frame.lines) == max(rows, 2)
        state, _ = press(state, key, frame.shown)


# The bytes of terminals become keys.


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[B\x1bOA", ["up", "down", "up"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[F\x1b[1~", ["page-up", "page-down", "home", "end", "home"]),
        (b"\x1b", ["escape"]),
        (b"\r\x7f\x03", ["enter", "backspace", "ctrl-c"]),
        (b"\x1b[1;5Cx", ["x"]),  # control and a cursor key: no name here
        ("ü".encode(), ["ü"]),
        (b"\xff\x01", []),
    ],
)
def test_keys(data, keys):
    assert read_keys(data) == keys


@given(st.binary(max_size=40))
def test_any_bytes_make_keys_or_nothing(data):
    assert all(isinstance(key, str) and key for key in read_keys(data))
