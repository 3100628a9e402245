"""Fold the lines of `training.jsonl` into one state for every view, of bounded size.

A line of another version, or a value of another type, is ignored; the others count.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchmuster.core.model.message import moment_of
from torchmuster.launcher.model.run import (
    Metrics,
    Series,
    mapped,
    number,
    numbers_in,
    whole,
    with_later,
)

MOST_EPOCHS = MOST_SAVES = 500  # the last ones; their total is counted
_MOST_STARTS, _FIRST_STARTS = 1000, 100
_MOST_REACHED = 500  # per start; beyond it, every second one is dropped


@dataclass(slots=True)
class LibraryStart:
    """A start of the training library in an attempt, at a step.

    Attributes:
        at: The time, in seconds since 1970.
        reached: Steps of its metrics, and when they were reached.
    """

    at: float
    step: int
    last_step: int
    reached: list[tuple[int, float]] = field(default_factory=list)

    def reach(self, step: int, at: float) -> None:
        """Record that its metrics have reached a step."""
        if len(self.reached) >= _MOST_REACHED:
            self.reached = [*self.reached[:-1:2], self.reached[-1]]
        self.reached.append((step, at))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochView:
    """An epoch that has ended, with the evidence of which samples it saw.

    Attributes:
        samples: How many were seen, each exactly once; None if the script did not use our loader.
        lost, twice: How many samples were not seen, and how many were seen again.
        is_whole: Whether these counts cover all samples of the epoch.
    """

    epoch: int
    step: int
    elapsed_s: float | None
    values: dict[str, float]
    samples: int | None
    lost: int
    twice: int
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A snapshot: how long the loop waited, and when it was complete; None if never recorded."""

    step: int
    at: float | None
    blocked_s: float
    done_at: float | None = None


