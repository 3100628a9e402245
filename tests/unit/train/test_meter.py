"""Weighted means: exact, lazy, and blind to what must not count."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from torchmuster.errors import UsageError
from torchmuster.train.meter import Meter

CPU = torch.device("cpu")
ROWS = st.lists(
    st.tuples(st.floats(-1e6, 1e6), st.integers(0, 50), st.booleans()), min_size=1, max_size=40
)


class Reads(TorchDispatchMode):
    """Counts the operations that make the host wait for the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "local_scalar_dense" in str(func) or "to_copy" in str(func)
        return func(*args, **kwargs or {})


@pytest.fixture
def meter():
    return Meter()


def sums(meter):
    """Return this rank's `(sum, weight)` by name."""
    meter.fold()
    return {name: (float(one.sum), one.weight) for name, one in meter._columns.items()}


def means(meter):
    return {name: total / weight for name, (total, weight) in sums(meter).items()}


@given(ROWS)
def test_a_mean_is_weighted_by_samples(rows):
    meter = Meter()
    for value, weight, as_tensor in rows:
        given = torch.tensor(value, dtype=torch.float64) if as_tensor else value
        meter.add({"loss": given}, weight)
    total, weight = sums(meter)["loss"]
    assert weight == sum(w for _, w, _ in rows)
    assert math.isclose(total, math.fsum(v * w for v, w, _ in rows), rel_tol=1e-9, abs_tol=1e-3)


@pytest.mark.parametrize("num_values", [1, 255, 256, 257, 1000])
def test_folding_changes_no_mean(meter, num_values):
    for value in range(num_values):
        meter.add({"a": torch.tensor(float(value)), "b": value}, 2.0)
        if value % 7 == 0:
            meter.fold()
    expected = (num_values - 1) / 2
    assert means(meter) == {"a": expected, "b": expected}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("make", [float, torch.tensor], ids=["number", "tensor"])
def test_what_has_no_weight_does_not_count_even_as_nan(meter, bad, make):
    meter.add({"loss": make(2.0)}, 3.0)
    meter.add({"loss": make(bad)}, 0.0)
    assert means(meter) == {"loss": 2.0}


@pytest.mark.parametrize("make", [float, torch.tensor], ids=["number", "tensor"])
def test_nan_with_a_weight_is_seen(meter, make):
    meter.add({"loss": make(math.nan)}, 1.0)
    meter.add({"loss": make(1.0)}, 1.0)
    assert math.isnan(means(meter)["loss"])


@pytest.mark.parametrize(
    "value",
    [
        3,
        True,
        np.float32(0.5),
        np.float64(0.5),
        np.int64(4),
        torch.tensor(5),
        torch.tensor([[1.5]]),
        torch.tensor(True),
        torch.tensor(0.5, dtype=torch.bfloat16),
        torch.tensor(2.0, requires_grad=True),
    ],
    ids=repr,
)
def test_any_one_number_is_a_metric(meter, value):
    meter.add({"x": value}, 1.0)
    assert means(meter) == {"x": value.item() if isinstance(value, torch.Tensor) else float(value)}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2, 3), "a tensor of shape [2, 3]"),
        (torch.zeros(0), "a tensor of shape [0]"),
        ("0.5", "of type str"),
        (None, "of type NoneType"),
        ([1.0], "of type list"),
        (1j, "of type complex"),
    ],
)
def test_what_is_not_one_number_is_refused(value, words):
    with pytest.raises(UsageError) as caught:
        Meter().add({"accuracy": value}, 1.0)
    assert caught.value.what == f"the metric `accuracy` is not one number but {words}"
    assert caught.value.where == "run.step / run.log"
    assert caught.value.fix == "log its mean: accuracy=accuracy.float().mean()"


def test_adding_tensors_reads_none_of_them(meter):
    with Reads() as reads:
        for value in range(300):  # beyond the number at which they are folded
            meter.add({"loss": torch.full((), float(value), dtype=torch.float64)}, 1.0)
    assert reads.count == 0
    with Reads() as reads:
        assert means(meter) == {"loss": 149.5}
    assert reads.count == 1


def test_a_tensor_that_is_changed_later_counts_as_it_was(meter):
    value = torch.tensor(1.0)
    for _ in range(3):
        meter.add({"total": value}, 1.0)
        value += 1.0
    assert means(meter) == {"total": 2.0}


def test_a_metric_keeps_no_graph_alive(meter):
    weight = torch.ones(3, requires_grad=True)
    meter.add({"loss": (weight * 2).sum()}, 1.0)
    meter.fold()
    assert not torch.as_tensor(meter._columns["loss"].sum).requires_grad


def test_a_cleared_meter_has_nothing(meter):
    meter.add({"loss": 1.0}, 1.0)
    meter.clear()
    assert sums(meter) == {}


@pytest.mark.usefixtures("alone")
def test_a_reduction_gives_sums_and_weights_also_of_what_has_no_weight(meter):
    assert meter.totals(CPU) == {}
    meter.add({"b": 3.0, "a": torch.tensor(1.0)}, 1.0)
    meter.add({"b": 6.0}, 2.0)
    meter.add({"c": 1.0}, 0.0)
    assert meter.totals(CPU) == {"a": (1.0, 1.0), "b": (15.0, 3.0), "c": (0.0, 0.0)}
