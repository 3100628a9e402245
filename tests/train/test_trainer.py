"""The Trainer, and the defects of well-known tutorial code that it must not have.

Each `..._unlike_the_tutorials` test fails when the loop is written as those tutorials write it.
"""

import functools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torchmuster.train as tm
from torchmuster.errors import UsageError


def make_set(length=90, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(length, 6, generator=generator)
    return TensorDataset(x, (x.sum(dim=1) > 0).long())


class Recording(tm.Trainer):
    """Notes the loss of every step, and can fail at one."""

    def __init__(self, *args, fail_at=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.losses = []
        self.fail_at = fail_at

    def training_step(self, batch):
        if self.fail_at is not None and len(self.losses) == self.fail_at:
            raise RuntimeError("power cut")
        loss = super().training_step(batch)
        self.losses.append(loss.item())
        return loss


def make_trainer(world, *, epochs=3, kind=Recording, dropout=0.0, fail_at=None, **options):
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2))
    more = {"fail_at": fail_at} if kind is Recording else {}
    resume = {"folder": "snapshots", **options.pop("resume", {})}
    return kind(
        model,
        functools.partial(torch.optim.AdamW, lr=0.02),
        nn.functional.cross_entropy,
        tm.TrainerOptions(epochs=epochs, global_batch_size=20, resume=resume, **options),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.95),
        metrics={"accuracy": lambda outputs, targets: outputs.argmax(1) == targets},
        world=world,
        **more,
    )


def cut_and_resume(world, *, fail_at, every_steps, **options):
    """Train until the power cut, leave the world, train to the end; return both trainers."""
    resume = {"every_steps": every_steps, "asynchronous": False}
    first = make_trainer(world, fail_at=fail_at, resume=resume, **options)
    with pytest.raises(RuntimeError, match="power cut"):
        first.fit(make_set())
    world.close()
    second = make_trainer(tm.init(seed=0), resume=resume, **options)
    second.fit(make_set())
    second.world.close()
    return first, second


def test_it_learns_and_evaluates_every_sample_once(world):
    results = make_trainer(world, epochs=8).fit(make_set(), make_set(37, seed=1))
    assert results["count"] == 37
    assert results["accuracy"] > 0.9
    assert results["accuracy"] * 37 == pytest.approx(round(results["accuracy"] * 37))


def test_a_resume_in_mid_epoch_takes_the_next_step_unlike_the_tutorials(world):
    """They save the epoch's number and start it again: epochs 0, 1, 2, 2, 3."""
    first, second = cut_and_resume(world, fail_at=7, every_steps=2)
    assert len(first.losses) + len(second.losses) == 15 + 1  # step 7 was not saved yet


def test_all_state_is_saved_unlike_the_tutorials(world):
    """They save the weights alone: AdamW, scheduler, dropout's generator begin anew."""
    quiet = make_trainer(world, dropout=0.3, resume={"folder": "quiet"})
    quiet.fit(make_set())
    world.close()
    first, second = cut_and_resume(tm.init(seed=0), fail_at=8, every_steps=4, dropout=0.3)
    assert first.losses + second.losses == quiet.losses


