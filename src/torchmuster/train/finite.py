"""Finds gradients that are not finite before an optimizer uses them, and the ranks they came from.

Gradients are sums over the ranks, so one rank's NaN is in the weights of all after one step, and
nothing fails. The check uses the largest absolute value of all gradients: one number, equal on
every rank, so all ranks decide alike. A model's forward is repeated in the same process, to tell
data and weights from a machine fault.
"""

import math
import os
import socket
import zlib
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from torchmuster.core.files.layout import short_id
from torchmuster.core.model import contract
from torchmuster.core.model.ranks import name_ranks
from torchmuster.errors import MusterError, UsageError
from torchmuster.train import rng
from torchmuster.train.batches.loader import Loader
from torchmuster.train.exchange import gather_json
from torchmuster.train.objects import Objects
from torchmuster.train.sinks import MetricsRecord
from torchmuster.train.wrap import has_shards, shard_of, unwrap

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
        self._autocast = [
            (d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d)
        ]

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
            for device, dtype in self._autocast:
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


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nest of values."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def floats_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nest of values that can be not finite."""
    tensors = tensors_of(value)
    return [one.detach() for one in tensors if one.is_floating_point() or one.is_complex()]


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
    return [0 if one.is_inference() else one._version for one in tensors_of(values)]


CHOICES = ("ignore", "stop", "skip", "replay")
MOST_SKIPPED = 10  # steps in a row
_MOST_SAMPLES = 8  # in a message
_MOST_OUTPUTS = 4096
_MOST_CALLS = 64  # forwards of a step whose inputs are kept to repeat them


class NotFiniteError(MusterError):
    """A step's gradients are not finite."""

    muster_final = True  # the same samples and weights give the same gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class BadStep:
    """What is known about a step with gradients that are not finite; equal on all ranks.

    Attributes:
        step: The number of the step.
        ranks: The ranks whose model output was not finite.
        why: The same in words, with the result of the second forward.
        samples: The sample ids of the batch, by rank.
        checksums: The checksum of each rank's gradients.
        is_once: A rank repeated its forward, and the output was finite.
    """

    step: int
    ranks: list[int]
    why: str
    samples: dict[int, list[int]]
    checksums: list[int]
    is_once: bool


def watch_gradients(
    on_nan: str, run: Any, objects: Objects, data: Loader | None, world: Any, record: MetricsRecord
) -> None:
    """Check the gradients of a run from now on, unless `on_nan` ignores them.

    Raises:
        UsageError: `on_nan` is not one of `CHOICES`.
    """
    if on_nan not in CHOICES:
        names = ", ".join(f"`{name}`" for name in CHOICES)
        raise UsageError(f"on_nan is one of {names}", where=f"on_nan={on_nan!r}")
    if on_nan != "ignore" or hasattr(run, "judge_bad_step"):
        FiniteGradients(on_nan, run, objects, data, world, record)


