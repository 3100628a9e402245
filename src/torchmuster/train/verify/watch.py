"""Compares ranks' weights and two makings of a batch, every few steps before an optimizer's step.

    all ranks' weights compared -> each rank repeats another's passes -> digests compared
                                                                      | one differs
               repeated by its own rank, by the other once more, and by a third

No single rank can tell a processor that rarely adds wrongly from a good one: the loss stays
plausible. All ranks decide alike, from what all have gathered. A rank that is alone against others
that agree raises `DiffersError`, and its node gets no ranks again; if nobody can tell who is right,
all ranks raise it.
"""

import hashlib
import json
import math
import os
import platform
import re
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from torchmuster.core.model import contract
from torchmuster.core.model.progress import RankPhase
from torchmuster.core.model.ranks import name_ranks
from torchmuster.core.node.kernel import read_text
from torchmuster.errors import MusterError, UsageError
from torchmuster.train import rng
from torchmuster.train.exchange import broadcast_bytes, gather_json, shift_bytes
from torchmuster.train.finite import bytes_of, tensors_of, versions
from torchmuster.train.heartbeat import StepState
from torchmuster.train.memory import NodeSite, choose_shifts
from torchmuster.train.objects import Objects
from torchmuster.train.sinks import MetricsRecord
from torchmuster.train.snapshot.state import dtype_named, pack, unpack
from torchmuster.train.verify.judge import BatchResult, OddRank, judge, odd_weights
from torchmuster.train.wrap import unwrap, weigh

# The forwards and the backward of a step, recorded as they run, sent to another rank, and repeated
# there.
#
# Recorded are a model's arguments and circumstances (inputs, random numbers, buffers, autocast,
# threads), the gradients that came back to its outputs, and a digest of the results: its outputs,
# and this rank's gradient of each parameter before the all-reduce. So the loss need not be known,
# and only the models of the script's code are called again.


_DEVICES = ("cpu", "cuda")
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64  # torch's own for CPU memory, in bytes


Passes = list[list[dict[str, Any]]]  # of a step, each with its calls


class CantRepeatError(Exception):
    """What a rank has recorded can't be repeated; the message says why."""


@dataclass(slots=True, kw_only=True)
class NotedCall:
    """One forward of a model.

    Attributes:
        name: The name of the model among the run's objects.
        state: The arguments and circumstances before the forward.
        num_differentiable: How many outputs can receive a gradient.
        gradients: The gradients that they received.
    """

    name: str
    state: dict[str, Any]
    versions: list[int]
    digest: str = ""
    weight: float = 1.0
    num_differentiable: int = 0
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)


class PassNotes:
    """Records this rank's passes in one step: each is a backward and the forwards that led to it.

    Args:
        models: As the script calls them, by name.
        step_state: The current batch.
    """

    def __init__(self, models: Mapping[str, nn.Module], step_state: StepState) -> None:
        self._models, self._step_state = models, step_state
        # The passes before this one, and their digests.
        self._ended: list[tuple[list[NotedCall], str]] = []
        self._calls: list[NotedCall] = []
        self._own: dict[str, str] = {}  # digests of gradients, by parameter
        self._hooks: list[Any] = []
        self._is_twice = False
        self._weights: list[int] = []  # how often each weight had been changed
        self.is_on = False

    def begin(self) -> None:
        """Start recording."""
        self.end()
        self.is_on = True
        self._weights = self._changes_of_weights()
        self._hooks = [
            parameter.register_hook(partial(self._note_own, key))
            for key, parameter in _trained(self._models).items()
        ]

    def end(self) -> None:
        """Stop recording, and drop the records."""
        self.is_on, self._is_twice = False, False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._ended, self._calls, self._own = [], [], {}

    def before(self, name: str, model: nn.Module, inputs: Any, kwargs: Any) -> None:
        """Record the arguments and circumstances of a model's call."""
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
        """Record what a model returned, and return it.

        Several outputs are returned as copies, as one may be made from another.
        """
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
        """Return the digest of this rank's results over all passes, and close the last pass."""
        if self._own:
            self._close_pass()
        return " ".join(made for _, made in self._ended)

    def passes(self, buffers_of_first: Mapping[str, Any]) -> "Passes":
        """Return everything needed to repeat the passes.

        Args:
            buffers_of_first: Rank 0's buffers before each forward, by number, if DDP has sent them
                to all ranks.

        Raises:
            CantRepeatError: They can't be repeated.
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
        """Return rank 0's buffers before each forward, which DDP broadcasts to all other ranks."""
        noted = [call for calls, _ in self._ended for call in calls]
        found = {
            str(number): call.state["buffers"]
            for number, call in enumerate(noted)
            if isinstance(ddp := self._models[call.name], DistributedDataParallel)
            and ddp.broadcast_buffers
        }
        return to_bytes(found)


