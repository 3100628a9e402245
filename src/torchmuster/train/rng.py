"""The random state of a process: torch, CUDA, numpy and `random`, captured and restored.

The state is plain values and tensors, so that a snapshot can hold it without a pickle.
"""

import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchmuster.train.batches.order import mix


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
    """Restore the state from `capture`; an absent device or module is skipped."""
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
    """Restore all generators after the body."""
    state = capture()
    try:
        yield
    finally:
        restore(state)


def cheap_state() -> tuple[Any, ...]:
    """Return the state of the CPU generators for `moved_since`; takes about 10 us."""
    return torch.default_generator.get_state(), random.getstate(), _numpy_state()


def moved_since(state: tuple[Any, ...]) -> bool:
    """Return whether any CPU generator has been drawn from since `cheap_state`.

    A draw moves the Mersenne Twister's index, or begins a new block of words, or uses the normal
    number that an earlier draw has left over.
    """
    if not torch.equal(torch.default_generator.get_state(), state[0]):
        return True
    (_, words, gauss), (_, old_words, old_gauss) = random.getstate(), state[1]
    if words[-1] != old_words[-1] or words[0] != old_words[0] or gauss != old_gauss:
        return True
    before = state[2]
    if before is None or before["has_gauss"]:
        return _exact_numpy_state_differs(before)
    return _numpy_words() != before["words"]


def put_back(state: tuple[Any, ...]) -> None:
    """Undo draws since `cheap_state`."""
    torch.default_generator.set_state(state[0])
    random.setstate(state[1])
    numpy_random = _numpy_random()
    if numpy_random is not None and state[2] is not None:
        inner = state[2]["state"]
        gauss = (state[2]["has_gauss"], state[2]["gauss"])
        numpy_random.set_state(("MT19937", inner["key"], inner["pos"], *gauss))


_last_numpy_state: dict[str, Any] | None = None


def _numpy_state() -> dict[str, Any] | None:
    """Return numpy's state; reading it takes 28 us, so the last one is reused while it is unchanged."""
    global _last_numpy_state
    numpy_random = _numpy_random()
    if numpy_random is None:
        return None
    words = _numpy_words()
    last = _last_numpy_state
    if last is None or last["words"] != words or last["has_gauss"]:
        state = dict(numpy_random.get_state(legacy=False))
        _last_numpy_state = {**state, "words": words}
    return _last_numpy_state


def _numpy_words() -> bytes:
    """Return the first word and the index of numpy's Mersenne Twister, read from its memory.

    Source: numpy/random/src/mt19937/mt19937.h, `struct s_mt19937_state`: 624 words, then the index.
    """
    generator = sys.modules["numpy.random"].mtrand._rand._bit_generator
    if type(generator).__name__ != "MT19937":
        return repr(generator.state).encode()
    address = generator.ctypes.state_address
    return ctypes.string_at(address, 4) + ctypes.string_at(address + 624 * 4, 4)


def _exact_numpy_state_differs(before: dict[str, Any] | None) -> bool:
    numpy_random = _numpy_random()
    if numpy_random is None or before is None:
        return (numpy_random is None) != (before is None)
    now = numpy_random.get_state(legacy=False)
    same = all(now[name] == before[name] for name in ("has_gauss", "gauss"))
    return (
        not same
        or bool((now["state"]["key"] != before["state"]["key"]).any())
        or (now["state"]["pos"] != before["state"]["pos"])
    )


def seed_for_sample(seed: int) -> None:
    """Seed the CPU generators: 11 us where torch.manual_seed alone would take longer."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy_random = _numpy_random()
    if numpy_random is not None:
        numpy_random.seed(seed & 0xFFFFFFFF)


def _numpy_random() -> Any:
    """Return numpy's random module if it was imported: otherwise it has no state."""
    return sys.modules.get("numpy.random")
