"""The random state of a process: torch, CUDA, numpy and `random`, captured and put back.

The state is plain values and tensors, so that a snapshot can hold it without a pickle.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchmuster.train.order import mix


def seed_everything(*words: int) -> None:
    """Seed torch (all devices), numpy and `random` from `words`."""
    seed = mix(*words)
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy_random := _numpy_random()) is not None:
        numpy_random.seed(seed & 0xFFFFFFFF)


def capture() -> dict[str, Any]:
    """Return the state of all generators of this process.

    Returns:
        `torch`: `(5056,)` uint8; `cuda`: the current device's, `(16,)` uint8, or None;
        `python`: `random.getstate()`; `numpy`: `(name, (624,) uint32 as hex, pos, ...)` or None.
    """
    numpy_random = _numpy_random()
    numpy_state = None
    if numpy_random is not None:
        name, keys, *rest = numpy_random.get_state()
        numpy_state = [name, keys.tobytes().hex(), *rest]
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": numpy_state,
    }


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` returned; a device or module that is absent is left out."""
    torch.set_rng_state(state["torch"].cpu())
    if state.get("cuda") is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if state.get("numpy") is not None:
        import numpy as np

        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.frombuffer(bytes.fromhex(keys), dtype=np.uint32), *rest))


@contextmanager
def preserved() -> Iterator[None]:
    """Put all generators back as they were, whatever the body draws."""
    state = capture()
    try:
        yield
    finally:
        restore(state)


def cheap_state() -> tuple[Any, ...]:
    """Return the CPU generators' state in a form for `moved_since`: about 20 us."""
    numpy_random = _numpy_random()
    bits = None
    if numpy_random is not None:
        inner = numpy_random.get_state(legacy=False)
        bits = (inner["state"]["key"], inner["state"]["pos"], inner["has_gauss"], inner["gauss"])
    return torch.default_generator.get_state(), random.getstate(), bits


def moved_since(state: tuple[Any, ...]) -> bool:
    """Say whether any CPU generator has been drawn from since `cheap_state`."""
    now = cheap_state()
    if now[1] != state[1] or not torch.equal(now[0], state[0]):
        return True
    if now[2] is None or state[2] is None:
        return now[2] is not state[2]
    return now[2][1:] != state[2][1:] or bool((now[2][0] != state[2][0]).any())


def put_back(state: tuple[Any, ...]) -> None:
    """Undo draws since `cheap_state`."""
    torch.default_generator.set_state(state[0])
    random.setstate(state[1])
    numpy_random = _numpy_random()
    if numpy_random is not None and state[2] is not None:
        numpy_random.set_state(("MT19937", *state[2]))


def seed_for_sample(seed: int) -> None:
    """Seed the CPU generators: 11 us where torch.manual_seed alone would take longer."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy_random = _numpy_random()
    if numpy_random is not None:
        numpy_random.seed(seed & 0xFFFFFFFF)


def _numpy_random() -> Any:
    """Return numpy's module of generators if anybody has imported it: else it holds no state."""
    return sys.modules.get("numpy.random")