def _plain(call: NotedCall, buffers: Any) -> dict[str, Any]:
    """Return what is sent about a call; `buffers` are those it had, if not this rank's own."""
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
    """A copy that reports its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, tell: Callable[[torch.Tensor], None]) -> Any:
        ctx.tell = tell
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.tell(gradients[0])
        return gradients[0], None


def parcel_of(passes: Passes) -> bytes:
    """Serialize passes for another rank.

    Raises:
        CantRepeatError: A model was called with a value that can't be sent.
    """
    try:
        return to_bytes(passes)
    except Exception as error:  # its message names the value
        raise CantRepeatError(f"{error}: a model was called with it") from error


def repeat(passes: Passes, models: Mapping[str, nn.Module], device: torch.device) -> str:
    """Repeat the passes of a step, and return their digests; restore models and generators.

    Gradients are not changed.

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
    parameters = _trained(models)
    digests, roots, back = [], [], []
    for call in calls:
        outputs = _call_again(call, models[call["name"]], device)
        digests.append(digest(tensors_of(outputs)))
        differentiable = _differentiable(outputs)
        if len(differentiable) > 1:  # a single output's gradient includes it
            differentiable = _differentiable(weigh(outputs, call["weight"]))
        for leaf, gradient in zip(differentiable, call["gradients"], strict=True):
            if gradient is not None:
                roots.append(leaf)
                back.append(gradient)
    made = torch.autograd.grad(roots, list(parameters.values()), back, allow_unused=True)
    own = {k: digest([one]) for k, one in zip(parameters, made, strict=True) if one is not None}
    return digest_of_pass(digests, own)


def _trained(models: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    return {
        f"{name}.{path}": parameter
        for name, model in models.items()
        for path, parameter in unwrap(model).named_parameters()
        if parameter.requires_grad
    }


def _call_again(call: Mapping[str, Any], wrapped: nn.Module, device: torch.device) -> Any:
    model = unwrap(wrapped)
    moves_inputs = bool(getattr(wrapped, "device_ids", None))  # as DDP does on a GPU
    for module, trains in zip(model.modules(), call["trains"], strict=True):
        module.training = trains
    for path, value in call["buffers"].items():  # new tensors: a graph may still need the old ones
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        module._buffers[name] = value.clone().to(
            device if value.device.type != "cpu" else value.device
        )
    rng.restore(call["generators"])
    if call["threads"] != torch.get_num_threads():
        torch.set_num_threads(call["threads"])
    # Detached from their graph; memory and strides are the same.
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
    """Return the digest of a pass: of its outputs in order, and of gradients by parameter name."""
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


# Serialization without pickle: a JSON header, then the bytes of the tensors.


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
        distinct = _distinct(tensor.shape, tensor.stride())
        parts.append(
            bytes_of(tensor.as_strided(distinct, tensor.stride()) if tensor.numel() else tensor)
        )
    header = json.dumps([plain, table]).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *parts])


