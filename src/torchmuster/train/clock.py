"""Position of a run: steps, epochs, and the boundaries between two steps.

At a boundary all of the user's code for a step has run. Boundaries are numbered along the run: the end of a step and
the end of an epoch are one each.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from torchmuster.errors import UsageError
from torchmuster.train.batches.loader import Loader
from torchmuster.train.heartbeat import StepState
from torchmuster.train.objects import Objects


@dataclass(slots=True)
class Clock:
    """Counts steps and epochs.

    Attributes:
        data: The loader whose position counts, if there is one.
        steps_done: Optimizer steps over all attempts.
        is_due: Whether a snapshot is due at the next boundary.
        boundary_step: `steps_done` at the last boundary.
        boundary_position: Epoch and position in the data there.
        optimizer_steps: Since the last boundary.
    """

    data: Loader | None
    objects: Objects
    step_state: StepState
    steps_done: int = 0
    epoch: int = 0
    is_due: bool = False
    boundary_step: int = 0
    boundary_position: tuple[int, int] = (0, 0)
    optimizer_steps: int = 0
    _has_optimizer: bool = field(init=False)

    def __post_init__(self) -> None:
        optimizers = self.objects.optimizers()
        self._has_optimizer = bool(optimizers)
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._note_optimizer_step)

    @property
    def boundary(self) -> int:
        """The number of the next boundary, or of the current one at a boundary."""
        return self.steps_done + self.epoch

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and position in the data."""
        data = self.data
        return (data.epoch, data.position) if data is not None else (0, self.steps_done)

    @property
    def is_at_boundary(self) -> bool:
        """Whether there is no current batch and nothing was counted since the last boundary."""
        is_between = self.step_state.count is None and self.steps_done == self.boundary_step
        return is_between and self.position == self.boundary_position

    @property
    def is_at_end_of_epoch(self) -> bool:
        """Whether the data of the epoch are used up."""
        data = self.data
        return data is not None and data.position > 0 and data.position == data.epoch_samples()

    def begin_boundaries(self) -> None:
        """Move to a boundary: that of a snapshot, or the start."""
        self.boundary_step = self.steps_done
        if self.data is not None:
            self.boundary_position = self.position

    def steps_to_come(self, num_epochs: int) -> int | None:
        """Return the number of steps of the whole run; None when that isn't known."""
        samples = self.data.epoch_samples() if self.data is not None else None
        if self.data is None or samples is None:
            return None
        whole = max(num_epochs - self.epoch - 1, 0) * self.data.steps_per_epoch
        rest = math.ceil((samples - self.data.position) / self.data.global_batch_size)
        return self.steps_done + rest + whole

    def has_uncounted_step(self) -> bool:
        """Return whether the script has not called `run.step()` for the last batch."""
        return self.position != self.boundary_position and self.steps_done == self.boundary_step

    def pass_boundary(self) -> bool:
        """Move to the next boundary; return whether a step has ended here.

        Raises:
            UsageError: No optimizer has stepped since the last boundary.
        """
        counted = self.steps_done - self.boundary_step
        if counted and self._has_optimizer and not self.optimizer_steps:
            self._complain_about_optimizer()
        self.boundary_step, self.boundary_position = self.steps_done, self.position
        self.optimizer_steps = 0
        return counted > 0

    def _complain_about_optimizer(self) -> None:
        scalers = [t for t in self.objects.by_name.values() if hasattr(t, "get_scale")]
        if any(getattr(scaler, "may_skip_steps", True) for scaler in scalers):
            return  # a gradient scaler leaves steps with infinite gradients out
        raise UsageError(
            "a step was counted in which no optimizer has stepped",
            where=f"epoch {self.epoch}, step {self.steps_done}",
            fix="call optimizer.step() and then run.step() in the body of the loop over the data (with accumulate=..., when data.ends_step)",
        )

    def _note_optimizer_step(self, *_: Any) -> None:
        self.optimizer_steps += 1
        for model in self.step_state.uncalled:
            if any(parameter.grad is not None for parameter in model.module.parameters()):
                raise UsageError(
                    "the wrapped model was never called, but the one in it: no gradient was summed over the ranks",
                    where=f"epoch {self.epoch}, step {self.steps_done}",
                    fix="call what tm.wrap returned",
                )
        if not self.step_state.ends_step:
            raise UsageError(
                "the optimizer stepped in the middle of an accumulated step",
                why="the gradients of the other micro-batches are still to come",
                fix="if data.ends_step: optimizer.step(); optimizer.zero_grad()",
            )
