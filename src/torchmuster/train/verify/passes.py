"""The forwards and the backward of a step, noted as they are made, sent to another rank, and made again there.

What is noted is what a model was called with (inputs, random numbers, buffers, autocast, threads), the gradients that came back to its outputs, and a
digest of what it has made of them: its outputs, and this rank's own gradient of each parameter, before it is added to the others'. So the
loss need not be known, and nothing of the script's own code is called again but the models.
"""

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from torchmuster.train import rng
from torchmuster.train.heartbeat import StepState
from torchmuster.train.replay.forward import bytes_of, versions
from torchmuster.train.snapshot.state import dtype_named, pack, unpack
from torchmuster.train.wrap import unwrap, weigh

_DEVICES = ("cpu", "cuda")
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64  # bytes: torch's own, of what it allocates for processors


Passes = list[list[dict[str, Any]]]  # of a step, each with its calls


class CantRepeatError(Exception):
    """What a rank has noted can't be made again; the message says why."""


@dataclass(slots=True, kw_only=True)
class NotedCall:
    """One forward of a model.

    Attributes:
        name: Of the model among the run's objects.
        state: What it was called with, as the forward found it.
        num_differentiable: How many outputs a gradient can come back to.
        gradients: What came back to them.
    """

    name: str
    state: dict[str, Any]
    versions: list[int]
    digest: str = ""
    weight: float = 1.0
    num_differentiable: int = 0
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)


class PassNotes:
    """Notes the passes of this rank in one step: each is a backward and the forwards that led to it.

    Args:
        models: As the script calls them, by name.
        step_state: Of the current batch.
    """

    def __init__(self, models: Mapping[str, nn.Module], step_state: StepState) -> None:
        self._models, self._step_state = models, step_state
        self._ended: list[
            tuple[list[NotedCall], str]
        ] = []  # passes before this one, and their digests
        self._calls: list[NotedCall] = []
        self._own: dict[str, str] = {}  # digests of gradients, by parameter
        self._hooks: list[Any] = []
        self._is_twice = False
        self._weights: list[int] = []  # how often each has been changed before
        self.is_on = False

    def begin(self) -> None:
        """Note from now on."""
        self.end()
        self.is_on = True
        self._weights = self._changes_of_weights()
        for name, model in self._models.items():
            for path, parameter in unwrap(model).named_parameters():
                if parameter.requires_grad:
                    key = f"{name}.{path}"
                    self._hooks.append(
                        parameter.register_hook(lambda g, key=key: self._note_own(key, g))
                    )

    def end(self) -> None:
        """Note no more, and forget."""
        self.is_on, self._is_twice = False, False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._ended, self._calls, self._own = [], [], {}

    def before(self, name: str, model: nn.Module, inputs: Any, kwargs: Any) -> None:
        """Note what a model is called with."""
        if not self.is_on or not torch.is_grad_enabled():
            return
        if self._own:  # a backward has ended
            self._close_pass()
        state = {
            "inputs": inputs,
            "kwargs": kwargs,
            "buffers": {path: one.clone() for path, one in unwrap(model).named_buffers()},
            "trains": [module.training for module in unwrap(model).modules()],
            "generators": rng.capture(),
            "autocast": [
                [d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)]
                for d in _DEVICES
                if d == "cpu" or torch.cuda.is_available()
            ],
            "threads": torch.get_num_threads(),
        }
        call = NotedCall(name=name, state=state, versions=versions(inputs, kwargs))
        self._calls.append(call)

    def after(self, name: str, outputs: Any) -> Any:
        """Note what a model has returned, and return it; of several outputs copies, as one may be made from another."""
        if not self.is_on or not torch.is_grad_enabled() or not self._calls:
            return outputs
        call = self._calls[-1]
        if call.name != name:
            return outputs
        call.weight = self._step_state.weight
        leaves = tensors_of(outputs)
        call.digest = digest(leaves)
        found = _differentiable(outputs)
        call.num_differentiable = len(found)
        tells = [partial(self._note_back, call, index) for index in range(len(found))]
        if len(found) == 1:
            found[0].register_hook(tells[0])
            return outputs
        copies = {
            id(leaf): _Noted.apply(leaf, tell) for leaf, tell in zip(found, tells, strict=True)
        }
        return pytree.tree_map(lambda leaf: copies.get(id(leaf), leaf), outputs)

    def _note_back(self, call: NotedCall, index: int, gradient: torch.Tensor) -> None:
        if self.is_on:
            self._is_twice |= index in call.gradients
            call.gradients[index] = gradient.detach().clone()

    def _changes_of_weights(self) -> list[int]:
        models = map(unwrap, self._models.values())
        return [parameter._version for model in models for parameter in model.parameters()]

    def _note_own(self, key: str, gradient: torch.Tensor) -> None:
        if self.is_on and not self._step_state.settles:
            self._is_twice |= key in self._own
            self._own[key] = digest([gradient])

    def _close_pass(self) -> None:
        digests = [call.digest for call in self._calls]
        self._ended.append((self._calls, digest_of_pass(digests, self._own)))
        self._calls, self._own = [], {}

    def result(self) -> str:
        """Return the digest of what this rank has made, from all passes of the step; afterwards there is nothing to be noted."""
        if self._own:
            self._close_pass()
        return " ".join(made for _, made in self._ended)

    def passes(self, buffers_of_first: Mapping[str, Any]) -> "Passes":
        """Return all that is needed to make the passes again.

        Args:
            buffers_of_first: Rank 0's buffers before each forward, by number, where DDP has sent them to all ranks.

        Raises:
            CantRepeatError: They can't be made again.
        """
        if not self._ended:
            raise CantRepeatError("no model given to resume() has been called and got a gradient")
        if self._is_twice:
            raise CantRepeatError("backward was called twice through one forward")
        if self._weights != self._changes_of_weights():
            raise CantRepeatError(
                "the weights have changed since the step's first forward: the optimizer calls a closure, or the script changes them"
            )
        number = 0
        passes: Passes = []
        for calls, _ in self._ended:
            if not any(call.gradients for call in calls):
                raise CantRepeatError(
                    "no gradient came back to what a model has returned, which has to be tensors, or lists, tuples and dicts of them"
                )
            passes.append([])
            for call in calls:
                passes[-1].append(_plain(call, buffers_of_first.get(str(number))))
                number += 1
        return passes

    def synced_buffers(self) -> bytes:
        """Return the buffers that DDP sends from rank 0 to all others at each forward, as rank 0 had them."""
        noted = [call for calls, _ in self._ended for call in calls]
        found = {
            str(number): call.state["buffers"]
            for number, call in enumerate(noted)
            if _syncs_buffers(self._models[call.name])
        }
        return to_bytes(found)


