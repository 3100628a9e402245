"""The random state of a process: captured, put back, and compared."""

import json
import random
from functools import partial

import numpy as np
import pytest
import torch

from torchmuster.train import rng

DRAWS = {
    "torch": lambda: torch.rand(()).item(),
    "numpy": np.random.random,
    "random": random.random,
}


def draw_all():
    return [torch.randn(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1)]


def draw_and_fail():
    draw_all()
    raise OSError("full")


@pytest.mark.parametrize(
    "seed",
    [
        partial(rng.seed_everything, 1, 2),
        *(partial(rng.seed_for_sample, seed) for seed in (0, 1, 2**32, 2**63 - 1)),
    ],
    ids=lambda seed: f"{seed.func.__name__}{seed.args}",
)
def test_the_same_words_seed_all_generators_alike(seed):
    seed()
    first = draw_all()
    draw_all()
    seed()
    assert draw_all() == first


@pytest.mark.parametrize("words", [(2, 1), (1, 3), (1,)])
def test_other_words_seed_every_generator_otherwise(words):
    rng.seed_everything(1, 2)
    first = draw_all()
    rng.seed_everything(*words)
    assert all(a != b for a, b in zip(draw_all(), first, strict=True))


@pytest.mark.parametrize("before", range(3))
def test_what_was_captured_is_put_back(before):
    for _ in range(before):
        draw_all()  # gauss and randn keep a second value back
    state = rng.capture()
    expected = [draw_all(), draw_all()]
    rng.restore(state)
    assert [draw_all(), draw_all()] == expected


def test_captured_state_survives_json():
    state = rng.capture()
    words = json.loads(json.dumps({"python": state["python"], "numpy": state["numpy"]}))
    expected = draw_all()
    rng.restore({**state, **words})
    assert draw_all() == expected


def test_captured_state_does_not_move_with_the_generator():
    state = rng.capture()
    draw_all()
    copy = rng.capture()
    rng.restore(state)
    first = draw_all()
    rng.restore(copy)
    assert draw_all() != first


def test_state_without_numpy_and_cuda_is_put_back():
    state = {**rng.capture(), "numpy": None, "cuda": None}
    expected = torch.rand(()).item()
    rng.restore(state)
    assert torch.rand(()).item() == expected


def test_a_body_that_draws_or_fails_leaves_the_generators_as_they_were():
    state = rng.cheap_state()
    with rng.preserved():
        draw_all()
    assert not rng.moved_since(state)
    with pytest.raises(OSError, match="full"), rng.preserved():
        draw_and_fail()
    assert not rng.moved_since(state)


@pytest.mark.parametrize("library", DRAWS)
def test_a_draw_is_seen_and_undone(library):
    state = rng.cheap_state()
    assert not rng.moved_since(state)
    first = DRAWS[library]()
    assert rng.moved_since(state)
    rng.put_back(state)
    assert not rng.moved_since(state)
    assert DRAWS[library]() == first


def test_a_python_that_has_its_generator_elsewhere_is_asked_for_its_state(monkeypatch):
    assert rng._find_python_memory() is not None  # all that we support have it there
    monkeypatch.setattr(rng, "_python_memory", None)
    state = rng.cheap_state()
    first = random.gauss(), random.gauss()  # the second is left over from the first
    assert rng.moved_since(state)
    rng.put_back(state)
    assert not rng.moved_since(state)
    assert (random.gauss(), random.gauss()) == first


def test_a_normal_number_that_is_left_over_is_put_back():
    first = random.gauss()
    state = rng.cheap_state()
    second = random.gauss()  # takes no word
    assert rng.moved_since(state)
    rng.put_back(state)
    assert first != second == random.gauss()


@pytest.mark.parametrize(
    "move",
    [
        *(partial(seed, 123_456) for seed in (torch.manual_seed, np.random.seed, random.seed)),
        partial(np.random.random, 312),  # 624 words of 32 bits: the position is what it was
    ],
    ids=["torch seeded", "numpy seeded", "random seeded", "round the generator's words"],
)
def test_seeding_anew_and_many_draws_are_seen(move):
    state = rng.cheap_state()
    move()
    assert rng.moved_since(state)
    rng.put_back(state)