class FiniteGradients:
    """Checks the gradients before every optimizer step.

    Args:
        on_nan: `stop`; or `skip`: leave the optimizer's parameters and state unchanged; or
            `replay`: stop, and repeat the forward in which it began.
        run: Counts the steps; in a replay it is asked first, and may raise another error.
        objects: The run's objects: watch their optimizers and their models' outputs.
        data: The loader that names the samples.
        world: The ranks.
        record: Rank 0 records bad steps in it.
    """

    def __init__(
        self,
        on_nan: str,
        run: Any,
        objects: Objects,
        data: Loader | None,
        world: Any,
        record: MetricsRecord,
    ) -> None:
        self._on_nan, self._run, self._data = on_nan, run, data
        self._world, self._record = world, record
        # Truth values for the step.
        self._outputs: deque[torch.Tensor] = deque(maxlen=_MOST_OUTPUTS)
        self._calls: deque[tuple[nn.Module, ForwardCall]] = deque(maxlen=_MOST_CALLS)
        self._in_a_row = 0
        # The forward of a sharded model is a collective: one rank alone can't repeat it.
        self._keeps_calls = on_nan == "replay" and not objects.is_sharded
        for optimizer in objects.optimizers():
            optimizer.register_step_pre_hook(self._look)
        for thing in objects.by_name.values():
            if isinstance(thing, nn.Module):  # the model as called: what it wraps may be compiled
                if self._keeps_calls:
                    thing.register_forward_pre_hook(self._note_call, with_kwargs=True)
                thing.register_forward_hook(self._note_outputs)

    def __deepcopy__(self, memo: object) -> "FiniteGradients":
        """Return itself: the hooks of a copied model refer to the one that checks."""
        return self

    def _note_call(self, model: nn.Module, inputs: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._calls.append((model, ForwardCall(inputs, kwargs)))

    def _note_outputs(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        """Record whether outputs are finite, without waiting for the device or keeping them."""
        if torch.is_grad_enabled():
            are_finite = [torch.isfinite(shard_of(leaf)).all() for leaf in floats_of(outputs)]
            self._outputs.extend(are_finite)
            if self._calls and self._calls[-1][0] is model:
                self._calls[-1][1].are_finite = are_finite

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if getattr(optimizer, "found_inf", None) is not None:
            return  # a gradient scaler skips such a step itself, and lowers its scale
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients or are_finite(gradients):
            self._in_a_row = 0
            self._forget()
            return
        bad = self._trace(gradients)
        self._forget()
        self._in_a_row += 1
        if hasattr(self._run, "judge_bad_step"):
            self._run.judge_bad_step(bad)
        if self._on_nan == "skip" and self._in_a_row <= MOST_SKIPPED:
            for parameter in parameters:
                parameter.grad = None
            self._note("skipped", bad)
            self._world.say(f"step {bad.step} is skipped: its gradients are not finite; {bad.why}")
        elif self._on_nan != "ignore":
            self._note("not_finite", bad)
            if hasattr(self._run, "save_boundary"):
                self._run.save_boundary()
            raise self._error(bad)

    def _note(self, event: str, bad: BadStep) -> None:
        if self._world.rank == 0:
            found = {"ranks": bad.ranks, "samples": bad.samples, "gradients": bad.checksums}
            self._record.event(event, step=bad.step, why=bad.why, **found)

    def _forget(self) -> None:
        self._outputs.clear()
        self._calls.clear()

    def _error(self, bad: BadStep) -> NotFiniteError:
        what = f"the gradients of step {bad.step} are not finite"
        if self._on_nan == "skip":
            what = f"the gradients of {self._in_a_row} steps in a row are not finite, the last is step {bad.step}"
        look = ", and a look at these samples" if bad.samples else ""
        command = replay_command(bad.step)
        fix = (
            "the weights are still those of the step before"
            if command is None
            else f"{command} stops where it began"
        )
        fix += f"; what usually helps: a lower learning rate, clipping (`max_norm`), bf16 in place of fp16{look}"
        fix += "" if self._on_nan == "skip" else '; on_nan="skip" leaves such steps out'
        if bad.is_once:
            fix = "look at the memory and the device of that machine, and at random numbers that the model does not draw from torch"
        error = NotFiniteError(what, why=bad.why, fix=fix)
        error.muster_final = not bad.is_once
        return error

    def _trace(self, gradients: list[torch.Tensor]) -> BadStep:
        """Return the facts about the step; a collective."""
        bad = not all(bool(one) for one in self._outputs)
        mine: dict[str, Any] = {
            "bad": bad,
            "ids": self._samples() if bad else [],
            "again": self._is_bad_again() if bad else None,
            "host": socket.gethostname()[:64],
            "sum": checksum(map(shard_of, gradients)),
        }
        # Alone it is not asked: the hook outlives the process group.
        stated: list[dict[str, Any]] = gather_json(mine) if self._world.world_size > 1 else [mine]
        ranks = [rank for rank, one in enumerate(stated) if one["bad"]]
        return BadStep(
            step=self._run.steps_done + 1,
            ranks=ranks,
            why=_in_words(stated, ranks),
            samples={rank: stated[rank]["ids"] for rank in ranks if stated[rank]["ids"]},
            checksums=[one["sum"] for one in stated],
            is_once=any(stated[rank]["again"] is False for rank in ranks),
        )

    def _is_bad_again(self) -> bool | None:
        """Repeat this rank's bad forwards; return whether all are bad again, None if unknown."""
        tries = [call.is_bad_again(unwrap(model)) for model, call in self._calls if call.is_bad]
        known = [one for one in tries if one is not None]
        return all(known) if known else None

    def _samples(self) -> list[int]:
        """Return the ids of this rank's samples of the batch."""
        if self._data is None:
            return []
        ids = self._data.ledger.ids()
        count = self._data.count * self._data.settings.accumulate
        return [int(one) for one in ids[max(len(ids) - count, 0) :]]


def _in_words(stated: list[dict[str, Any]], ranks: list[int]) -> str:
    """Return in words where it began, and what the second forward showed."""
    if not ranks:
        return "the model's outputs were finite on all ranks: it began in the loss or in backward"
    why = f"the model's output was not finite on {name_ranks(ranks)}"
    ids = stated[ranks[0]]["ids"]
    if ids:
        more = ", ..." if len(ids) > _MOST_SAMPLES else ""
        named = ", ".join(map(str, ids[:_MOST_SAMPLES])) + more
        why += f"; samples of rank {ranks[0]} in this batch: {named}"
    once = [rank for rank in ranks if stated[rank]["again"] is False]
    again = [rank for rank in ranks if stated[rank]["again"]]
    same = "made again with the same weights, samples and random numbers it"
    if once:
        hosts = ", ".join(dict.fromkeys(stated[rank]["host"] for rank in once))
        why += f"; {same} is finite on {name_ranks(once)} ({hosts})"
    elif again:
        why += f"; {same} is not finite again: the data or the model, not the machine"
    return why


def replay_command(step: int) -> str | None:
    """Return the command that replays a step of this (or the replayed) run; None without muster."""
    order = contract.replay_order(os.environ)
    run_id = (
        order.run_id if order else os.path.basename(os.environ.get(contract.RUN_DIR_VARIABLE, ""))
    )
    return f"`muster replay {short_id(run_id)} --step {step}`" if run_id else None


def are_finite(gradients: list[torch.Tensor]) -> bool:
    """Say whether all gradients are finite; with sharded ones a collective over all shards."""
    shards = [shard for shard in map(shard_of, gradients) if shard.numel()]
    largest = torch.nn.utils.get_total_norm(shards, norm_type=math.inf)  # 0 for no shards
    is_bad = torch.logical_not(torch.isfinite(largest))
    if any(map(has_shards, gradients)):
        any_bad = is_bad.to(shard_of(gradients[0]).device, torch.int32)
        dist.all_reduce(any_bad, dist.ReduceOp.MAX)
        return not bool(any_bad)
    return not bool(is_bad)