def test_the_last_model_is_saved_and_a_finished_run_trains_no_more_unlike_the_tutorials(world):
    """They save when `epoch % 10 == 0`, so never the last, and train it again when restarted."""
    done = make_trainer(world)
    done.fit(make_set())
    weights = [p.detach().clone() for p in done.model.parameters()]
    world.close()
    again = make_trainer(tm.init(seed=0))
    results = again.fit(make_set(), make_set(10))
    again.world.close()
    assert again.losses == []
    assert results["count"] == 10
    for old, new in zip(weights, again.model.parameters(), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("harm", ["truncate", "flip"])
def test_a_harmed_snapshot_costs_only_the_steps_since_the_last_good_one(
    world, tmp_path, harm, capsys
):
    """torch.load raises on a torn file at every restart, and takes a flipped bit without a word."""
    resume = {"every_steps": 4, "every_epoch": False, "asynchronous": False}
    first = make_trainer(world, fail_at=9, resume=resume)
    with pytest.raises(RuntimeError, match="power cut"):
        first.fit(make_set())
    world.close()
    newest = max((tmp_path / "snapshots").glob("step-*")) / "data-00000.bin"
    raw = bytearray(newest.read_bytes())
    raw[100] ^= 4
    newest.write_bytes(raw[:-7] if harm == "truncate" else raw)
    second = make_trainer(tm.init(seed=0), resume=resume)
    second.fit(make_set())
    second.world.close()
    assert len(second.losses) == 15 - 4
    assert "step-000000008 is damaged" in capsys.readouterr().err


def test_weights_have_plain_names_unlike_the_tutorials(world, tmp_path):
    """Saving a wrapped model gives `module.` and `_orig_mod.` in front of every name."""
    trainer = make_trainer(world, epochs=1)
    trainer.fit(make_set())
    manifest = max((tmp_path / "snapshots").glob("step-*")) / "manifest.json"
    assert b'"model.0.weight"' in manifest.read_bytes()
    assert b"module." not in manifest.read_bytes()


def test_dropout_is_off_in_evaluation_and_on_again_after_it_unlike_the_tutorials(world):
    trainer = make_trainer(world, dropout=0.5)
    trainer.model.train()
    one, two = (trainer.evaluate(make_set(40)) for _ in range(2))
    assert one == two
    assert trainer.model.training


def test_the_loss_of_an_evaluation_is_a_mean_over_samples_unlike_the_tutorials(world):
    """A sum of batch means grows with the number of batches, and a short last batch counts whole."""
    trainer = make_trainer(world)
    losses = [trainer.evaluate(make_set(41)) for _ in range(1)]
    inputs, targets = make_set(41).tensors
    trainer.model.eval()
    with torch.no_grad():
        want = nn.functional.cross_entropy(trainer.model(inputs), targets).item()
    assert losses[0]["loss"] == pytest.approx(want, rel=1e-6)
    with_other_batches = make_trainer(world, eval_batch_size=7).evaluate(make_set(41))
    assert with_other_batches["loss"] == pytest.approx(losses[0]["loss"], rel=1e-6)


def test_clipping_sees_unscaled_gradients_unlike_the_tutorials(world):
    """Clipping before unscaling clips to a norm that is smaller by the scale, 65,536."""
    parameter = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    precision = tm.Precision(world, "fp16", max_norm=1.0)
    precision.backward((parameter * torch.tensor([3.0, 4.0])).sum())
    norm = precision.step(optimizer)
    assert norm.item() == pytest.approx(5.0)
    torch.testing.assert_close(parameter.detach(), torch.tensor([3.0 - 0.6, 4.0 - 0.8]))


def test_a_step_with_infinite_gradients_is_left_out_and_the_scale_is_saved(world):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    precision = tm.Precision(world, "fp16")
    scale = precision.get_scale()
    precision.backward((parameter * math.inf).sum())
    precision.step(optimizer)
    assert torch.equal(parameter.detach(), torch.ones(2))
    other = tm.Precision(world, "fp16")
    other.load_state_dict(precision.state_dict())
    assert other.get_scale() == precision.get_scale() == scale / 2


@pytest.mark.parametrize("accumulate", [1, 3, 7])
def test_accumulation_changes_no_step(world, accumulate):
    plain = make_trainer(world, epochs=2, resume={"folder": "plain"})
    plain.fit(make_set())
    world.close()
    split = make_trainer(tm.init(seed=0), epochs=2, accumulate=accumulate)
    split.fit(make_set())
    split.world.close()
    for a, b in zip(plain.model.parameters(), split.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_bf16_trains_and_resumes(world):
    results = make_trainer(world, epochs=6, precision="bf16", max_norm=1.0).fit(
        make_set(), make_set(30, seed=2)
    )
    assert results["accuracy"] > 0.8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": -1}, "epochs=-1"),
        ({"eval_every": 0}, "eval_every=0"),
        ({"precision": "int4"}, "precision 'int4': fp32, bf16 or fp16"),
        ({"max_norm": 0.0}, "max_norm is 0.0, not above zero"),
    ],
)
def test_options_out_of_range_are_refused(world, options, words):
    with pytest.raises(UsageError, match=words):
        make_trainer(world, **options)


def test_an_optimizer_that_was_made_too_early_is_refused(world):
    model = nn.Linear(2, 1)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    options = tm.TrainerOptions(epochs=1, global_batch_size=2)
    with pytest.raises(UsageError, match="makes the optimizer itself"):
        tm.Trainer(model, early, nn.functional.mse_loss, options, world=world)
