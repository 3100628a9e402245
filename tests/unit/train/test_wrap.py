"""Weighing: the gradient that flows into a model's outputs is scaled once, the values stay."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchmuster.errors import UsageError
from torchmuster.train.heartbeat import StepState
from torchmuster.train.wrap import unwrap, weigh, wrap_whole


class Pair(NamedTuple):
    logits: torch.Tensor
    loss: torch.Tensor


@pytest.fixture
def layer():
    layer = nn.Linear(2, 3, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(torch.arange(6.0).view(3, 2))
    return layer


X = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)


def gradient(layer, loss):
    layer.weight.grad = None
    loss.backward()
    return layer.weight.grad.clone()


@pytest.fixture
def plain(layer):
    return gradient(layer, layer(X).sum())


@pytest.mark.parametrize("weight", [0.5, 1.0, 1.5, 1 / 3])
def test_one_output_is_weighed_once(layer, plain, weight):
    outputs = weigh(layer(X), weight)
    assert torch.equal(outputs, layer(X))
    torch.testing.assert_close(gradient(layer, outputs.sum()), plain * weight)


@pytest.mark.parametrize(
    "pack",
    [
        lambda y: (y, y.sum()),
        lambda y: [y.sum(), y],
        lambda y: {"logits": y, "loss": y.sum()},
        lambda y: {"deep": [{"logits": y}], "loss": y.sum(), "name": "x", "n": 3},
        lambda y: Pair(logits=y, loss=y.sum()),
        lambda y: (y, y),
        lambda y: (y, y.view(-1), y.detach()),
    ],
)
def test_outputs_that_are_made_from_each_other_are_weighed_once(layer, plain, pack):
    def loss_of(outputs):
        tensors = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
        return next((t for t in tensors if not t.dim()), tensors[0].sum())

    outputs = weigh(pack(layer(X)), 0.25)
    assert type(outputs) is type(pack(layer(X)))
    torch.testing.assert_close(gradient(layer, loss_of(outputs)), plain * 0.25)


def test_a_loss_of_several_outputs_is_weighed_once(layer, plain):
    a, b = weigh((layer(X), 3 * layer(X)), 0.5)
    torch.testing.assert_close(gradient(layer, (a + b).sum()), plain * 0.5 * 4)


@pytest.mark.parametrize("pack", [lambda y: y, lambda y: (y, y * 2)])
def test_weight_zero_stops_even_an_infinite_gradient(layer, pack):
    outputs = weigh(pack(layer(X)), 0.0)
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    found = gradient(layer, (first * math.inf).sum())
    assert torch.equal(found, torch.zeros_like(found))


def test_one_output_may_be_changed_in_place(layer, plain):
    outputs = weigh(layer(X), 0.5)
    outputs *= 2
    torch.testing.assert_close(gradient(layer, outputs.sum()), plain)


def test_weight_one_leaves_outputs_as_they_are(layer):
    outputs = {"y": layer(X)}
    assert weigh(outputs, 1.0) is outputs
    assert weigh("anything", 1.0) == "anything"


@pytest.mark.parametrize(
    ("outputs", "name"), [({"loss": torch.ones(1)}, "dict"), (object(), "object"), (3, "int")]
)
def test_an_output_without_a_gradient_cannot_be_weighed(outputs, name):
    with pytest.raises(UsageError) as caught:
        weigh(outputs, 0.5)
    assert caught.value.what == (
        f"no tensor with a gradient was found in the model's output ({name})"
    )
    assert caught.value.why == (
        "the ranks' shares of this batch differ, so the gradient has to be weighted"
    )
    assert caught.value.fix == (
        "return tensors, or lists, tuples and dicts of them (or pass drop_last=True and a"
        " batch size that divides)"
    )


@pytest.mark.usefixtures("alone")
def test_a_wrapped_model_in_a_world_of_one_weighs_by_the_step_state(layer, plain):
    step_state = StepState()
    model = wrap_whole(layer, step_state, settle=True, options={})
    assert unwrap(model) is layer
    step_state.weight = 0.5
    torch.testing.assert_close(gradient(layer, model(X).sum()), plain * 0.5)
    step_state.clear()
    torch.testing.assert_close(gradient(layer, model(X).sum()), plain)
    step_state.weight = 0.5
    with torch.no_grad():
        assert torch.equal(model(X), layer(X))
