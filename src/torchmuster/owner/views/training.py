"""What the training library has recorded of a run: where it stands, and the ledger of each epoch."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torchmuster.files.layout import RunDir
from torchmuster.files.tail import last_bytes
from torchmuster.model.record.series import Metrics, bad_loss, with_later
from torchmuster.owner.views.record import DAMAGED, read_events

_END_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochView:
    """An epoch that has ended.

    Attributes:
        samples: How many were seen, each exactly once; None when the script had no loader of ours.
        is_whole: Whether those are all samples of the epoch.
    """

    epoch: int
    step: int
    elapsed_s: float
    values: dict[str, float]
    samples: int | None
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingView:
    """Where the training stands.

    Attributes:
        values: The newest value of each metric, the loss first.
        not_finite: Those of them that are not finite, and the step since which they are not.
    """

    step: int
    saved_step: int | None
    values: dict[str, float]
    not_finite: dict[str, int]
    epochs: tuple[EpochView, ...]


def view_training(events: Iterable[dict[str, Any]]) -> TrainingView | None:
    """Return what a record says; None when there is nothing in it.

    An epoch that was done again, because its end was not saved, is shown once: the last time.
    """
    seen = _Seen()
    for event in events:
        with suppress(*DAMAGED):
            seen.take(event)
    if not seen.is_anything:
        return None
    ended = tuple(seen.epochs[number] for number in sorted(seen.epochs))
    return TrainingView(
        step=seen.step,
        saved_step=seen.saved_step,
        values=seen.metrics.values(),
        not_finite=seen.metrics.not_finite(),
        epochs=ended,
    )


def bad_loss_of(run_dir: RunDir) -> str:
    """Return `loss nan (since step 100)`, if the newest loss is that; a record is read whole only if its end may say so."""
    end = last_bytes(run_dir.training, _END_BYTES)
    if b"NaN" not in end and b"Infinity" not in end:
        return ""
    training = view_training(read_events(run_dir.training))
    return bad_loss(training.values, training.not_finite) if training is not None else ""


@dataclass(slots=True)
class _Seen:
    """What the events so far say."""

    is_anything: bool = False
    step: int = 0
    saved_step: int | None = None
    metrics: Metrics = field(default_factory=Metrics)
    epochs: dict[int, EpochView] = field(default_factory=dict)
    ended: int | None = None  # the epoch whose end the record has come to

    def take(self, event: dict[str, Any]) -> None:
        name, self.is_anything = event.get("event"), True
        self.step = int(event.get("step", self.step))
        if name == "metrics":
            self.metrics.take(self.step, event["values"])
            self._add_to_epoch(event["values"])
        elif name == "saved":  # it is whole; `save` tells when it was ordered
            self.saved_step = int(event["saved"])
        elif name == "epoch":
            self.ended = int(event["epoch"])
            self.epochs[self.ended] = _epoch(event)
        elif name == "resumed":
            self.ended = None
            self.metrics.go_back(self.step)
            self.saved_step = self.step or self.saved_step  # it began with a snapshot of that step

    def _add_to_epoch(self, values: dict[str, Any]) -> None:
        """Take values that were logged at the end of an epoch as its own."""
        ended = self.epochs.get(self.ended) if self.ended is not None else None
        if ended is not None and ended.step == self.step:
            self.epochs[ended.epoch] = replace(
                ended, values=with_later(ended.values, _numbers(values))
            )


def _epoch(event: dict[str, Any]) -> EpochView:
    ledger = event.get("ledger") or {}
    return EpochView(
        epoch=int(event["epoch"]),
        step=int(event["step"]),
        elapsed_s=float(event["elapsed_s"]),
        values=_numbers(event.get("values") or {}),
        samples=ledger.get("samples"),
        is_whole=bool(ledger.get("whole", True)),
    )


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}