def _plain(call: NotedCall, buffers: Any) -> dict[str, Any]:
    """Return what is sent of a call; `buffers` are those that it had, if they were not this rank's own."""
    state = call.state
    if call.versions != versions(state["inputs"], state["kwargs"]):
        raise CantRepeatError("a model's inputs have been changed in place since")
    return state | {
        "name": call.name,
        "weight": call.weight,
        "gradients": [call.gradients.get(i) for i in range(call.num_differentiable)],
        "needs": [leaf.requires_grad for leaf in _walk((state["inputs"], state["kwargs"]))],
        "buffers": state["buffers"] if buffers is None else buffers,
    }


class _Noted(torch.autograd.Function):
    """A copy whose gradient is told."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, tell: Callable[[torch.Tensor], None]) -> Any:
        ctx.tell = tell
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.tell(gradients[0])
        return gradients[0], None


def parcel_of(passes: Passes) -> bytes:
    """Return passes for another rank.

    Raises:
        CantRepeatError: A model was called with what can't be sent.
    """
    try:
        return to_bytes(passes)
    except Exception as error:  # its own sentence names the value
        raise CantRepeatError(f"{error}: a model was called with it") from error


def repeat(passes: Passes, models: Mapping[str, nn.Module], device: torch.device) -> str:
    """Make the passes of a step again, and return their digests; models, gradients and generators stay as they are.

    Raises:
        CantRepeatError: A model could not be called once more.
    """
    modules = [module for model in models.values() for module in unwrap(model).modules()]
    kept = [(module, module.training, dict(module._buffers)) for module in modules]
    threads = torch.get_num_threads()
    try:
        with rng.preserved(), torch.enable_grad():
            return " ".join(_pass_again(calls, models, device) for calls in passes)
    except Exception as error:
        line = (str(error).splitlines() or [""])[0][:300]
        raise CantRepeatError(
            f"a model can't be called once more: {type(error).__name__}: {line}"
        ) from error
    finally:
        torch.set_num_threads(threads)
        for module, trains, buffers in kept:
            module.training = trains
            module._buffers.update(buffers)


def _pass_again(
    calls: Iterable[Mapping[str, Any]], models: Mapping[str, nn.Module], device: torch.device
) -> str:
    parameters = {
        f"{name}.{path}": parameter
        for name, model in models.items()
        for path, parameter in unwrap(model).named_parameters()
        if parameter.requires_grad
    }
    digests, roots, back = [], [], []
    for call in calls:
        outputs = _call_again(call, models[call["name"]], device)
        digests.append(digest(tensors_of(outputs)))
        differentiable = _differentiable(outputs)
        if len(differentiable) > 1:  # of one alone the noted gradient has its weight
            differentiable = _differentiable(weigh(outputs, call["weight"]))
        for leaf, gradient in zip(differentiable, call["gradients"], strict=True):
            if gradient is not None:
                roots.append(leaf)
                back.append(gradient)
    made = torch.autograd.grad(roots, list(parameters.values()), back, allow_unused=True)
    own = {k: digest([one]) for k, one in zip(parameters, made, strict=True) if one is not None}
    return digest_of_pass(digests, own)


def _call_again(call: Mapping[str, Any], wrapped: nn.Module, device: torch.device) -> Any:
    model = unwrap(wrapped)
    moves_inputs = bool(getattr(wrapped, "device_ids", None))  # as DDP does on a GPU
    for module, trains in zip(model.modules(), call["trains"], strict=True):
        module.training = trains
    for path, value in call["buffers"].items():  # new ones: a graph may still need those before
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        module._buffers[name] = value.clone().to(
            device if value.device.type != "cpu" else value.device
        )
    rng.restore(call["generators"])
    if call["threads"] != torch.get_num_threads():
        torch.set_num_threads(call["threads"])
    # Detached from what has led to them; memory and strides are the same.
    inputs, kwargs = pytree.tree_map_only(
        torch.Tensor, torch.Tensor.detach, (call["inputs"], call["kwargs"])
    )
    if moves_inputs:
        inputs, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda one: one.to(device), (inputs, kwargs)
        )
    for leaf, needs in zip(_walk((inputs, kwargs)), call["needs"], strict=True):
        leaf.requires_grad_(needs)
    with ExitStack() as stack:
        for kind, dtype, is_on in call["autocast"]:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on))
        return model(*inputs, **kwargs)


def digest_of_pass(outputs: Iterable[str], own: Mapping[str, str]) -> str:
    """Return the digest of a pass: of its outputs in order, and of the gradients by the names of their parameters."""
    text = "\n".join([*outputs, *(f"{name} {own[name]}" for name in sorted(own))])
    return hashlib.sha256(text.encode()).hexdigest()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return the SHA-256 of the bytes of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        if tensor.layout is torch.sparse_coo:
            whole = tensor.detach().coalesce()
            found.update(bytes_of(whole.indices()))
            found.update(bytes_of(whole.values()))
        else:
            found.update(bytes_of(tensor))
    return found.hexdigest()


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nest of values."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _walk(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a nest, in the order in which `pack` finds them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _walk(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _walk(one)


def _differentiable(outputs: Any) -> list[torch.Tensor]:
    leaves = (leaf for leaf in tensors_of(outputs) if leaf.requires_grad)
    return list({id(leaf): leaf for leaf in leaves}.values())


def _syncs_buffers(model: nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel) and bool(model.broadcast_buffers)


# Without a pickle: a header in JSON, then the bytes of the tensors.


def to_bytes(value: Any) -> bytes:
    """Return a nest of tensors and plain values as bytes.

    Raises:
        SnapshotError: A value is of a type that only running code could restore.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain = pack(value, "", tensors)
    table, parts = [], []
    for path, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        offset = tensor.data_ptr() % _ALIGNMENT // tensor.element_size()
        layout = [list(tensor.shape), list(tensor.stride()), offset]
        table.append([path, dtype, tensor.device.type, *layout])
        parts.append(bytes_of(_distinct_elements(tensor)))
    header = json.dumps([plain, table]).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *parts])


