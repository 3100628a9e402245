"""What a member has recorded or printed of a metric, and which members a rule stops by it."""

import json

import pytest

from torchmuster.core.files.layout import RunDir
from torchmuster.multirun.sweep.metric import MetricReader, load_rule, metric_pattern
from torchmuster.multirun.sweep.plan import MetricChoice, MetricGoal


@pytest.fixture
def member(tmp_path):
    run_dir = RunDir(str(tmp_path))
    (tmp_path / "logs/main/train/attempt-0").mkdir(parents=True)
    return run_dir


def write_log(member, text, mode="a"):
    with open(member.rank_log(0, 0), mode) as log:
        log.write(text)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("loss=0.25", "0.25"),
        ("loss: 1e-3, acc: 0.9", "1e-3"),
        ('{"loss": 3, "step": 2}', "3"),
        ("step 3 Loss = -0.5;", "-0.5"),
        ("[1/10] loss=nan]", "nan"),
        ("val_loss=0.1", None),
        ("loss_scale=65536", None),
        ("loss=0.1s", None),
        ("loss is small", None),
        ("a/loss: 1", None),
        ("version loss=1.2.3", None),
    ],
)
def test_a_printed_value_stands_behind_its_whole_name(line, value):
    found = metric_pattern("loss").findall(line)
    assert found == ([] if value is None else [value])


def test_each_line_is_a_point_and_its_last_value_counts(member):
    reader = MetricReader(member, "loss")
    write_log(member, "loss=3\nhello\nloss=9 loss=2\nlo")
    assert [(p.step, p.value) for p in reader.read()] == [(1, 3.0), (2, 2.0)]
    write_log(member, "ss=1")
    assert reader.read() == []  # the line may go on: 1 or 15
    assert [(p.step, p.value) for p in reader.last_line()] == [(3, 1.0)]
    assert reader.newest.value == 1.0


def test_a_progress_bar_s_states_are_lines(member):
    reader = MetricReader(member, "loss")
    write_log(member, "50% loss=2\r100% loss=1\r")
    assert [p.value for p in reader.read()] == [2.0, 1.0]


def test_the_library_s_record_comes_before_the_log(member):
    reader = MetricReader(member, "loss")
    write_log(member, "loss=7\n")
    with open(member.training, "w") as record:
        record.write(json.dumps({"event": "metrics", "step": 40, "values": {"loss": 0.5}}) + "\n")
        record.write(json.dumps({"event": "metrics", "step": 50, "values": {"acc": 0.5}}) + "\n")
    assert [(p.step, p.value) for p in reader.read()] == [(40, 0.5)]
    write_log(member, "loss=8\n")
    assert reader.read() == []


def test_a_log_too_long_for_one_look_is_read_from_its_last_part(member):
    write_log(member, "loss=1\n" + "x" * 80 * (1 << 16) + "\nloss=2\n")
    assert [p.value for p in MetricReader(member, "loss").read()] == [2.0]


def test_what_is_not_there_has_no_points(tmp_path):
    assert MetricReader(RunDir(str(tmp_path / "none")), "loss").read() == []


@pytest.mark.parametrize("goal", [MetricGoal.MIN, MetricGoal.MAX])
def test_the_median_waits_for_the_first_member_that_completes(goal):
    pytest.importorskip("optuna", reason="the rules need Optuna (extra `sweep`)")
    rule = load_rule("median", MetricChoice(name="loss", goal=goal))
    sign = 1.0 if goal is MetricGoal.MIN else -1.0
    stopped = []
    for member in range(4):
        ends = [rule.report(member, step, sign * (member + 1.0)) for step in (1, 2, 3)]
        stopped.append(any(ends))
        rule.ended(member, not any(ends))
    assert stopped == [False, True, True, True]