def _distinct(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return a shape without the repetitions of expanded dimensions."""
    return [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]


def from_bytes(data: bytes, device: torch.device) -> Any:
    """Invert `to_bytes`; GPU tensors go to `device`.

    Kernels depend on memory layout, so tensors keep their strides and alignment.
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
        distinct = _distinct(shape, stride)
        num_bytes = math.prod(distinct) * dtype.itemsize
        numbers = torch.frombuffer(bytearray(data[at : at + num_bytes]), dtype=torch.uint8)
        at += num_bytes
        span = 1 + sum((size - 1) * step for size, step in zip(distinct, stride, strict=True))
        memory = torch.empty(span + offset, dtype=dtype, device=target)
        with torch.no_grad():
            memory.as_strided(distinct, stride, offset).copy_(numbers.view(dtype).view(distinct))
        tensors[path] = memory.as_strided(shape, stride, offset)
    return unpack(plain, tensors)


_FOR_THE_ODD_ONE_S = 60.0  # until the launcher has ended the others


class DiffersError(MusterError):
    """A rank and another one computed different results from the same numbers.

    Attributes:
        muster_blames_node: It is this rank, alone against others that agree.
    """

    muster_blames_node = False


class CantVerifyError(UsageError):
    """The training can't be verified, in this attempt or another."""


def wanted_every(verify_every: int | None) -> int | None:
    """Return the steps between verifications, from the script, else from `--verify-every`."""
    if verify_every is not None:
        return verify_every
    text = os.environ.get(contract.VERIFY_VARIABLE)
    return int(text) if text else None


def verify_steps(
    every: int | None, run: Any, objects: Objects, world: Any, record: MetricsRecord
) -> None:
    """Verify a run's steps from now on, if enabled.

    Raises:
        CantVerifyError: `every` is below one, or the training can't be verified.
    """
    every = wanted_every(every)
    if every is None or contract.replay_order(os.environ) is not None:
        return
    if every < 1:
        raise CantVerifyError(f"verify_every is {every}, below one", where="World.resume")
    if world.world_size == 1:
        world.say("verify_every: there is one rank, so its steps are compared with nothing")
        return
    StepVerifier(every, run, objects, world, record)


class StepVerifier:
    """Verifies every so many steps.

    Args:
        every: The number of steps.
        run: Counts the steps.
        objects: The run's objects: their models are called again.
        world: The ranks.
        record: Rank 0 records verifications in it.

    Attributes:
        every: See above.
    """

    def __init__(
        self, every: int, run: Any, objects: Objects, world: Any, record: MetricsRecord
    ) -> None:
        self.every, self._run, self._world, self._record = every, run, world, record
        self._models = {
            name: thing
            for name, thing in objects.by_name.items()
            if isinstance(thing, nn.Module) and any(p.requires_grad for p in thing.parameters())
        }
        _check(objects, self._models)
        self._shifts = self._choose_shifts()
        self._notes = PassNotes(self._models, world.step_state)
        self._noted_step = -1  # the step of the recorded passes
        self._done_step = -1  # the last verified step
        self._is_first = True
        for name, model in self._models.items():
            model.register_forward_pre_hook(partial(self._before, name), with_kwargs=True)
            model.register_forward_hook(partial(self._after, name))
        for optimizer in objects.optimizers():
            optimizer.register_step_pre_hook(self._look)

    def __deepcopy__(self, memo: object) -> "StepVerifier":
        """Return itself: the hooks of a copied model refer to the one that verifies."""
        return self

    def _choose_shifts(self) -> list[int]:
        """Return the shifts to the ranks that repeat a rank's passes: other nodes' if possible."""
        mine = {"node": self._world.node_rank, "computes": _computes_as(self._world.device)}
        gathered = gather_json(mine)
        kinds: dict[str, list[int]] = {}
        for rank, one in enumerate(gathered):
            kinds.setdefault(one["computes"], []).append(rank)
        if len(kinds) > 1:
            raise CantVerifyError(
                "verify_every compares bit for bit, and the ranks compute with different hardware or versions",
                where="World.resume",
                why="; ".join(f"{name_ranks(ranks)}: {kind}" for kind, ranks in kinds.items()),
                fix="train on nodes of one kind, or without verify_every",
            )
        self._nodes = [int(one["node"]) for one in gathered]
        return choose_shifts([NodeSite(machine=str(one["node"])) for one in gathered], 2)

    # Recording.

    def _before(self, name: str, model: nn.Module, inputs: Any, kwargs: Any) -> None:
        step = self._run.steps_done + 1
        if step % self.every or step == self._done_step:
            if self._notes.is_on:
                self._notes.end()
        else:
            if self._noted_step != step or not self._notes.is_on:
                self._notes.begin()
                self._noted_step = step
            self._notes.before(name, model, inputs, kwargs)

    def _after(self, name: str, model: nn.Module, inputs: Any, outputs: Any) -> Any:
        return self._notes.after(name, outputs)

    # Comparing.

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        step = self._noted_step  # the script may have counted this step already
        if not self._notes.is_on or step == self._done_step:
            return
        self._done_step = step
        began = time.monotonic()
        with self._world.step_state.heartbeat.during(RankPhase.EVALUATE):
            self._compare_weights(step)
            self._compare_passes(step)
        self._notes.end()
        elapsed_s = time.monotonic() - began
        if self._world.rank == 0:
            self._record.event("verified", step=step, elapsed_s=round(elapsed_s, 6))
        if self._is_first:
            self._is_first = False
            self._world.say(
                f"step {step}: made again on other ranks, bit for bit the same ({elapsed_s:.3f} s);"
                f" from here on every {self.every} steps"
            )

    def _compare_weights(self, step: int) -> None:
        parameters = [
            p.detach() for model in self._models.values() for p in unwrap(model).parameters()
        ]
        odd, groups = odd_weights(gather_json(digest(parameters)))
        if len(groups) == 1:
            return
        words = "; ".join(
            f"{name_ranks(ranks)} have the same" for ranks in groups if len(ranks) > 1
        )
        self._tell(step, odd, "weights")
        if odd is None:
            raise DiffersError(
                f"the weights before step {step} are not the same on all ranks",
                why=words or "no two ranks have the same",
                fix="does the script change weights on some ranks only? Otherwise look at the machines: `muster doctor`",
            )
        self._end(
            odd,
            f"before step {step} rank {odd} has other weights than all other ranks",
            words,
            "does the script change weights on this rank only? Otherwise look at its memory and its device",
        )

    def _compare_passes(self, step: int) -> None:
        first, second = self._shifts[0], self._shifts[-1]
        own = self._notes.result()
        passes, parcel = self._parcel()
        rounds = [(0, own), (first, self._again(parcel, first))]
        makings = _makings(rounds)
        if not judge(makings, self._nodes).batches:
            return
        live = self._repeat(passes)
        again = self._again(parcel, 0)
        more = [(shift, self._again(parcel, shift)) for shift in dict.fromkeys((first, second))]
        makings += _makings([(0, live), (0, again), *more])
        # If a rank gets another result from a copy than from the original, copies prove nothing.
        is_agreed = all(gather_json(live == again))
        verdict = judge(makings, self._nodes)
        self._raise(step, verdict if is_agreed else OddRank(batches=verdict.batches), makings)

    def _parcel(self) -> tuple[Passes, bytes]:
        """Return what is needed to repeat the passes, here and elsewhere; a collective.

        All ranks raise if one of them can't provide it.
        """
        buffers = from_bytes(broadcast_bytes(self._notes.synced_buffers(), 0), self._world.device)
        passes, parcel, why = Passes(), b"", ""
        try:
            passes = self._notes.passes(buffers)
            parcel = parcel_of(passes)
        except CantRepeatError as error:
            why = str(error)
        _refuse(gather_json(why))
        return passes, parcel

    def _again(self, parcel: bytes, shift: int) -> str:
        return self._repeat(from_bytes(shift_bytes(parcel, shift), self._world.device))

    def _repeat(self, passes: Passes) -> str:
        made, why = "", ""
        was_on, self._notes.is_on = self._notes.is_on, False
        try:
            made = repeat(passes, self._models, self._world.device)
        except CantRepeatError as error:
            why = str(error)
        self._notes.is_on = was_on
        _refuse(gather_json(why))
        return made

    def _raise(self, step: int, verdict: OddRank, makings: list[BatchResult]) -> None:
        odd = verdict.odd
        self._tell(step, odd, "gradients")
        batches = name_ranks(list(verdict.batches))
        if odd is None:
            same = sum(
                len({one.digest for one in makings if one.batch == batch and one.by == batch}) == 1
                for batch in verdict.batches
            )
            why = (
                "no two ranks agree against a single third one, so nobody can tell which is right"
                if same == len(verdict.batches)
                else "a rank that makes its own batch again comes to something else itself"
            )
            raise DiffersError(
                f"step {step} made again on other ranks is not bit for bit the same: the batch of {batches}",
                why=why,
                fix="does the model draw random numbers that are not torch's, keep state outside of buffers, or use operations that"
                " are not deterministic (`torch.use_deterministic_algorithms(True)`)? Otherwise look at the machines: `muster doctor`",
            )
        against = name_ranks(list(verdict.against))
        agree = "agree" if len(verdict.against) > 1 else "has another result"
        how = "once: made again, it is the same" if verdict.is_once else "each time"
        self._end(
            odd,
            f"rank {odd} has computed something else than the others in step {step}",
            f"outputs and gradients of the batch of {batches}: {against} {agree}, rank {odd} differs {how}",
            "does the model do something else on this rank (`if rank == 0:`), or in its first call? Otherwise look at the memory and the"
            " device of its machine",
        )

    def _tell(self, step: int, odd: int | None, what: str) -> None:
        if self._world.rank == 0:
            self._record.event("differs", step=step, what=what, rank=odd)

    def _end(self, odd: int, what: str, why: str, fix: str) -> None:
        """Raise on the odd rank; the others wait for the launcher, to not seem to be the cause."""
        error = DiffersError(what, where=f"rank {odd}", why=why, fix=fix)
        if self._world.rank != odd:
            threading.Event().wait(_FOR_THE_ODD_ONE_S)
            raise error
        error.muster_blames_node = True
        raise error


def _makings(rounds: list[tuple[int, str]]) -> list[BatchResult]:
    """Return all ranks' makings, in the order of the rounds; a collective."""
    gathered: list[list[str]] = gather_json([made for _, made in rounds])
    size = len(gathered)
    return [
        BatchResult(batch=(by + shift) % size, by=by, digest=gathered[by][number])
        for number, (shift, _) in enumerate(rounds)
        for by in range(size)
    ]


def _refuse(gathered: list[str]) -> None:
    """Refuse on all ranks what one of them can't repeat."""
    ranks = [rank for rank, why in enumerate(gathered) if why]
    if ranks:
        raise CantVerifyError(
            "this step can't be made again on another rank, so verify_every can't compare it",
            where=name_ranks(ranks),
            why=gathered[ranks[0]],
            fix="train without verify_every",
        )


def _check(objects: Objects, models: dict[str, nn.Module]) -> None:
    if objects.is_sharded:
        raise CantVerifyError(
            "verify_every needs models of which each rank has the whole",
            where="World.resume",
            why="a rank has only a part of a sharded model, so no other can make its step again",
            fix="tm.wrap(model) without sharded=True",
        )
    if not models or not objects.optimizers():
        raise CantVerifyError(
            "verify_every needs model= and optimizer=",
            where="World.resume",
            why="models are called again, in front of an optimizer's step",
        )
    synced = [
        n for n, m in models.items() if any(isinstance(o, nn.SyncBatchNorm) for o in m.modules())
    ]
    if synced:
        raise CantVerifyError(
            f"verify_every can't make a step of `{synced[0]}` again: it has SyncBatchNorm",
            where="World.resume",
            why="its statistics are sums over all ranks, whose last bits depend on their order",
            fix="train without verify_every",
        )
    bare = [name for name, model in models.items() if unwrap(model) is model]
    if bare:
        raise CantVerifyError(
            f"verify_every needs models that are the same on all ranks: `{bare[0]}` is not wrapped",
            where="World.resume",
            fix=f"{bare[0]} = tm.wrap({bare[0]})",
        )


def _computes_as(device: torch.device) -> str:
    """Return what the last bits of a result depend on."""
    words = [f"torch {torch.__version__}"]
    if device.type == "cuda":
        words += [torch.cuda.get_device_name(device), f"CUDA {torch.version.cuda}"]
    else:
        vendor = re.search(r"^vendor_id.*?:(.*)", read_text("/proc/cpuinfo"), re.MULTILINE)
        words += [platform.machine(), torch.backends.cpu.get_cpu_capability()]
        words += [vendor[1].strip()] if vendor else []
    return ", ".join(filter(None, words))
