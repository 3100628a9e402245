"""Repeats a model's forward in the same process, to tell data and weights from a machine fault."""

import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchmuster.train import rng

_DEVICES = ("cpu", "cuda")


class ForwardCall:
    """The arguments of a model's call (references), and the state of the generators before it.

    Attributes:
        are_finite: For each tensor of the output a truth value on the device.
    """

    def __init__(self, inputs: Any, kwargs: Any) -> None:
        self.are_finite: list[torch.Tensor] = []
        self._inputs, self._kwargs = inputs, kwargs
        self._versions = versions(inputs, kwargs)
        self._generators = rng.cheap_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self._autocast = [d for d in _DEVICES if torch.is_autocast_enabled(d)]
        self._dtypes = [torch.get_autocast_dtype(d) for d in self._autocast]

    @property
    def is_bad(self) -> bool:
        """Whether its output was not finite; waits for the device."""
        return not all(bool(one) for one in self.are_finite)

    def is_bad_again(self, model: nn.Module) -> bool | None:
        """Repeat the forward; return whether its output is not finite, None if that is impossible.

        Args:
            model: Without wrappers: no collective may be called here.
        """
        if self._versions != versions(self._inputs, self._kwargs):
            return None  # the script has changed the inputs in place
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        with ExitStack() as stack:
            stack.enter_context(rng.preserved())
            stack.enter_context(torch.no_grad())
            for device, dtype in zip(self._autocast, self._dtypes, strict=True):
                stack.enter_context(torch.autocast(device, dtype=dtype))
            rng.put_back(self._generators)
            if self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda)
            try:
                outputs = model(*self._inputs, **self._kwargs)
            except Exception:  # noqa: BLE001 - of the script: it was not made to be called twice, and the other ranks wait
                return None
            finally:
                for buffer, value in buffers:
                    buffer.copy_(value)
        return not all(bool(torch.isfinite(one).all()) for one in floats_of(outputs))


def floats_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nest of values that can be not finite."""
    leaves = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return [leaf.detach() for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return a checksum of the bytes of tensors, to compare two makings of a step bit for bit."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(bytes_of(tensor), crc)
    return crc


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a dense tensor, in the order of its dimensions."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    flat = flat.as_strided(flat.shape, (1,))  # a single element may have another stride
    return memoryview(flat.view(torch.uint8).numpy())


def versions(*values: Any) -> list[int]:
    """Return how often each tensor in a nest of values has been changed in place."""
    leaves = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [0 if leaf.is_inference() else leaf._version for leaf in leaves]
