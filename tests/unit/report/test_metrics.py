"""Metrics by name: what every view says of a random record is what was logged."""

import json
import random
from itertools import pairwise
from math import isfinite
from pathlib import Path

import pytest

import torchmuster
from kit.training import fold_training, view_training
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.owner.record import read_lines
from torchmuster.launcher.model.run import MOST_EPOCHS, TrainingState
from torchmuster.launcher.views.live import TrainingTail
from torchmuster.launcher.views.training import TrainingReader, bad_loss_of
from torchmuster.report.training import training_story

TIME = "2027-01-15T08:00:10.000+00:00"


class Script:
    """Logs at random, as scripts and the library do, and remembers all of it in the plainest way.

    Attributes:
        events: The record.
        logged: Name, step and value of what counts.
        epochs: The values of each epoch that has ended.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.events, self.logged, self.epochs = [], [], {}
        self.step = 0
        names = ["valid_loss", "acc", "loss", "lr", "Train/Loss", "f1"]
        self.in_loop = self.random.sample(names, self.random.randint(1, 4))
        self.after_it = self.random.sample(names, self.random.randint(0, 3))

    def write(self, name, **fields):
        self.events.append({"time": TIME, "event": name, "step": self.step, **fields})

    def log(self, names):
        values = {name: self.value() for name in names}
        self.logged += [(name, self.step, value) for name, value in values.items()]
        self.write("metrics", values=values)
        return values

    def value(self):
        return self.random.choice([float("nan"), float("inf"), *(self.random.random(),) * 4])

    def train(self, num_epochs=6):
        self.write("resumed", folder="")
        for epoch in range(num_epochs):
            for _ in range(self.random.randint(1, 4)):
                self.step += self.random.randint(1, 3)
                num_logged = self.random.randint(1, len(self.in_loop))
                self.log(self.random.sample(self.in_loop, num_logged))
            values = {name: self.random.random() for name in self.in_loop}
            self.write("epoch", epoch=epoch, elapsed_s=1.0, values=values)
            if self.after_it:
                values |= self.log(self.after_it) | values
            self.epochs[epoch] = values
            if self.random.random() < 0.3:
                self.go_back(self.random.randint(0, self.step))
        return self

    def go_back(self, step):
        """Start another attempt, from a snapshot of this step."""
        self.step = step
        self.write("resumed", folder="")
        self.logged = [one for one in self.logged if one[1] <= step]

    def newest(self):
        """Return the newest value of each metric, the loss first."""
        names = list(dict.fromkeys(name for name, _, _ in self.logged))
        losses = [name for name in names if "loss" in name.lower() and name != "loss"]
        first = [name for name in ("loss", *losses) if name in names]
        order = first + [name for name in names if name not in first]
        return {name: self.values_of(name)[-1] for name in order}

    def not_finite(self):
        """Return the metrics whose newest value is no number, and since which step."""
        found = {}
        for name in self.newest():
            for one, step, value in self.logged:
                if one == name and isfinite(value):
                    found.pop(name, None)
                elif one == name:
                    found.setdefault(name, step)
        return found

    def values_of(self, name):
        return [value for one, _, value in self.logged if one == name]


def words_of(state):
    return json.dumps(codec.to_plain(state))


@pytest.mark.parametrize("seed", range(40))
def test_each_metric_has_its_own_values_in_every_view(tmp_path, seed):
    script, run_dir = Script(seed).train(), RunDir(str(tmp_path))
    tail = TrainingTail(run_dir)
    cuts = sorted(script.random.sample(range(len(script.events)), 2))
    for begin, end in pairwise([0, *cuts, len(script.events)]):
        with open(run_dir.training, "a") as record:
            record.writelines(json.dumps(event) + "\n" for event in script.events[begin:end])
        live = tail.read(is_over=False)
    view = view_training(read_lines(run_dir.training))
    told = training_story(fold_training(read_lines(run_dir.training)))

    newest = script.newest()
    assert words(live.values) == words(view.values.items()) == words(newest.items())
    since = script.not_finite()
    assert dict(live.not_finite) == view.not_finite == since
    for series in told.series:
        assert series.bad_since is None or series.bad_since[0] == since[series.name]
        assert (series.bad_since is not None) == (series.name in since)
    loss = next((name for name in newest if "loss" in name.lower()), None)
    said = f"{loss} {newest[loss]} (since step {since[loss]})" if loss in since else ""
    assert bad_loss_of(run_dir) == said
    if newest:
        assert live.curve_of == next(iter(newest))
        assert str(list(live.curve)) == str(script.values_of(live.curve_of))
        (drawn,) = [one for one in told.series if one.name == live.curve_of]
        assert drawn.num_points == len(live.curve)
    for number, values in script.epochs.items():
        assert words(view.epochs[number].values.items()) == words(values.items())
        finite = {name: value if isfinite(value) else None for name, value in values.items()}
        assert dict(told.epochs[number].values) == finite


def words(values):
    """Return values in words, in their order: nan equals itself there."""
    return [f"{name} {value}" for name, value in values]


def test_what_an_earlier_command_has_read_is_not_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr("torchmuster.launcher.views.training._WORTH_KEEPING_BYTES", 100)
    script, run_dir = Script(3).train(40), RunDir(str(tmp_path))
    lines = [json.dumps(event) + "\n" for event in script.events]
    whole = fold_training(script.events)
    Path(run_dir.training).write_text("".join(lines[:90]))
    TrainingReader(run_dir).read()
    with open(run_dir.training, "a") as record:
        record.writelines(lines[90:])

    later = TrainingReader(run_dir)

    assert later.state.num_events == 90  # before it has read a line
    assert words_of(later.read()) == words_of(whole)
    Path(run_dir.training).write_text("".join(lines[:120]))  # another record in its place
    assert words_of(TrainingReader(run_dir).read()) == words_of(fold_training(script.events[:120]))


def test_a_kept_fold_that_is_damaged_or_of_another_version_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("torchmuster.launcher.views.training._WORTH_KEEPING_BYTES", 0)
    run_dir, script = RunDir(str(tmp_path)), Script(5).train()
    Path(run_dir.training).write_text("".join(json.dumps(e) + "\n" for e in script.events))
    whole = words_of(TrainingReader(run_dir).read())
    kept = Path(run_dir.training_fold)
    text = kept.read_text()
    for damaged in ("", "[]", text[: len(text) // 2], text.replace(torchmuster.__version__, "0.0")):
        kept.write_text(damaged)
        reader = TrainingReader(run_dir)
        assert reader.state.num_events == 0
        assert words_of(reader.read()) == whole


def test_a_fold_is_bounded_however_long_its_record():
    state = TrainingState()
    for number in range(12_000):
        when = {"time": TIME, "step": number}
        values = {f"m{number % 300}": float("nan"), "loss": 1.0 if number != 773 else 99.0}
        state.take({**when, "event": "metrics", "values": values})
        state.take({**when, "event": "save"})
        if number % 10 == 0:
            state.take({**when, "event": "epoch", "epoch": number, "values": values})
            state.take({**when, "event": "resumed", "step": number - 5 if number else 0})

    assert len(json.dumps(codec.to_plain(state))) < 2_000_000
    assert (state.num_saves, state.num_epochs) == (12_000, 1_200)
    assert len(state.epochs) == MOST_EPOCHS
    assert (773, 99.0) in state.metrics.by_name["loss"].points  # a spike stays on the chart
