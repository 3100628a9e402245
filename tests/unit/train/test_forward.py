import torch
from torch import nn

from torchmuster.train.finite import ForwardCall, checksum


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
