"""What the training library has recorded of a run: where it stands, and the ledger of each epoch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


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
    step, saved_step, values, seen = 0, None, {}, False
    epochs: dict[int, EpochView] = {}
    for event in events:
        name, seen = event.get("event"), True
        step = int(event.get("step", step))
        if name == "metrics":
            values = dict(event["values"])
        elif name == "saved":  # it is whole; `save` tells when it was ordered
            saved_step = int(event["saved"])
        elif name == "epoch":
            epochs[event["epoch"]] = _epoch(event)
        elif name == "resumed":
            saved_step = step or saved_step  # it began with a snapshot of that step
    if not seen:
        return None
    ended = tuple(epochs[number] for number in sorted(epochs))
    return TrainingView(step=step, saved_step=saved_step, values=values, epochs=ended)


def _epoch(event: dict[str, Any]) -> EpochView:
    ledger = event.get("ledger") or {}
    return EpochView(
        epoch=event["epoch"],
        step=event["step"],
        elapsed_s=event["elapsed_s"],
        values=dict(event.get("values") or {}),
        samples=ledger.get("samples"),
        is_whole=bool(ledger.get("whole", True)),
    )
