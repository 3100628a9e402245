"""Weighted means over samples and ranks, without a device synchronisation or a collective per step.

A step appends references to a list. Every n steps, or when values are read, the list becomes one
sum per name on the device; reading reduces all names in one all-reduce. A run reduces every n
steps, keeps the sums of the epoch, and writes to the sinks.
"""

import math
import numbers
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from torchmuster.core.model import contract
from torchmuster.core.model.text import few_of, loss_of
from torchmuster.errors import UsageError
from torchmuster.train.exchange import gather_json
from torchmuster.train.finite import replay_command
from torchmuster.train.sinks import MetricSink, MetricsRecord, StepsDone
from torchmuster.train.snapshot.state import unpack

Number = Any  # float, int, or a tensor of one element
_FOLD_EVERY = 256
STEP_SECONDS = "perf/step_seconds"  # a separate group in TensorBoard, W&B and MLflow
_FLAG = "muster/flag"
Totals = dict[str, tuple[float, float]]  # sum and weight over all ranks


@dataclass(slots=True)
class _Column:
    values: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    sum: torch.Tensor | float = 0.0
    weight: float = 0.0

    def fold(self) -> None:
        if not self.values:
            return
        numbers = [v for v in self.values if not isinstance(v, torch.Tensor)]
        if len(numbers) == len(self.values):
            pairs = zip(self.values, self.weights, strict=True)
            self.sum = self.sum + math.fsum(v * w for v, w in pairs if w)
        else:
            first = next(v for v in self.values if isinstance(v, torch.Tensor))
            stack = torch.stack(
                [torch.as_tensor(v, dtype=torch.float64, device=first.device) for v in self.values]
            )
            weights = torch.tensor(self.weights, dtype=torch.float64).to(first.device)
            # Values of weight 0 may be NaN, and 0 * NaN is NaN.
            self.sum = self.sum + torch.where(weights == 0, 0.0, stack * weights).sum()
        self.weight += math.fsum(self.weights)
        self.values, self.weights = [], []


class Meter:
    """Collects named values, each weighted by the number of samples it is the mean of."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}
        self._agreed: list[str] = []  # names that all ranks know, in the same order
        self._since_fold = 0

    def add(self, values: dict[str, Number], weight: float) -> None:
        """Add means over `weight` samples. A tensor must have one element; it stays on its device.

        Raises:
            UsageError: A value is not a scalar.
        """
        for name, value in values.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = _Column()
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise _not_a_scalar(name, f"a tensor of shape {list(value.shape)}")
                # A copy on the device: the script may change its tensor in place.
                value = value.detach().clone().reshape(())  # noqa: PLW2901
            elif isinstance(value, numbers.Real):
                value = float(value)  # noqa: PLW2901
            else:
                raise _not_a_scalar(name, f"of type {type(value).__name__}")
            column.values.append(value)
            column.weights.append(weight)
        self._since_fold += 1
        if self._since_fold >= _FOLD_EVERY:
            self.fold()

    def fold(self) -> None:
        """Reduce the collected values to one sum per name, still on the device."""
        self._since_fold = 0
        for column in self._columns.values():
            column.fold()

    def totals(self, device: torch.device) -> Totals:
        """Return `(sum, weight)` of each name over all ranks, on every rank; a collective.

        A rank that has seen no sample may have no names. Names that all ranks know take one
        all-reduce, which also shows whether any rank has a new name: then the ranks agree on the
        names, once, and reduce again.
        """
        self.fold()
        mine = sorted(set(self._columns) - set(self._agreed))
        totals, num_ranks_with_new = self._sum(self._agreed, device, extra=bool(mine))
        if num_ranks_with_new:
            new = sorted(set().union(*gather_json(mine)))
            totals |= self._sum(new, device, extra=False)[0]
            self._agreed = [*self._agreed, *new]
        return {name: pair for name, pair in totals.items() if pair[1] or name in self._columns}

    def _sum(self, names: list[str], device: torch.device, *, extra: bool) -> tuple[Totals, int]:
        columns = [self._columns.get(name) or _Column() for name in names]
        parts = [value for column in columns for value in (column.sum, column.weight)]
        vector = torch.stack(
            [
                torch.as_tensor(value, dtype=torch.float64, device=device)
                for value in (*parts, float(extra))
            ]
        )
        if dist.get_world_size() > 1:
            dist.all_reduce(vector)
        *values, count = vector.tolist()
        pairs = {name: (values[2 * i], values[2 * i + 1]) for i, name in enumerate(names)}
        return pairs, int(count)

    def sums(self) -> Totals:
        """Return `(sum, weight)` of each name over this rank's values; waits for the device."""
        self.fold()
        return {name: (float(column.sum), column.weight) for name, column in self._columns.items()}

    def clear(self) -> None:
        """Forget everything."""
        self._columns = {}


