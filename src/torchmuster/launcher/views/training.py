"""What the training library has recorded about a run: its state, and the ledger of each epoch."""

import glob
import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass

import torchmuster
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, last_bytes
from torchmuster.core.model import codec
from torchmuster.core.owner.record import RecordTail
from torchmuster.core.plainfile import open_plain
from torchmuster.launcher.model.run import EpochView, TrainingState, bad_loss

_END_BYTES = 1 << 16
_KNOWN_BY_BYTES = 1 << 12
_WORTH_KEEPING_BYTES = 4 << 20  # reading this much takes a fifth of a second


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingView:
    """State of the training.

    Attributes:
        values: The newest value of each metric, the loss first.
        not_finite: The metrics that are not finite, each with the step since which.
        epochs: The last epochs, if there are very many.
    """

    step: int
    saved_step: int | None
    values: dict[str, float]
    not_finite: dict[str, int]
    epochs: tuple[EpochView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A fold of the record, kept next to it.

    Attributes:
        version: Version of muster.
        before: Checksum of the bytes before `position`, which identifies the record.
        position: How far the record was read.
    """

    version: str
    before: str
    position: int
    state: TrainingState


class TrainingReader:
    """Folds `training.jsonl`, each line once, continuing a fold that an earlier command has kept.

    Attributes:
        state: The fold of the lines read so far.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._path = run_dir.training
        self._fold = run_dir.training_fold
        kept = self._read_kept()
        self.state = kept.state if kept is not None else TrainingState()
        self._kept_at = kept.position if kept is not None else 0
        self._tail = RecordTail(self._path, position=self._kept_at)

    def read(self) -> TrainingState:
        """Fold the new lines; return the state."""
        events, restarted = self._tail.read()
        if restarted:
            self.state, self._kept_at = TrainingState(), 0
        before = self._tail.num_bad
        for event in events:
            self.state.take(event)
        self.state.num_bad += self._tail.num_bad - before
        if self._tail.position - self._kept_at > _WORTH_KEEPING_BYTES:
            self._keep()
        return self.state

    @property
    def why_not(self) -> str:
        """Why the record can't be read; empty if it can, or doesn't exist."""
        return self._tail.why_not

    @property
    def num_torn(self) -> int:
        """Number of lines that are not objects, including one without an end."""
        return self.state.num_bad + self._tail.has_rest

    def _read_kept(self) -> _Kept | None:
        with suppress(OSError, codec.CodecError):
            kept = codec.from_plain(_Kept, atomic.read_json(self._fold))
            if kept.version == torchmuster.__version__ and kept.before == self._before(
                kept.position
            ):
                return kept
        return None

    def _before(self, position: int) -> str:
        with open_plain(self._path) as file:
            file.seek(max(0, position - _KNOWN_BY_BYTES))
            return hashlib.sha256(file.read(min(position, _KNOWN_BY_BYTES))).hexdigest()

    def _keep(self) -> None:
        with suppress(OSError):  # the kept fold only saves time
            self._kept_at = self._tail.position
            kept = _Kept(
                version=torchmuster.__version__,
                before=self._before(self._kept_at),
                position=self._kept_at,
                state=self.state,
            )
            atomic.write_json(self._fold, codec.to_plain(kept), mode=0o600)


def seen_in(state: TrainingState) -> TrainingView | None:
    """Return the training's state from its record; None if nothing is recorded."""
    if not state.num_events:
        return None
    return TrainingView(
        step=state.step,
        saved_step=state.saved[0] if state.saved is not None else None,
        values=state.metrics.values(),
        not_finite=state.metrics.not_finite(),
        epochs=tuple(sorted(state.epochs, key=lambda one: one.epoch)),
    )


def training_of(run_dir: RunDir) -> TrainingView | None:
    """Return the state of a run's training; None if it has recorded nothing."""
    return seen_in(TrainingReader(run_dir).read())


def bad_loss_of(run_dir: RunDir) -> str:
    """Return e.g. `loss nan (since step 100)` if so; check the record's end before all of it."""
    end = last_bytes(run_dir.training, _END_BYTES)
    if b"NaN" not in end and b"Infinity" not in end:
        return ""
    training = training_of(run_dir)
    return bad_loss(training.values, training.not_finite) if training is not None else ""


def newest_training(workflow: RunDir, task: str) -> str | None:
    """Return the directory of a training task's last run; None without one."""
    folder = glob.escape(os.path.dirname(workflow.training_folder(task, 0)))
    found = glob.glob(os.path.join(folder, "attempt-*", "*", os.path.basename(workflow.plan)))
    runs = [os.path.dirname(path) for path in found]

    def key(path: str) -> tuple[int, str]:
        number = os.path.basename(os.path.dirname(path)).removeprefix("attempt-")
        return (int(number) if number.isdigit() else -1, path)

    return max(runs, key=key, default=None)
