"""What the training library has recorded of a run: where it stands, and the ledger of each epoch."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torchmuster.owner.views.record import DAMAGED


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
    """Where the training stands."""

    step: int
    saved_step: int | None
    values: dict[str, float]
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
        step=seen.step, saved_step=seen.saved_step, values=seen.values, epochs=ended
    )


@dataclass(slots=True)
class _Seen:
    """What the events so far say."""

    is_anything: bool = False
    step: int = 0
    saved_step: int | None = None
    values: dict[str, float] = field(default_factory=dict)
    epochs: dict[int, EpochView] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> None:
        name, self.is_anything = event.get("event"), True
        self.step = int(event.get("step", self.step))
        if name == "metrics":
            self.values = {str(key): float(value) for key, value in event["values"].items()}
        elif name == "saved":  # it is whole; `save` tells when it was ordered
            self.saved_step = int(event["saved"])
        elif name == "epoch":
            self.epochs[int(event["epoch"])] = _epoch(event)
        elif name == "resumed":
            self.saved_step = self.step or self.saved_step  # it began with a snapshot of that step


def _epoch(event: dict[str, Any]) -> EpochView:
    ledger = event.get("ledger") or {}
    return EpochView(
        epoch=int(event["epoch"]),
        step=int(event["step"]),
        elapsed_s=float(event["elapsed_s"]),
        values={str(key): float(value) for key, value in (event.get("values") or {}).items()},
        samples=ledger.get("samples"),
        is_whole=bool(ledger.get("whole", True)),
    )
