"""Where metrics go."""

import contextlib
import io
import json
import sys
import types

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import torchmuster.train as tm
from kit.training import view_training
from kit.waiting import Clock
from launching import events_in
from torchmuster.errors import UsageError
from torchmuster.train.sinks import MetricsRecord, StepsDone


class Terminal(io.StringIO):
    def isatty(self):
        return True


def put_mlflow(monkeypatch, start_run, **more):
    """Put in an mlflow that has the calls of the real one."""
    usual = {"end_run": lambda: None, "active_run": lambda: None}
    usual |= {"log_metrics": lambda values, step, run_id: None, "start_run": start_run}
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(**{**usual, **more}))


def test_a_record_is_one_line_an_event(tmp_path):
    (tmp_path / "new").mkdir()
    record = MetricsRecord(str(tmp_path / "new" / "training.jsonl"))
    record.event("resumed", step=3)
    record.write(5, {"loss": 0.5})
    lines = events_in(tmp_path / "new" / "training.jsonl")
    assert [(line["event"], line["step"]) for line in lines] == [("resumed", 3), ("metrics", 5)]
    assert lines[1]["values"] == {"loss": 0.5}


def test_lines_that_could_not_be_written_are_counted(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    record = MetricsRecord(str(blocked / "training.jsonl"))
    record.event("one")
    record.event("two")
    record.path = str(tmp_path / "training.jsonl")
    record.event("three")
    assert json.loads((tmp_path / "training.jsonl").read_text())["dropped_before"] == 2


def test_tensorboard_shows_what_was_written(tmp_path):
    sink = tm.TensorBoard(str(tmp_path))
    sink.write(1, {"loss": 2.0})
    sink.write(2, {"loss": 1.5})
    sink.close()
    found = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in found] == [(1, 2.0), (2, 1.5)]


def test_members_of_a_sweep_write_beside_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHMUSTER_RUN_DIR", str(tmp_path / "20260101-000000-k-ab12.1"))
    monkeypatch.setenv("MUSTER_SWEEP_MEMBER", "1")
    sink = tm.TensorBoard(str(tmp_path / "tb"))
    sink.write(1, {"loss": 2.0})
    sink.close()
    assert EventAccumulator(str(tmp_path / "tb/k-ab12.1")).Reload().Scalars("loss")[0].value == 2.0


@pytest.mark.parametrize("given", [{}, {"id": "mine", "resume": "must"}])
def test_all_attempts_of_a_run_are_one_of_weights_and_biases(monkeypatch, given):
    begun = []
    monkeypatch.setitem(
        sys.modules, "wandb", types.SimpleNamespace(init=lambda **o: begun.append(o))
    )
    monkeypatch.setenv("TORCHMUSTER_RUN_DIR", "/home/u/.muster/runs/20260101-000000-train-ab12")
    with contextlib.suppress(AttributeError):  # this run takes no values
        tm.WeightsAndBiases(project="p", **given).write(1, {})
    (options,) = begun
    expected = given or {"id": "train-ab12", "resume": "allow"}
    assert options == {"project": "p", **expected}


def test_weights_and_biases_gets_values_and_steps():
    class FakeRun:
        def __init__(self):
            self.said = []

        def log(self, values, step):
            self.said.append((step, values))

        def finish(self):
            self.said.append("finished")

    run = FakeRun()
    sink = tm.WeightsAndBiases(run)
    sink.write(7, {"loss": 1.0})
    sink.close()
    assert run.said == [(7, {"loss": 1.0}), "finished"]


@pytest.mark.parametrize("make", [tm.WeightsAndBiases, tm.MLflow])
def test_a_rank_that_writes_nothing_begins_no_run(monkeypatch, make):
    """Every rank makes the sinks of the script's line: one run is begun, by rank 0's first values.

    The calls are those of wandb 0.31 (`wandb.init(**options)` returns the run) and of mlflow 3.17 (`start_run`, `log_metrics`
    with `run_id`), with which this was tried.
    """
    begun = []

    class Run:
        info = types.SimpleNamespace(run_id="7")
        log = finish = staticmethod(lambda *_, **__: None)

    def begin(**options):
        begun.append(options)
        return Run()

    wandb = types.SimpleNamespace(init=begin)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    client = types.SimpleNamespace(set_terminated=lambda run_id: None)
    put_mlflow(monkeypatch, begin, MlflowClient=lambda: client)
    silent, first = make(name="x"), make(name="x")
    silent.close()
    assert begun == []
    first.write(1, {"loss": 1.0})
    first.write(2, {"loss": 1.0})
    first.close()
    assert begun == [{"name": "x"}]


@pytest.mark.parametrize("active", ["7", "8", None])
def test_a_sink_of_mlflow_ends_its_own_run_and_no_other(monkeypatch, active):
    """The script may have begun another run meanwhile: `end_run` would end that."""
    ended = []

    def run(run_id):
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    client = types.SimpleNamespace(set_terminated=ended.append)
    put_mlflow(
        monkeypatch,
        lambda: run("7"),
        end_run=lambda: ended.append(active),
        active_run=lambda: run(active) if active is not None else None,
        MlflowClient=lambda: client,
    )
    sink = tm.MLflow()
    sink.write(1, {"loss": 1.0})
    sink.close()
    assert ended == ["7"]