@dataclass(slots=True)
class TrainingState:
    """The state after the lines so far.

    Attributes:
        step: The newest step that a line names.
        total_steps: Steps of the whole run, over all attempts; None if the library can't know.
        times: Seconds per step.
        starts: Starts of the library, one per attempt; if very many, the first and the last ones.
        steps_before: Steps made in the starts that are left out.
        ended: The last epoch to end in this start; None before.
        saved: The newest complete snapshot: its step, and when it was complete.
        saving: The snapshot that is being written: its step, and since when.
        folder: Folder of the snapshots.
        order: Settings that decide the order of the samples, by name.
        num_bad: Number of lines that are not objects.
    """

    num_events: int = 0
    step: int = 0
    total_steps: int | None = None
    metrics: Metrics = field(default_factory=Metrics)
    times: Series = field(default_factory=Series)
    starts: list[LibraryStart] = field(default_factory=list)
    steps_before: int = 0
    epochs: list[EpochView] = field(default_factory=list)
    num_epochs: int = 0
    ended: int | None = None
    saves: list[Save] = field(default_factory=list)
    num_saves: int = 0
    blocked_s: float = 0.0
    saved: tuple[int, float | None] | None = None
    saving: tuple[int, float | None] | None = None
    folder: str = ""
    order: dict[str, str] = field(default_factory=dict)
    is_finished: bool = False
    num_dropped: int = 0
    num_bad: int = 0

    def take(self, event: Mapping[str, Any]) -> None:
        """Apply a line."""
        self.num_events += 1
        name, step, at = event.get("event"), whole(event.get("step")), moment_of(event.get("time"))
        self.num_dropped += whole(event.get("dropped_before")) or 0
        if isinstance(event.get("folder"), str):
            self.folder = event["folder"]
        self.step = self.step if step is None else step
        if name == "resumed":
            self._begin(at, mapped(event.get("order")))
        elif (
            not self.starts and step is not None and at is not None
        ):  # the record's beginning is lost
            self.starts.append(LibraryStart(at, 0, 0))
        if self.starts:
            self.starts[-1].last_step = max(self.starts[-1].last_step, self.step)
        if name == "metrics":
            self._take_metrics(at, mapped(event.get("values")))
        elif name == "planned":
            self.total_steps = whole(event.get("total_steps")) or self.total_steps
        elif name == "save":
            self._take_save(at, number(event.get("blocked_s")) or 0.0)
        elif name == "saved" and (saved := whole(event.get("saved"))) is not None:
            self._take_saved(saved, at)
        elif name == "epoch" and (ended := _epoch(event)) is not None:
            self.ended = ended.epoch
            self._keep_epoch(ended)
        elif name == "finished":
            self.is_finished = True

    def _begin(self, at: float | None, order: Mapping[str, Any]) -> None:
        if at is not None:
            self.starts.append(LibraryStart(at, self.step, self.step))
        if len(self.starts) > _MOST_STARTS:
            left_out = self.starts.pop(_FIRST_STARTS)
            self.steps_before += left_out.last_step - left_out.step
        self.order = {str(name): str(value) for name, value in order.items()} or self.order
        self.ended, self.is_finished = None, False
        self.metrics.go_back(self.step)
        self.times.go_back(self.step)
        self.saving = None  # the unfinished snapshot of the last attempt is lost
        if self.step:  # it began with a snapshot of that step
            self.saved = (self.step, at)

    def _take_metrics(self, at: float | None, values: Mapping[str, Any]) -> None:
        self.metrics.take(self.step, values)
        if at is not None and self.starts:
            start = self.starts[-1]
            before = start.reached[-1] if start.reached else (start.step, start.at)
            if self.step > before[0] and at >= before[1]:
                self.times.add(self.step, (at - before[1]) / (self.step - before[0]))
            start.reach(self.step, at)
        last = self.epochs[-1] if self.epochs else None
        if last is not None and (last.epoch, last.step) == (self.ended, self.step):
            # The epoch's own metrics, though logged after its loop.
            self.epochs[-1] = replace(last, values=with_later(last.values, numbers_in(values)))

    def _keep_epoch(self, ended: EpochView) -> None:
        """Add an epoch; if it was repeated, keep only the last time."""
        others = [one for one in self.epochs if one.epoch != ended.epoch]
        self.num_epochs += len(others) == len(self.epochs)
        self.epochs = [*others[1 - MOST_EPOCHS :], ended]

    def _take_save(self, at: float | None, blocked_s: float) -> None:
        if self.saved is None or self.saved[0] != self.step:
            self.saving = (
                self.step,
                at,
            )  # else the loop waited for the save, which was already complete
        self.num_saves += 1
        self.blocked_s += blocked_s
        if self.saves and self.saves[-1].step >= self.step:  # repeated
            self.saves = [one for one in self.saves if one.step != self.step]
        self.saves.append(Save(step=self.step, at=at, blocked_s=blocked_s))
        if len(self.saves) > 2 * MOST_SAVES:
            del self.saves[:MOST_SAVES]

    def _take_saved(self, step: int, at: float | None) -> None:
        self.saved, self.saving = (step, at), None
        for place in range(len(self.saves) - 1, -1, -1):
            if self.saves[place].step == step:
                self.saves[place] = replace(self.saves[place], done_at=at)
                return

    @property
    def ended_last(self) -> int | None:
        """Number of the last epoch that has ended; None before the first."""
        return self.epochs[-1].epoch if self.epochs else None

    @property
    def steps_done(self) -> int:
        """Number of all steps; repeated ones count again."""
        return self.steps_before + sum(start.last_step - start.step for start in self.starts)


def fold_training(events: Iterable[Mapping[str, Any]]) -> TrainingState:
    """Return the state after the lines of a record."""
    state = TrainingState()
    for event in events:
        state.take(event)
    return state


def _epoch(event: Mapping[str, Any]) -> EpochView | None:
    epoch, step, ledger = whole(event.get("epoch")), whole(event.get("step")), event.get("ledger")
    if epoch is None or step is None or not isinstance(ledger or {}, dict):
        return None
    return EpochView(
        epoch=epoch,
        step=step,
        elapsed_s=number(event.get("elapsed_s")),
        values=numbers_in(mapped(event.get("values"))),
        samples=whole(mapped(ledger).get("samples")),
        lost=whole(mapped(ledger).get("lost")) or 0,
        twice=whole(mapped(ledger).get("twice")) or 0,
        is_whole=mapped(ledger).get("whole") is not False,
    )
