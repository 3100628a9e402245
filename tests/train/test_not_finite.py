"""Gradients that are not finite: the run stops before they are used, or leaves the step out."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import torchmuster.train as tm
from torchmuster.errors import UsageError
from torchmuster.train.finite import MOST_SKIPPED, are_finite
from train.launching import HERE, events_in, muster
from train.test_misuse import Ones

SCRIPT = HERE / "nan_script.py"


class Odd(Ones):
    """Samples of which some are not finite."""

    def __init__(self, length, bad):
        super().__init__(length)
        self.bad = bad

    def __getitem__(self, index):
        return super().__getitem__(index) * (float("nan") if index in self.bad else 1.0)


def train(
    world, *, on_nan, bad=(), samples=24, optimizer=torch.optim.AdamW, loss=torch.mean, model=None
):
    model = world.wrap(model or nn.Linear(3, 1))
    optimizer = optimizer(model.parameters(), lr=0.1)
    data = world.loader(Odd(samples, bad), global_batch_size=4)
    run = world.resume(model=model, optimizer=optimizer, data=data, on_nan=on_nan, every_s=None)
    weights = []
    for _ in run.epochs(1):
        for x in data:
            loss(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return weights, optimizer


def noted(event):
    """Return what the record of the run in this folder has of an event."""
    return events_in(next(Path.cwd().rglob("training.jsonl")), event)


def test_the_run_stops_before_the_optimizer_has_used_them(world):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.resume(model=model, optimizer=optimizer, on_nan="stop")
    before = model.weight.detach().clone()
    model(torch.full((1, 3), float("inf"))).sum().backward()
    with pytest.raises(tm.NotFiniteError, match="the gradients of step 1 are not finite") as error:
        optimizer.step()
    assert torch.equal(model.weight, before)
    assert error.value.why == "the model's output was not finite on rank 0"
    assert error.value.muster_final


def test_samples_of_the_batch_are_named(world):
    with pytest.raises(tm.NotFiniteError) as error:
        train(world, bad={9}, on_nan="stop")
    assert error.value.what == "the gradients of step 3 are not finite"
    assert error.value.why == (
        "the model's output was not finite on rank 0; samples of rank 0 in this batch: 8, 9, 10, 11"
    )


def test_a_loss_that_is_not_finite_is_not_blamed_on_the_model(world):
    with pytest.raises(tm.NotFiniteError) as error:
        train(world, on_nan="stop", loss=lambda y: y.mean() * float("inf"))
    assert "it began in the loss or in backward" in error.value.why


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_skipped_step_leaves_weights_and_state_as_they_are(world, optimizer):
    weights, made = train(world, bad={9}, on_nan="skip", optimizer=optimizer)
    assert len(weights) == 6
    same = [torch.equal(a, b) for a, b in pairwise(weights)]
    assert same == [False, True, False, False, False]
    assert all(torch.isfinite(one).all() for one in weights)
    counted = {float(state["step"]) for state in made.state.values() if "step" in state}
    assert counted <= {5.0}
    assert [(e["step"], e["ranks"]) for e in noted("skipped")] == [(3, [0])]


def test_a_run_that_only_skips_stops(world):
    with pytest.raises(tm.NotFiniteError, match=f"of {MOST_SKIPPED + 1} steps in a row"):
        train(world, bad=range(1000), on_nan="skip", samples=100)


def test_gradients_are_ignored_unless_asked_for(world):
    weights, _ = train(world, bad={9}, on_nan="ignore")
    assert torch.isnan(weights[-1]).any()


def test_an_unknown_choice_is_refused(world):
    with pytest.raises(UsageError, match="on_nan is one of `ignore`, `stop`, `skip`, `replay`"):
        train(world, on_nan="raise")


def test_a_forward_that_is_not_finite_again_is_no_accident_of_the_machine(world):
    with pytest.raises(tm.NotFiniteError) as error:
        train(world, bad={9}, on_nan="replay")
    assert error.value.why.endswith(
        "it is not finite again: the data or the model, not the machine"
    )
    assert error.value.muster_final
    (found,) = noted("not_finite")
    assert (found["step"], found["ranks"], found["samples"]) == (3, [0], {"0": [8, 9, 10, 11]})
    assert len(found["gradients"]) == 1


class Count:
    """Something whose state a step changes at a moment that only the script knows."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def saved_steps():
    return sorted(int(path.name[5:]) for path in Path.cwd().glob("snapshots/step-*"))


