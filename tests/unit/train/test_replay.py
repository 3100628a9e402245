"""What a replay looks for: where a value that is not finite was made, whether it is made again, and from which snapshot."""

import math

import pytest
import torch
from torch import nn

from torchmuster.train.finite import ForwardCall, checksum
from torchmuster.train.replay import GradientWatch, NanBirths, SnapshotsBefore
from torchmuster.train.snapshot.load import look
from torchmuster.train.snapshot.state import SnapshotError


class Head(nn.Module):
    def forward(self, x):
        return torch.log(x)


def births_of(call, modules=()):
    """Return what is told while `call` runs."""
    told = []
    with NanBirths(dict(modules), told.append):
        call()
    return told


def test_the_operation_and_its_line_are_named_and_what_follows_from_it_is_not():
    x = torch.tensor([-1.0, 2.0])

    def step():
        y = torch.log(x)  # here
        return (y * 2).sum().sqrt()

    (birth,) = births_of(step)
    assert birth.text.startswith("`log` at ")
    assert "has made NaN: 1 NaN of 2 values, float32 [2]; from float32 [2] between -1 and 2" in (
        birth.text
    )
    assert birth.frame.f_code is step.__code__
    assert birth.text.split(" has made")[0].endswith(f":{step.__code__.co_firstlineno + 1}")


def test_the_module_is_named():
    model = nn.Sequential(nn.Identity(), Head())
    names = {"model.1": model[1], "model": model}
    (birth,) = births_of(lambda: model(torch.tensor([-1.0])), names)
    assert "in module `model.1` has made NaN" in birth.text


def test_an_operation_in_place_and_one_of_an_infinity_are_found():
    x = torch.tensor([-1.0])
    (birth,) = births_of(x.log_)
    assert "`log_`" in birth.text
    huge = torch.tensor([3e38])
    (birth,) = births_of(lambda: (huge * 10) - (huge * 10))
    assert "`__sub__`" in birth.text or "`sub`" in birth.text


def test_what_comes_with_the_data_is_told_as_that():
    batch = torch.tensor([1.0, math.nan])
    (birth,) = births_of(lambda: [(batch + 1).exp()])
    assert birth.text.startswith("NaN came into `")


def test_a_line_is_told_once_and_finite_numbers_never():
    x = torch.tensor([-1.0])
    assert len(births_of(lambda: [torch.log(x) for _ in range(3)])) == 1
    assert births_of(lambda: torch.log(x.abs()).softmax(0)) == []


def test_memory_that_nobody_has_written_is_no_birth():
    assert births_of(lambda: [torch.empty(1 << 12).new_empty(1 << 12) for _ in range(20)]) == []


def test_numbers_and_generators_are_those_without_a_look():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 1))
    x = torch.randn(16, 4)

    def step():
        torch.manual_seed(1)
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return [loss.detach(), torch.get_rng_state(), *(p.grad.clone() for p in model.parameters())]

    plain, watched = step(), []
    births_of(lambda: watched.extend(step()))
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_functions_that_torch_transforms_or_compiles_work_as_without_a_look():
    x = torch.tensor([[-1.0, 2.0], [3.0, 4.0]])

    def roots(row):
        return row.sqrt().sum()

    wanted = torch.vmap(roots)(x.abs()), torch.func.grad(roots)(x.abs()[0])
    found = []
    births_of(
        lambda: found.extend((torch.vmap(roots)(x.abs()), torch.func.grad(roots)(x.abs()[0])))
    )
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    compiled = torch.compile(roots, backend="aot_eager")
    births = births_of(lambda: found.append(compiled(x[0])))
    assert torch.isnan(found[-1])
    assert len(births) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_first_gradient_that_is_not_finite_is_named_once(bad):
    model, told = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), []
    watch = GradientWatch(dict(model.named_parameters()), told.append)
    (model(torch.ones(1, 2)) * bad).sum().backward()
    assert len(told) == 1
    assert told[0].startswith("the first gradient that is not finite on this rank is that of `1.")
    watch.close()
    (model(torch.ones(1, 2)) * bad).sum().backward()
    assert len(told) == 1


# A forward that is called again.


class Unsteady(nn.Module):
    """Not finite in the call of this number, or with this random number."""

    def __init__(self, *, bad_call=-1, above=2.0):
        super().__init__()
        self.calls, self.bad_call, self.above = 0, bad_call, above
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        is_bad = self.calls == self.bad_call or torch.rand(()).item() > self.above
        return x * (float("nan") if is_bad else 1.0)


def call(model, x):
    made = ForwardCall((x,), {})
    model(x)
    return made


def test_what_follows_from_the_inputs_is_bad_again():
    model, x = nn.Linear(1, 1), torch.tensor([[float("nan")]])
    assert call(model, x).is_bad_again(model) is True


def test_what_has_happened_once_is_not():
    model, x = Unsteady(bad_call=1), torch.ones(1)
    assert call(model, x).is_bad_again(model) is False


def test_random_numbers_are_those_of_the_first_time_and_generators_stay():
    torch.manual_seed(0)
    model, x = Unsteady(above=torch.rand(()).item() - 1e-6), torch.ones(1)
    torch.manual_seed(0)
    made = call(model, x)
    before, seen = torch.get_rng_state(), model.seen.clone()
    assert made.is_bad_again(model) is True
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model.seen, seen)


def test_inputs_that_were_changed_in_place_prove_nothing():
    model, x = Unsteady(bad_call=1), torch.ones(1)
    made = call(model, x)
    x.mul_(2)
    assert made.is_bad_again(model) is None


def test_a_model_that_can_t_be_called_twice_proves_nothing():
    class Proud(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 1:
                raise ValueError("once is enough")
            return x * float("nan")

    model = Proud()
    assert call(model, torch.ones(1)).is_bad_again(model) is None


def test_a_checksum_tells_bits_apart():
    zero = torch.zeros(3, dtype=torch.bfloat16)
    assert checksum([zero]) == checksum([zero.clone()])
    assert checksum([zero]) != checksum([-zero])
    assert checksum([torch.ones(2, 2).t()]) == checksum([torch.ones(2, 2)])


# The snapshots that a replay begins from.


@pytest.fixture
def folder(tmp_path):
    for step in (3, 6, 9):
        (tmp_path / f"step-{step:09d}").mkdir()
    return tmp_path


def test_only_what_is_older_than_the_step_is_seen(folder):
    assert SnapshotsBefore(str(folder), 9).steps() == [6, 3]
    assert SnapshotsBefore(str(folder), 7).steps() == [6, 3]
    assert SnapshotsBefore(str(folder), 3).steps() == []


def test_the_folder_stays_as_it_is(folder):
    source, before = SnapshotsBefore(str(folder), 7), sorted(folder.rglob("*"))
    found = look(source, report=lambda text: None)
    assert found.loaded is None
    assert [step for step, _ in found.damaged] == [6, 3]
    for change in (
        lambda: source.set_aside(6),
        lambda: source.delete(6),
        lambda: source.tidy(1),
        lambda: source.begin(7, 1),
        source.claim_generation,
    ):
        with pytest.raises(SnapshotError, match="a replay was about to change the snapshots"):
            change()
    assert sorted(folder.rglob("*")) == before
