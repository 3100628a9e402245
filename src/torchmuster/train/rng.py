"""The random state of a process: torch, CUDA, numpy and `random`, captured and restored.

The state is plain values and tensors, so that a snapshot can hold it without a pickle.
"""

import ctypes
import random
import struct
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
    seed_for_sample(seed)


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
    """Restore the state from `capture`; skip an absent device or module."""
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
    """Return the state of the CPU generators for `moved_since`; takes about 3 us."""
    return torch.default_generator.get_state(), _python_state(), _numpy_state()


def moved_since(state: tuple[Any, ...]) -> bool:
    """Return whether any CPU generator has been used since `cheap_state`.

    A draw moves the Mersenne Twister's index, begins a new block of words, or uses the normal
    number left over by an earlier draw.
    """
    if _bytes_of(torch.default_generator.get_state()) != _bytes_of(state[0]):
        return True
    if _python_state() != state[1]:
        return True
    before = state[2]
    if before is None or before["has_gauss"]:
        return _exact_numpy_state_differs(before)
    return _numpy_words() != before["words"]


def put_back(state: tuple[Any, ...]) -> None:
    """Undo draws since `cheap_state`."""
    torch.default_generator.set_state(state[0])
    memory, gauss = state[1]
    words = _words_of(memory) if isinstance(memory, bytes) else memory
    random.setstate((_VERSION, words, gauss))
    numpy_random = _numpy_random()
    if numpy_random is not None and state[2] is not None:
        inner = state[2]["state"]
        gauss = (state[2]["has_gauss"], state[2]["gauss"])
        numpy_random.set_state(("MT19937", inner["key"], inner["pos"], *gauss))


def _bytes_of(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


_VERSION = 3  # of `random.getstate()`
# Source: Modules/_randommodule.c of CPython, `RandomObject`: after the object header the index,
# then 624 words.
_PYTHON_MEMORY = struct.Struct("@i624I")


def _find_python_memory() -> int | None:
    """Return the address of `random`'s state; None for a Python with another memory layout."""
    generator = getattr(random, "_inst", None)
    if type(generator) is not random.Random or sys.implementation.name != "cpython":
        return None
    address = id(generator) + object.__basicsize__
    if type(generator).__basicsize__ < object.__basicsize__ + _PYTHON_MEMORY.size:
        return None
    words = _words_of(ctypes.string_at(address, _PYTHON_MEMORY.size))
    return address if random.getstate()[1] == words else None


def _words_of(memory: bytes) -> tuple[int, ...]:
    """Return the words in the order of `random.getstate()`, the index last."""
    index, *words = _PYTHON_MEMORY.unpack(memory)
    return (*words, index)


_python_memory = _find_python_memory()


def _python_state() -> tuple[bytes | tuple[int, ...], float | None]:
    """Return the state of `random` and its left-over normal number; `getstate` alone takes 7 us."""
    if _python_memory is None:
        return random.getstate()[1:]
    memory = ctypes.string_at(_python_memory, _PYTHON_MEMORY.size)
    return memory, random._inst.gauss_next  # type: ignore[attr-defined]


_last_numpy_state: dict[str, Any] | None = None
_numpy_memory: tuple[Any, int] | None = None  # the generator, and where its state is


def _numpy_state() -> dict[str, Any] | None:
    """Return numpy's state; reading takes 28 us, so reuse the last one while it is unchanged."""
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
    """Return the words and the index of numpy's Mersenne Twister, read from its memory.

    Source: numpy/random/src/mt19937/mt19937.h, `struct s_mt19937_state`: 624 words, then the index.
    """
    global _numpy_memory
    generator = sys.modules["numpy.random"].mtrand._rand._bit_generator
    if type(generator).__name__ != "MT19937":
        return repr(generator.state).encode()
    if _numpy_memory is None or _numpy_memory[0] is not generator:
        _numpy_memory = (generator, generator.ctypes.state_address)
    return ctypes.string_at(_numpy_memory[1], 625 * 4)


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
    """Seed the CPU generators in 11 us; torch.manual_seed alone would take longer."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy_random = _numpy_random()
    if numpy_random is not None:
        numpy_random.seed(seed & 0xFFFFFFFF)


def _numpy_random() -> Any:
    """Return numpy's random module if it has been imported: otherwise it has no state."""
    return sys.modules.get("numpy.random")
