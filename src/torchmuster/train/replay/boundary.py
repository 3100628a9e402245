"""The boundary before a step, saved after the step has gone wrong: so that this one step is enough to make it again.

In front of the first optimizer of a step, weights and what optimizers remember are still those of the boundary. What a forward
changes by then, buffers and generators, is kept at each boundary, with the position in the data.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from torchmuster.train import rng
from torchmuster.train.batches.ledger import Sums, sums_of
from torchmuster.train.objects import Objects
from torchmuster.train.precision import Precision
from torchmuster.train.run import Run
from torchmuster.train.saves import Moment
from torchmuster.train.snapshot.state import SnapshotError

# What a step changes of others before the optimizer's turn is not known.
_KNOWN = (nn.Module, torch.optim.Optimizer, LRScheduler, Precision, torch.amp.GradScaler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What is kept of one.

    Attributes:
        data: The loader's position.
        noted: How many samples its ledger had noted.
        buffers: Of the models: each with its value.
        schedules: How often each scheduler had stepped.
    """

    step: int
    epoch: int
    data: dict[str, Any] | None
    noted: int
    epoch_totals: dict[str, tuple[float, float]]
    generators: dict[str, Any]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    schedules: list[int]


class BoundaryRun(Run):
    """A run that can save the boundary before the step that it is in."""

    _boundary: Boundary | None = None

    def between_steps(self) -> None:
        """Between two batches: as every run, and keep what this step will change."""
        super().between_steps()
        before = self._boundary
        if before is None or (before.step, before.epoch) != (self.steps_done, self.epoch):
            self._boundary = self._keep()

    def save_boundary(self) -> None:
        """Save the boundary before this step, on all ranks, if nothing else has changed since."""
        boundary, saves = self._boundary, self._saves
        if boundary is None or not self._is_unchanged(boundary) or saves.step == boundary.step:
            return
        with torch.no_grad():
            for buffer, value in boundary.buffers:
                buffer.copy_(value)
        moment = Moment(
            step=boundary.step,
            epoch=boundary.epoch,
            own={"data": boundary.data, "epoch_totals": boundary.epoch_totals},
            ledger=self._ledger_at(boundary),
            sums=self._metrics.pending(),
            generators=boundary.generators,
        )
        try:
            saves.save(moment)
            saves.check(boundary.step, by_all=True)
        except SnapshotError as error:  # the step is made again from an older one
            self._world.say(
                f"step {boundary.step} is not saved: {error.what}; because: {error.why}"
            )

    def _keep(self) -> Boundary:
        data = self._data
        return Boundary(
            step=self.steps_done,
            epoch=self.epoch,
            data=data.state_dict() if data is not None else None,
            noted=data.ledger.noted if data is not None else 0,
            epoch_totals=dict(self._metrics.epoch_totals),
            generators=rng.capture(),
            buffers=self._keep_buffers(),
            schedules=_schedules(self._objects),
        )

    def _keep_buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        before, now = self._boundary, _buffers(self._objects)
        if before is None or not _are_those(now, before.buffers):
            return [(buffer, buffer.clone()) for buffer in now]
        if now:  # into the copies of the last boundary: a few times faster than new ones
            with torch.no_grad():
                torch._foreach_copy_([value for _, value in before.buffers], now)
        return before.buffers

    def _is_unchanged(self, boundary: Boundary) -> bool:
        """Say whether the present state with the kept one is that of the boundary, as on all ranks."""
        return (
            _are_those(_buffers(self._objects), boundary.buffers)
            and not self._clock.optimizer_steps
            and boundary.step == self.steps_done
            and all(isinstance(thing, _KNOWN) for thing in self._objects.by_name.values())
            and boundary.schedules == _schedules(self._objects)
        )

    def _ledger_at(self, boundary: Boundary) -> Sums:
        if self._data is None:
            return Sums()
        ledger = self._data.ledger
        return ledger.sums() - sums_of(ledger.ids()[boundary.noted :])


def _buffers(objects: Objects) -> list[torch.Tensor]:
    return [buffer for model in objects.models().values() for buffer in model.buffers()]


def _are_those(buffers: list[torch.Tensor], kept: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Say whether a model's buffers are the very tensors that were kept: a script may have put others in their place."""
    return len(buffers) == len(kept) and all(
        one is other for one, (other, _) in zip(buffers, kept, strict=True)
    )


def _schedules(objects: Objects) -> list[int]:
    return [one.last_epoch for one in objects.by_name.values() if isinstance(one, LRScheduler)]