def _distinct_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view without the repetitions of what was expanded."""
    shape = [1 if stride == 0 else size for size, stride in _dimensions(tensor)]
    return tensor.as_strided(shape, tensor.stride()) if tensor.numel() else tensor


def _dimensions(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    return zip(tensor.shape, tensor.stride(), strict=True)


def from_bytes(data: bytes, device: torch.device) -> Any:
    """Inverse of `to_bytes`; what was on a GPU goes to `device`.

    Kernels depend on where numbers lie: a tensor has the strides and the alignment that it had.
    """
    (length,) = _LENGTH.unpack_from(data)
    plain, table = json.loads(data[_LENGTH.size : _LENGTH.size + length])
    at = _LENGTH.size + length
    tensors = {}
    for path, name, where, shape, stride, offset in table:
        dtype, target = dtype_named(name), torch.device("cpu") if where == "cpu" else device
        if not math.prod(shape):
            tensors[path] = torch.empty(shape, dtype=dtype, device=target)
            continue
        distinct = [1 if step == 0 else size for size, step in zip(shape, stride, strict=True)]
        num_bytes = math.prod(distinct) * dtype.itemsize
        numbers = torch.frombuffer(bytearray(data[at : at + num_bytes]), dtype=torch.uint8)
        at += num_bytes
        span = 1 + sum((size - 1) * step for size, step in zip(distinct, stride, strict=True))
        memory = torch.empty(span + offset, dtype=dtype, device=target)
        with torch.no_grad():
            memory.as_strided(distinct, stride, offset).copy_(numbers.view(dtype).view(distinct))
        tensors[path] = memory.as_strided(shape, stride, offset)
    return unpack(plain, tensors)
