"""Gradients that are not finite: seen before an optimizer uses them, and traced to the ranks where they began.

Gradients are sums over the ranks, so one rank's NaN is in the weights of all after one step, and nothing fails. What is looked
at is the largest absolute value of all gradients: one number, the same on every rank or made so, so that all ranks decide alike.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torchmuster.errors import MusterError, UsageError
from torchmuster.model.ranks import name_ranks
from torchmuster.train.batches.loader import Loader
from torchmuster.train.exchange import gather_json
from torchmuster.train.objects import Objects
from torchmuster.train.sinks import MetricsRecord

CHOICES = ("ignore", "stop", "skip")
MOST_SKIPPED = 10  # steps in a row
_MOST_SAMPLES = 8  # in a message
_MOST_OUTPUTS = 4096


class NotFiniteError(MusterError):
    """A step's gradients are not finite."""

    muster_final = True  # the same samples and weights give the same gradients


def watch_gradients(
    on_nan: str, run: Any, objects: Objects, data: Loader | None, world: Any, record: MetricsRecord
) -> None:
    """Look at the gradients of a run from now on, unless it ignores them.

    Raises:
        UsageError: `on_nan` is none of `CHOICES`.
    """
    if on_nan not in CHOICES:
        names = ", ".join(f"`{name}`" for name in CHOICES)
        raise UsageError(f"on_nan is one of {names}", where=f"on_nan={on_nan!r}")
    if on_nan == "ignore":
        return

    def tell(step: int, ranks: list[int], why: str) -> None:
        if world.rank == 0:
            record.event("skipped", step=step, ranks=ranks, why=why)
        world.say(f"step {step} is skipped: its gradients are not finite; {why}")

    size = world.world_size
    FiniteGradients(objects, data, on_nan, step=lambda: run.steps_done, tell=tell, world_size=size)


class FiniteGradients:
    """Looks at the gradients in front of every optimizer step.

    Args:
        objects: The run's: their optimizers are watched, and their models' outputs.
        data: The loader whose samples are named.
        on_nan: `stop`, or `skip`: the optimizer leaves its parameters and its state as they are.
        step: Returns the number of steps done.
        tell: Called on each rank with a skipped step's number, the ranks where it began and a sentence.
        world_size: Number of ranks.
    """

    def __init__(
        self,
        objects: Objects,
        data: Loader | None,
        on_nan: str,
        *,
        step: Callable[[], int],
        tell: Callable[[int, list[int], str], None],
        world_size: int,
    ) -> None:
        self._data, self._skips, self._world_size = data, on_nan == "skip", world_size
        self._step, self._tell = step, tell
        self._outputs: deque[torch.Tensor] = deque(
            maxlen=_MOST_OUTPUTS
        )  # a truth value for each of the step
        self._in_a_row = 0
        for optimizer in objects.optimizers():
            optimizer.register_step_pre_hook(self._look)
        for thing in objects.by_name.values():
            if isinstance(thing, nn.Module):  # as it is called: what it wraps may be compiled
                thing.register_forward_hook(self._note_outputs)

    def _note_outputs(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        """Note whether outputs are finite, without waiting for the device, and without keeping them."""
        if torch.is_grad_enabled():
            leaves = (
                leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)
            )
            floats = (leaf.detach() for leaf in leaves if leaf.is_floating_point())
            self._outputs.extend(torch.isfinite(_local(leaf)).all() for leaf in floats)

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if getattr(optimizer, "found_inf", None) is not None:
            return  # a gradient scaler leaves such a step out by itself, and lowers its scale
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients or are_finite(gradients):
            self._in_a_row = 0
            self._outputs.clear()
            return
        step, (ranks, why) = self._step() + 1, self._trace()
        self._outputs.clear()
        self._in_a_row += 1
        if self._skips and self._in_a_row <= MOST_SKIPPED:
            for parameter in parameters:
                parameter.grad = None
            self._tell(step, ranks, why)
            return
        what = f"the gradients of step {step} are not finite"
        look = "" if "; samples of rank" not in why else ", and a look at these samples"
        if self._skips:
            what = f"the gradients of {self._in_a_row} steps in a row are not finite, the last is step {step}"
        raise NotFiniteError(
            what,
            why=why,
            fix="the weights are still those of the step before; what usually helps: a lower learning rate, clipping"
            f" (`max_norm`), bf16 in place of fp16{look}"
            + ("" if self._skips else '; on_nan="skip" leaves such steps out'),
        )

    def _trace(self) -> tuple[list[int], str]:
        """Return the ranks whose outputs were not finite, and what is known of them; a collective."""
        bad = not all(bool(one) for one in self._outputs)
        mine: dict[str, Any] = {"bad": bad, "ids": self._samples() if bad else []}
        told: list[dict[str, Any]] = gather_json(mine) if self._world_size > 1 else [mine]
        ranks = [rank for rank, one in enumerate(told) if one["bad"]]
        if not ranks:
            return (
                [],
                "the model's outputs were finite on all ranks: it began in the loss or in backward",
            )
        why = f"the model's output was not finite on {name_ranks(ranks)}"
        ids = told[ranks[0]]["ids"]
        if ids:
            named = ", ".join(map(str, ids[:_MOST_SAMPLES])) + (
                ", ..." if len(ids) > _MOST_SAMPLES else ""
            )
            why += f"; samples of rank {ranks[0]} in this batch: {named}"
        return ranks, why

    def _samples(self) -> list[int]:
        """Return the ids of this rank's samples of the batch."""
        if self._data is None:
            return []
        ids = self._data.ledger.ids()
        count = self._data.count * self._data.settings.accumulate
        return [int(one) for one in ids[max(len(ids) - count, 0) :]]


def are_finite(gradients: list[torch.Tensor]) -> bool:
    """Say whether all gradients are finite; of sharded ones all ranks' shards, by a collective."""
    shards = [shard for shard in map(_local, gradients) if shard.numel()]
    largest = torch.nn.utils.get_total_norm(shards, norm_type=math.inf)  # 0 of none
    is_bad = torch.logical_not(torch.isfinite(largest))
    if any(isinstance(gradient, DTensor) for gradient in gradients):
        told = is_bad.to(_local(gradients[0]).device, torch.int32)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return not bool(told)
    return not bool(is_bad)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