class RunMetrics:
    """Metrics of a run: owns the meter and the sinks; only rank 0 writes.

    Attributes:
        epoch_totals: Sums of the epoch so far, the same on all ranks.
        total_steps: Steps of the whole run, for the remaining time; None if unknown.
    """

    def __init__(self, world: Any, record: MetricsRecord, sinks: list[MetricSink]) -> None:
        self.epoch_totals: Totals = {}
        self.total_steps: int | None = None
        self.record = record
        self.sinks = sinks
        self._world = world
        self._seen: dict[str, bool] = {}  # names of metrics, and whether a warning named them
        self._meter = Meter()
        # muster shows speed and time left in a row of its own.
        has_bar = contract.RUN_DIR_VARIABLE not in os.environ
        self._progress = StepsDone(sys.stderr, has_bar=has_bar)
        self._reported_at, self._reported_step = time.monotonic(), 0

    def begin(self, step: int) -> None:
        """Start measuring speed at `step`, and record the planned number of steps."""
        if self._world.is_first and self.total_steps is not None:
            self.record.event("planned", step=step, total_steps=self.total_steps)
        self._progress.begin(step)
        self._reported_at, self._reported_step = time.monotonic(), step

    def add(self, values: Mapping[str, Number], weight: float) -> None:
        """Add means over `weight` samples of this rank."""
        self._meter.add(dict(values), weight)

    def pending(self) -> Totals:
        """Return sum and weight of what this rank has added since the last reduction."""
        return self._meter.sums()

    def reduce(self, step: int, *, flag: bool = False) -> bool:
        """Reduce and write the added values; return whether any rank set the flag; a collective."""
        self._meter.add({_FLAG: float(flag)}, 1.0)
        totals = self._meter.totals(self._world.device)
        self._meter.clear()
        flagged = totals.pop(_FLAG)[0] > 0
        for name, (total, weight) in totals.items():
            before = self.epoch_totals.get(name, (0.0, 0.0))
            self.epoch_totals[name] = (before[0] + total, before[1] + weight)
        if self._world.is_first and totals:
            means = means_of(totals)
            self.record.write(step, means)  # the time of each line shows the speed
            with_speed = {**means, **self._speed(step)}
            for sink in self.sinks:
                sink.write(step, with_speed)
            self._progress.show(step, self.total_steps, means)
            self._look(step, means)
        return flagged

    def _look(self, step: int, values: Mapping[str, float]) -> None:
        """Warn once for each metric that is not finite; only for the loss suggest a remedy."""
        for name in values:
            self._seen.setdefault(name, False)
        bad = [n for n, value in values.items() if not (self._seen[n] or math.isfinite(value))]
        if not bad:
            return
        self._seen |= dict.fromkeys(bad, True)
        said = (
            f"{few_of((f'{name} is {values[name]}' for name in bad), 8)}, first seen at step {step}"
        )
        if loss_of(self._seen) in bad:
            said += '; on_nan="stop" ends such a run'
            if command := replay_command(step):
                said += f", {command} finds where it began while a snapshot from before is kept"
        self.end_line()
        self._world.say(said)

    def end_epoch(self, step: int) -> dict[str, float]:
        """Return the means since the epoch's were read, and begin the next epoch; a collective."""
        self.epoch_totals = {}
        self.reduce(step)
        later, self.epoch_totals = means_of(self.epoch_totals), {}
        self.end_line()
        return later

    def _speed(self, step: int) -> dict[str, float]:
        """Return the wall-clock seconds per step since the last call, everything included."""
        now, steps = time.monotonic(), step - self._reported_step
        spent_s, self._reported_at, self._reported_step = now - self._reported_at, now, step
        return {STEP_SECONDS: spent_s / steps} if steps > 0 else {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write values to the record and to all sinks."""
        for sink in (self.record, *self.sinks):
            sink.write(step, values)
        self._look(step, values)

    def end_line(self) -> None:
        """Move the terminal's cursor to a new line."""
        self._progress.end()

    def close(self) -> None:
        """Flush and close all sinks."""
        self._progress.end()
        for sink in self.sinks:
            sink.close()


def totals_at(totals: Mapping[str, Any], pieces: Iterable[Mapping[str, Any]]) -> Totals:
    """Return a snapshot's totals plus `sums` of its ranks' pieces, which were not reduced yet."""
    found: Totals = {name: (total, weight) for name, (total, weight) in totals.items()}
    for piece in pieces:
        for name, (total, weight) in unpack(piece.get("sums", {}), {}).items():
            before = found.get(name, (0.0, 0.0))
            found[name] = (before[0] + total, before[1] + weight)
    return found


def means_of(totals: Totals) -> dict[str, float]:
    """Return the weighted means."""
    return {name: total / weight for name, (total, weight) in totals.items() if weight}


def in_words(values: Mapping[str, Any]) -> str:
    """Return `loss 0.1234  accuracy 0.99`."""
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


def _not_a_scalar(name: str, what: str) -> UsageError:
    return UsageError(
        f"the metric `{name}` is not one number but {what}",
        where="run.step / run.log",
        fix=f"log its mean: {name}={name}.float().mean()",
    )