@pytest.mark.parametrize("more", [{}, {"count": Count()}])
def test_the_boundary_before_the_step_is_saved_where_all_of_it_is_known(world, more):
    model = world.wrap(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data = world.loader(Odd(24, {9}), global_batch_size=4)
    things = {"model": model, "optimizer": optimizer, "schedule": schedule, **more}
    run = world.resume(data=data, on_nan="replay", every_s=None, asynchronous=False, **things)
    means = []

    def loop():
        for _ in run.epochs(1):
            for x in data:
                means.append(model[1].running_mean.clone())
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step()
                schedule.step()

    with pytest.raises(tm.NotFiniteError, match="of step 3 "):
        loop()
    assert saved_steps() == ([0] if more else [0, 2])
    if not more:
        assert torch.equal(model[1].running_mean, means[2]), "the forward has changed it"


def test_behind_the_first_of_two_optimizers_the_boundary_is_gone(world):
    model = world.wrap(nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)}))
    first = torch.optim.SGD(model["a"].parameters(), lr=0.1)
    second = torch.optim.SGD(model["b"].parameters(), lr=0.1)
    data = world.loader(Ones(24), global_batch_size=4)
    things = {"model": model, "first": first, "second": second}
    run = world.resume(data=data, on_nan="replay", every_s=None, asynchronous=False, **things)

    def loop():
        for _ in run.epochs(1):
            for x in data:
                model["a"](x).mean().backward()
                first.step()
                (model["b"](x).mean() * (float("nan") if run.steps_done == 2 else 1)).backward()
                second.step()
                run.step()

    with pytest.raises(tm.NotFiniteError, match="of step 3 "):
        loop()
    assert saved_steps() == [0]


class Once(nn.Linear):
    """Not finite in its third forward, as after a bit that has flipped."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (float("nan") if self.calls == 3 else 1.0)


def test_a_forward_that_is_finite_when_it_is_made_again_is_tried_again(world):
    with pytest.raises(tm.NotFiniteError, match="of step 3 ") as error:
        train(world, on_nan="replay", model=Once(3, 1))
    assert "random numbers it is finite on rank 0 (" in error.value.why
    assert not error.value.muster_final, "the launcher tries again, from the last snapshot"


def test_a_gradient_scaler_keeps_its_own_steps(world):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)  # it is told of infinities
    before = model.weight.detach().clone()
    world.resume(model=model, optimizer=optimizer, on_nan="stop")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.full((1, 3), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(model.weight, before)


def test_large_gradients_are_finite():
    half = torch.full((4,), 60000.0, dtype=torch.float16)
    assert are_finite([half, half.clone()])
    assert are_finite([torch.empty(0)])
    assert not are_finite([torch.tensor([1.0]), torch.tensor([float("nan")])])
    assert not are_finite([torch.empty(0), torch.tensor([-float("inf")])])


@pytest.mark.parametrize("sharded", [False, True])
def test_every_rank_decides_alike_and_the_rank_is_named(tmp_path, sharded):
    words = [SCRIPT, tmp_path, "stop", *(["--sharded"] if sharded else [])]
    ended = muster(tmp_path / "home", 2, *words, restarts=2, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "error: the gradients of step 2 are not finite" in ended.stderr, ended.stderr
    assert "because: the model's output was not finite on rank 1" in ended.stderr
    assert "optimizer.py" not in ended.stderr, "the line is the script's"
    assert "attempt 1" not in ended.stderr, "no retry helps"

    ended = muster(tmp_path / "again", 2, SCRIPT, tmp_path, "skip", *words[3:])
    assert "step 2 is skipped: its gradients are not finite" in ended.stderr
    finals = [(tmp_path / f"final-{rank}").read_text() for rank in range(2)]
    assert finals[0] == finals[1]
    assert "nan" not in finals[0]