def test_a_package_that_is_missing_is_named_on_every_rank(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UsageError) as caught:
        tm.MLflow()
    assert "pip install mlflow" in caught.value.fix


def test_a_run_writes_to_its_record_and_to_its_sinks(world, tmp_path):
    class Kept:
        def __init__(self):
            self.values = {}

        def write(self, step, values):
            self.values[step] = dict(values)

        def close(self):
            self.values["closed"] = True

    kept = Kept()
    data = world.loader(torch.utils.data.TensorDataset(torch.arange(10.0)), global_batch_size=4)
    run = world.resume(data=data, folder="snapshots", log_every=1, sinks=[kept])
    for _ in run.epochs(1):
        for (x,) in data:
            run.step(mean=x.mean())
        run.report(eval_loss=0.25)
    times = [kept.values[step].pop("perf/step_seconds") for step in (1, 2)]
    assert all(seconds > 0 for seconds in times)
    assert kept.values[3].pop("perf/step_seconds", 1.0) > 0
    assert kept.values == {
        1: {"mean": 1.5},
        2: {"mean": 5.5},
        3: {"eval_loss": 0.25},
        "closed": True,
    }
    (epoch,) = events_in(tmp_path / "snapshots" / "training.jsonl", "epoch")
    assert epoch["values"] == {"mean": pytest.approx(4.5)}  # weighted: the last batch has 2 samples
    assert epoch["ledger"] == {"samples": 10, "lost": 0, "twice": 0, "whole": True}


def test_a_terminal_gets_a_bar_with_the_time_left():
    clock, terminal = Clock(0.0), Terminal()
    progress = StepsDone(terminal, now=clock)
    progress.begin(0)
    clock.now = 10.0
    progress.show(50, 200, {"loss": 0.123456})
    progress.end()
    bar = "[" + "#" * 5 + "." * 15 + "]"
    assert terminal.getvalue() == (
        f"\r\x1b[K{bar}  step 50/200  5.0 steps/s  30 s left  loss 0.1235\n"
    )


@pytest.mark.parametrize(
    ("stream", "has_bar"), [(io.StringIO, True), (Terminal, False)], ids=["a file", "under a row"]
)
def test_elsewhere_a_plain_line_comes_every_ten_seconds(stream, has_bar):
    clock, log = Clock(0.0), stream()
    progress = StepsDone(log, now=clock, has_bar=has_bar)
    progress.begin(0)
    for second in range(1, 26):
        clock.now = float(second)
        progress.show(second, None, {})
    assert log.getvalue().splitlines() == ["step 10  1.0 steps/s", "step 20  1.0 steps/s"]


@pytest.mark.parametrize("every_epoch", [True, False])
@pytest.mark.parametrize("has_loader", [True, False])
def test_what_is_logged_after_the_loop_of_an_epoch_belongs_to_it(
    world, tmp_path, capsys, has_loader, every_epoch
):
    model = world.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.utils.data.TensorDataset(torch.ones(8, 1))
    data = world.loader(rows, global_batch_size=4) if has_loader else None
    run = world.resume(model=model, optimizer=optimizer, data=data, every_epoch=every_epoch)
    for epoch in run.epochs(2):
        for _ in data if data is not None else range(2):
            optimizer.step()
            run.step(loss=5.0 - epoch)
        run.log(acc=0.25 + epoch / 2)
    view = view_training(events_in(tmp_path / "snapshots" / "training.jsonl"))
    wanted = [{"loss": 5.0, "acc": 0.25}, {"loss": 4.0, "acc": 0.75}]
    assert [epoch.values for epoch in view.epochs] == wanted
    said = capsys.readouterr().err.splitlines()
    for epoch, values in enumerate(wanted):
        of_it = " ".join(line for line in said if line.startswith(f"muster: epoch {epoch}:"))
        assert [of_it.count(f"{name} {value:g}") for name, value in values.items()] == [1, 1]


def test_a_metric_that_is_not_finite_is_named_once_and_a_loss_with_what_to_do(
    world, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("TORCHMUSTER_RUN_DIR", str(tmp_path / "20270115-080000-train-3f2a"))
    run = world.resume(folder="snapshots", log_every=1)
    for epoch in run.epochs(2):
        for step in range(4):
            run.step(loss=float("nan") if step == 2 else 1.0, lr=0.1)
        run.report(f1=float("nan"), rate=float("inf") if epoch else 1.0)
    said = [line for line in capsys.readouterr().err.splitlines() if "first seen" in line]
    assert said == [
        (
            'muster: loss is nan, first seen at step 3; on_nan="stop" ends such a run,'
            " `muster replay train-3f2a --step 3` finds where it began while a snapshot from before is kept"
        ),
        "muster: f1 is nan, first seen at step 4",
        "muster: rate is inf, first seen at step 8",
    ]
