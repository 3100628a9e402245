"""A copy whose rest is made in the background: equal to the state when it was ordered, or refused."""

import pytest
import torch

from torchmuster.train.objects import Objects
from torchmuster.train.snapshot.layout import view_of
from torchmuster.train.snapshot.staging import Staging, whole_boxes
from torchmuster.train.snapshot.state import ChangedError


@pytest.fixture
def staged():
    tensors = {"model.w": torch.arange(6.0), "model.mean": torch.ones(3)}
    made = Staging().copy(whole_boxes(tensors), "data-00000.bin", later={"model.w"})
    return tensors, made


def values(staged, path):
    (chunk,) = staged.tensors[path].chunks
    return view_of(staged.data, chunk, torch.float32)


def test_what_is_not_left_for_later_is_copied_at_once(staged):
    tensors, made = staged
    tensors["model.mean"].add_(1)
    made.finish()
    assert torch.equal(values(made, "model.mean"), torch.ones(3))
    assert torch.equal(values(made, "model.w"), torch.arange(6.0))


@pytest.mark.parametrize("change", [lambda t: t.mul_(2), lambda t: t.detach().add_(1)], ids=str)
def test_a_tensor_that_changes_before_it_is_copied_is_refused(staged, change):
    tensors, made = staged
    change(tensors["model.w"])
    with pytest.raises(ChangedError, match="was changed"):
        made.finish()


def test_only_what_an_optimizer_steps_may_be_copied_later():
    model, average = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    model.register_buffer("mean", torch.zeros(2))
    model.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    optimizer = torch.optim.AdamW([model.weight, model.bias])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    objects = Objects({"model": model, "average": average, "optimizer": optimizer})
    later = objects.stepped()
    _, tensors = objects.pack()
    assert {path for path in tensors if path not in later} == {
        *("model.mean", "model.frozen", "average.weight", "average.bias")
    }
    assert "optimizer.state.0.exp_avg" in tensors


def test_what_optimizers_will_make_is_foreseen():
    model = torch.nn.Linear(100, 10, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    objects = Objects({"model": model, "optimizer": optimizer})
    foreseen = objects.expected_bytes()
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    _, tensors = objects.pack()
    assert foreseen == pytest.approx(sum(t.nbytes for t in tensors.values()), rel=0.01)
