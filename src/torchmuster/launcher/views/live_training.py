"""The record of the training library while it grows: the metrics, the snapshots."""

import os
import re
from contextlib import suppress

from torchmuster.core.files.layout import RunDir
from torchmuster.launcher.model.live import LiveTraining
from torchmuster.launcher.model.training import TrainingState
from torchmuster.launcher.views.training import TrainingReader

_MOST_FILES = 10_000  # of a snapshot


class TrainingTail:
    """Reads where a training stands, again and again."""

    def __init__(self, run_dir: RunDir) -> None:
        self._reader = TrainingReader(run_dir)
        self._sized: tuple[int, int | None] | None = None

    def read(self, *, is_over: bool) -> LiveTraining | None:
        """Return where the training stands; None when it has recorded nothing.

        Args:
            is_over: The run has ended: nothing is being saved any more.
        """
        state = self._reader.read()
        if not state.num_events:
            return None
        saved, saving = state.saved, None if is_over else state.saving
        series = state.metrics.series()
        name, first = next(iter(series.items()), ("", None))
        return LiveTraining(
            step=state.step,
            total_steps=state.total_steps,
            epoch=state.ended_last,
            values=tuple(state.metrics.values().items()),
            not_finite=tuple(state.metrics.not_finite().items()),
            curve_of=name,
            curve=tuple(value for _, value in first.points) if first is not None else (),
            saved_step=saved[0] if saved is not None else None,
            saved_at=saved[1] if saved is not None else None,
            saved_bytes=self._size(state),
            saving_since=saving[1] if saving is not None else None,
            saving_step=saving[0] if saving is not None else None,
            saving_bytes=_written(state.folder, saving[0]) if saving is not None else None,
        )

    def _size(self, state: TrainingState) -> int | None:
        """Return the size of the newest snapshot, looked up once."""
        if state.saved is None or "://" in state.folder or not state.folder:
            return None
        step = state.saved[0]
        if self._sized is None or self._sized[0] != step:
            self._sized = (step, _folder_bytes(os.path.join(state.folder, f"step-{step:09}")))
        return self._sized[1]


def _written(folder: str, step: int) -> int | None:
    """Return what is there of a snapshot that is being written: in a folder named by the step and its writer."""
    if "://" in folder or not folder:
        return None
    of_step = re.compile(rf"\.step-{step:09}\.\d+\.tmp")
    with suppress(OSError, ValueError), os.scandir(folder) as entries:
        for entry, _ in zip(entries, range(_MOST_FILES), strict=False):
            if of_step.fullmatch(entry.name):
                return _folder_bytes(entry.path)
    return None


def _folder_bytes(folder: str) -> int | None:
    total = 0
    try:
        for number, name in enumerate(os.listdir(folder)):
            if number >= _MOST_FILES:
                return None
            total += os.stat(os.path.join(folder, name)).st_size
    except (OSError, ValueError):  # the latter: a name that no file can have
        return None
    return total
