"""Read `training.jsonl`: the metrics of the steps that count, the steps that were done twice, saves, epochs, the ledger."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchmuster.model.event import moment_of
from torchmuster.model.record.loose import mapped, number, text, whole
from torchmuster.model.record.series import bad_since, place_of, with_later
from torchmuster.model.record.thin import thinned
from torchmuster.report.story import EpochTold, SaveTold, SeriesTold, TrainingTold

MAX_POINTS = 2000  # of a metric
MAX_SERIES = 40
_MAX_REDONE = 500
_MAX_EPOCHS, _MAX_SAVES = 500, 500
_MAX_NOT_FINITE = 5


@dataclass(slots=True)
class LibraryStart:
    """The library began in an attempt, at a step."""

    at: float
    step: int
    last_step: int
    reached: list[tuple[int, float]] = field(default_factory=list)  # (step, when), of the metrics


@dataclass(slots=True)
class TrainingRecord:
    """What the file says; `told` makes a value of it."""

    starts: list[LibraryStart] = field(default_factory=list)
    points: dict[str, list[tuple[int, float | None]]] = field(default_factory=dict)
    redone: dict[str, list[tuple[int, float | None]]] = field(default_factory=dict)
    not_finite: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    times: list[tuple[int, float | None]] = field(
        default_factory=list
    )  # (step, seconds a step took)
    epochs: dict[int, EpochTold] = field(default_factory=dict)
    ended: int | None = None  # the epoch whose end the record has come to
    saves: dict[int, SaveTold] = field(default_factory=dict)
    num_saves: int = 0
    blocked_s: float = 0.0
    order: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
    is_finished: bool = False
    num_dropped: int = 0
    num_events: int = 0
    _keys: dict[str, str] = field(
        default_factory=dict
    )  # printable names: of 100,000 steps they are the same

    def take(self, event: Mapping[str, Any]) -> None:
        """Take a line."""
        self.num_events += 1
        name, step, at = event.get("event"), whole(event.get("step")), moment_of(event.get("time"))
        self.num_dropped += whole(event.get("dropped_before")) or 0
        if isinstance(event.get("folder"), str):
            self.folder = text(event["folder"])
        if step is None or at is None:
            return
        if name == "resumed":
            self._begin(step, at, mapped(event.get("order")))
        if not self.starts:  # the record's beginning is lost
            self._begin(0, at, {})
        self.starts[-1].last_step = max(self.starts[-1].last_step, step)
        if name == "metrics":
            self._take_metrics(step, at, mapped(event.get("values")))
        elif name == "save":
            self._take_save(step, at, number(event.get("blocked_s")) or 0.0)
        elif name == "saved":
            self._take_saved(whole(event.get("saved")), at)
        elif name == "epoch":
            self._take_epoch(step, event)
        elif name == "finished":
            self.is_finished = True

    def _begin(self, step: int, at: float, order: Mapping[str, Any]) -> None:
        self.starts.append(LibraryStart(at=at, step=step, last_step=step))
        self.order, self.ended = order or self.order, None
        self.is_finished = False
        for name, points in self.points.items():
            keep = len(points)
            while keep and points[keep - 1][0] > step:
                keep -= 1
            self.redone.setdefault(name, []).extend(points[keep:])
            del points[keep:]
        while self.times and self.times[-1][0] > step:
            self.times.pop()

    def _take_metrics(self, step: int, at: float, values: Mapping[str, Any]) -> None:
        start = self.starts[-1]
        before = start.reached[-1] if start.reached else (start.step, start.at)
        if step > before[0] and at >= before[1]:
            self.times.append((step, (at - before[1]) / (step - before[0])))
        start.reached.append((step, at))
        for name, value in values.items():
            key = self._keys.get(name) or self._keys.setdefault(name, text(name, 80))
            if key not in self.points and len(self.points) >= MAX_SERIES:
                continue
            known = number(value)
            if known is None and isinstance(value, float):
                bad = self.not_finite.setdefault(key, [])
                bad.append((step, "nan" if math.isnan(value) else f"{value:+.0f}"))
            if known is not None or isinstance(value, float):
                self.points.setdefault(key, []).append((step, known))
        ended = self.epochs.get(self.ended) if self.ended is not None else None
        if ended is not None and ended.step == step:  # its own, though logged after its loop
            own = with_later(dict(ended.values), dict(_numbers_of(values)))
            self.epochs[ended.epoch] = replace(ended, values=tuple(own.items()))

    def _take_save(self, step: int, at: float, blocked_s: float) -> None:
        self.num_saves += 1
        self.blocked_s += blocked_s
        self.saves[step] = SaveTold(step=step, at=at, blocked_s=blocked_s)

    def _take_saved(self, step: int | None, at: float) -> None:
        if step is not None and (save := self.saves.get(step)) is not None:
            done = SaveTold(step=step, at=save.at, blocked_s=save.blocked_s, done_at=at)
            self.saves[step] = done

    def _take_epoch(self, step: int, event: Mapping[str, Any]) -> None:
        epoch = whole(event.get("epoch"))
        if epoch is None:
            return
        ledger = mapped(event.get("ledger"))
        values = mapped(event.get("values"))
        self.ended = epoch
        self.epochs[epoch] = EpochTold(
            epoch=epoch,
            step=step,
            elapsed_s=number(event.get("elapsed_s")),
            values=_numbers_of(values),
            samples=whole(ledger.get("samples")),
            lost=whole(ledger.get("lost")) or 0,
            twice=whole(ledger.get("twice")) or 0,
            is_whole=ledger.get("whole") is not False,
        )

    def when_reached(self, start: LibraryStart, step: int) -> float | None:
        """Return when an attempt's training came to a step, as its snapshot or its metrics tell; None: it never did."""
        if step <= start.step:
            return start.at
        save = self.saves.get(step)
        times = [at for reached, at in start.reached if reached >= step]
        if save is not None and (not times or save.at <= times[0]) and save.at >= start.at:
            return save.at
        return times[0] if times else None

    def told(self) -> TrainingTold | None:
        """Return the value; None where the library has written nothing."""
        if not self.num_events or not self.starts:
            return None
        epochs = [self.epochs[number] for number in sorted(self.epochs)]
        saves = [self.saves[step] for step in sorted(self.saves)]
        return TrainingTold(
            step=self.starts[-1].last_step,
            steps_done=sum(start.last_step - start.step for start in self.starts),
            is_finished=self.is_finished,
            series=tuple(self._series(name) for name in sorted(self.points, key=place_of)),
            step_time=_series("step time", self.times, []) if self.times else None,
            epochs=tuple(epochs[-_MAX_EPOCHS:]),
            num_epochs=len(epochs),
            saves=tuple(saves[-_MAX_SAVES:]),
            num_saves=self.num_saves,
            blocked_s=self.blocked_s,
            order=tuple(
                (text(name, 80), text(str(value), 200)) for name, value in self.order.items()
            ),
            folder=self.folder,
            num_dropped=self.num_dropped,
        )

    def _series(self, name: str) -> SeriesTold:
        bad = self.not_finite.get(name, [])
        return _series(name, self.points[name], self.redone.get(name, []), bad)


def _numbers_of(values: Mapping[str, Any]) -> tuple[tuple[str, float | None], ...]:
    first = list(values.items())[:MAX_SERIES]
    return tuple((text(name, 80), number(value)) for name, value in first)


def _series(
    name: str,
    points: list[tuple[int, float | None]],
    redone: list[tuple[int, float | None]],
    not_finite: list[tuple[int, str]] | None = None,
) -> SeriesTold:
    kept, again = thinned(points, MAX_POINTS), thinned(redone, _MAX_REDONE)
    bad, since = not_finite or [], bad_since(points)
    return SeriesTold(
        name=name,
        steps=tuple(step for step, _ in kept),
        values=tuple(value for _, value in kept),
        num_points=len(points),
        redone_steps=tuple(step for step, _ in again),
        redone_values=tuple(value for _, value in again),
        not_finite=tuple(bad[:_MAX_NOT_FINITE]),
        num_not_finite=len(bad),
        bad_since=(since, bad[-1][1]) if bad and since is not None else None,
    )


def read_training(events: Iterable[Mapping[str, Any]]) -> TrainingRecord:
    """Return what the lines of a record say."""
    record = TrainingRecord()
    for event in events:
        record.take(event)
    return record
