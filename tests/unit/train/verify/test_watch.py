"""What is sent of a pass is the same at the other end, and made again it is the same."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchmuster.train import rng
from torchmuster.train.heartbeat import StepState
from torchmuster.train.objects import Objects
from torchmuster.train.snapshot.state import SnapshotError
from torchmuster.train.verify.watch import (
    CantRepeatError,
    CantVerifyError,
    PassNotes,
    digest,
    from_bytes,
    parcel_of,
    repeat,
    to_bytes,
    verify_steps,
    wanted_every,
)

CPU = torch.device("cpu")


def test_tensors_and_values_are_the_same_at_the_other_end():
    base = torch.arange(24.0).reshape(2, 3, 4)
    value = {
        "dense": base.permute(2, 0, 1),
        "view": base[:, ::2],
        "sliced": torch.arange(40.0).reshape(5, 8)[1:, 1::3],
        "expanded": torch.arange(3.0)[:, None].expand(3, 4),
        "windows": torch.arange(10.0).unfold(0, 4, 2),
        "empty": torch.empty(0, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(math.inf),
        "rest": (1, 2.5, None, "text", [True, math.nan], torch.float16),
    }
    back = from_bytes(to_bytes(value), CPU)
    for name in set(value) - {"rest"}:
        assert torch.equal(back[name], value[name])
        assert back[name].dtype == value[name].dtype
        if value[name].numel():  # kernels depend on where the numbers lie
            assert back[name].stride() == value[name].stride()
            assert back[name].data_ptr() % 64 == value[name].data_ptr() % 64
    assert back["rest"][:4] == (1, 2.5, None, "text")
    assert back["rest"][5] is torch.float16


def test_a_value_that_only_code_could_restore_is_refused():
    with pytest.raises(SnapshotError, match="can't be saved"):
        to_bytes({"f": lambda: None})


def test_a_digest_sees_a_single_bit():
    one = torch.ones(5)
    other = one.clone()
    other.view(torch.int32)[2] ^= 1
    assert digest([one]) != digest([other])
    assert digest([torch.zeros(1)]) != digest([-torch.zeros(1)])


class Odd(nn.Module):
    """With all that a forward may depend on."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *, more=None):
        self.calls += 1
        y = nn.functional.dropout(self.norm(self.into(x)), 0.5) * self.calls
        y = y + torch.randn(()) + float(torch.rand(()))
        return (y if more is None else y + more), y.mean(1)


def begun(model):
    notes = PassNotes({"model": model}, StepState())
    notes.begin()
    return notes


def passed(notes, model):
    """Make a forward of a small input, and return its output."""
    x = torch.ones(1, 2)
    notes.before("model", model, (x,), {})
    return notes.after("model", model(x)).sum()


def noted(model, *, change=None):
    """Make two passes, and return what was noted of them, with the gradients that they have left."""
    notes = begun(model)
    for number in range(2):
        x = torch.randn(4, 6, requires_grad=number == 1)
        more = torch.randn(4, 8)
        notes.before("model", model, (x,), {"more": more})
        first, second = notes.after("model", model(x, more=more))
        (first.square().mean() + second.sum()).backward()
    if change is not None:
        change(x, more)
    return notes


def test_passes_made_again_are_the_same_and_leave_no_trace():
    torch.manual_seed(3)
    model = Odd()
    notes = noted(model)
    own = notes.result()
    assert len(own.split()) == 2
    parcel = notes.passes({})
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    state = rng.capture()
    torch.manual_seed(99)
    before = rng.capture()
    assert repeat(parcel, {"model": model}, CPU) == own
    assert repeat(from_bytes(parcel_of(parcel), CPU), {"model": model}, CPU) == own
    assert torch.equal(rng.capture()["torch"], before["torch"])
    rng.restore(state)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert gradient is None if parameter.grad is None else torch.equal(parameter.grad, gradient)
    assert all(map(torch.equal, model.buffers(), buffers))
    with torch.no_grad():
        model.into.weight.view(-1).view(torch.int32)[7] ^= 1 << 12
    assert repeat(parcel, {"model": model}, CPU) != own


def test_inputs_that_were_changed_since_are_said():
    notes = noted(Odd(), change=lambda x, more: more.add_(1))
    notes.result()
    with pytest.raises(CantRepeatError, match="inputs have been changed in place"):
        notes.passes({})


def test_a_step_without_a_model_is_said():
    notes = begun(Odd())
    assert notes.result() == ""
    with pytest.raises(CantRepeatError, match="no model given to resume"):
        notes.passes({})


def test_a_second_backward_through_one_forward_is_said():
    model = nn.Linear(2, 1)
    notes = begun(model)
    y = passed(notes, model)
    y.backward(retain_graph=True)
    y.backward()
    notes.result()
    with pytest.raises(CantRepeatError, match="backward was called twice"):
        notes.passes({})


def test_a_model_that_can_not_be_called_once_more_is_said():
    class Moody(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 1:
                raise RuntimeError("not again\nwith a trace")
            return super().forward(x)

    model = Moody(2, 1)
    notes = begun(model)
    passed(notes, model).backward()
    notes.result()
    with pytest.raises(CantRepeatError, match=r"once more: RuntimeError: not again$"):
        repeat(notes.passes({}), {"model": model}, CPU)


# What can't be verified is refused before the first step.


TWO_RANKS = SimpleNamespace(world_size=2)


def test_a_model_with_statistics_of_all_ranks_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    things = Objects({"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    with pytest.raises(CantVerifyError, match="`model` again: it has SyncBatchNorm") as error:
        verify_steps(5, None, things, TWO_RANKS, None)
    assert error.value.muster_final


def test_the_script_has_the_last_word(monkeypatch):
    assert wanted_every(None) is None
    monkeypatch.setenv("TORCHMUSTER_VERIFY_EVERY", "7")
    assert wanted_every(None) == 7
    assert wanted_every(3) == 3


def test_a_replay_verifies_nothing(monkeypatch):
    monkeypatch.setattr(
        "torchmuster.core.model.contract.replay_order", lambda environment: object()
    )
    verify_steps(5, None, None, TWO_RANKS, None)
