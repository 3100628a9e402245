"""A run's metrics: reduced every n steps, kept for the epoch, written to where they belong."""

import sys
from collections.abc import Mapping
from typing import Any

import torch

from torchmuster.train.meter import Meter, Number
from torchmuster.train.sinks import MetricSink, MetricsRecord, StepsDone

_FLAG = "muster/flag"
Totals = dict[str, tuple[float, float]]  # sum and weight over all ranks


class RunMetrics:
    """Owns the meter; only rank 0 writes.

    Attributes:
        epoch_totals: Of the epoch so far, the same on all ranks.
        total_steps: Of the whole run, for the time left; None when it isn't known.
    """

    def __init__(
        self,
        *,
        is_first: bool,
        device: torch.device,
        record: MetricsRecord,
        sinks: list[MetricSink],
    ) -> None:
        self.epoch_totals: Totals = {}
        self.total_steps: int | None = None
        self.record = record
        self.sinks = sinks
        self._is_first = is_first
        self._device = device
        self._meter = Meter()
        self._progress = StepsDone(sys.stderr)

    def begin(self, step: int) -> None:
        """Count speed from `step`."""
        self._progress.begin(step)

    def add(self, values: Mapping[str, Number], weight: float) -> None:
        """Add means over `weight` samples of this rank."""
        self._meter.add(dict(values), weight)

    def reduce(self, step: int, *, flag: bool = False) -> bool:
        """Reduce and write what was added; return whether any rank gave the flag; a collective."""
        self._meter.add({_FLAG: float(flag)}, 1.0)
        totals = self._meter.totals(self._device)
        self._meter.clear()
        flagged = totals.pop(_FLAG)[0] > 0
        for name, (total, weight) in totals.items():
            before = self.epoch_totals.get(name, (0.0, 0.0))
            self.epoch_totals[name] = (before[0] + total, before[1] + weight)
        if self._is_first and totals:
            means = means_of(totals)
            self.write(step, means)
            self._progress.show(step, self.total_steps, means)
        return flagged

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write values to the record and to all sinks."""
        for sink in (self.record, *self.sinks):
            sink.write(step, values)

    def end_line(self) -> None:
        """Leave the terminal's cursor on a new line."""
        self._progress.end()

    def close(self) -> None:
        """Bring everything to its place."""
        self._progress.end()
        for sink in self.sinks:
            sink.close()


def means_of(totals: Totals) -> dict[str, float]:
    """Return the weighted means."""
    return {name: total / weight for name, (total, weight) in totals.items() if weight}


def in_words(values: Mapping[str, Any]) -> str:
    """Return `loss 0.1234  accuracy 0.99`."""
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())
