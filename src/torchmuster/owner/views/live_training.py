"""The record of the training library while it grows: the metrics, the snapshots."""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torchmuster.files.layout import RunDir
from torchmuster.model.display.live import LiveTraining
from torchmuster.model.event import moment_of
from torchmuster.model.record.series import Metrics
from torchmuster.owner.views.record import DAMAGED, RecordTail

_MOST_FILES = 10_000  # of a snapshot


class TrainingTail:
    """Reads `training.jsonl`, each line once."""

    def __init__(self, run_dir: RunDir) -> None:
        self._tail = RecordTail(run_dir.training)
        self._forget()

    def _forget(self) -> None:
        self._is_there = False
        self._step = 0
        self._total: int | None = None
        self._epoch: int | None = None
        self._metrics = Metrics()
        self._saved: tuple[int, float | None, str] | None = None  # step, when, folder
        self._sized: tuple[int, int | None] | None = None
        self._saving: tuple[int, float | None] | None = None  # step, since when
        self._folder = ""

    def read(self, *, is_over: bool) -> LiveTraining | None:
        """Return where the training stands; None when it has recorded nothing.

        Args:
            is_over: The run has ended: nothing is being saved any more.
        """
        events, anew = self._tail.read()
        if anew:
            self._forget()
        for event in events:
            with suppress(*DAMAGED):
                self._take(event)
        if not self._is_there:
            return None
        saved, saving = self._saved, None if is_over else self._saving
        name, first = next(iter(self._metrics.series().items()), ("", None))
        return LiveTraining(
            step=self._step,
            total_steps=self._total,
            epoch=self._epoch,
            values=tuple(self._metrics.values().items()),
            not_finite=tuple(self._metrics.not_finite().items()),
            curve_of=name,
            curve=tuple(value for _, value in first.points) if first is not None else (),
            saved_step=saved[0] if saved is not None else None,
            saved_at=saved[1] if saved is not None else None,
            saved_bytes=self._size(),
            saving_since=saving[1] if saving is not None else None,
            saving_step=saving[0] if saving is not None else None,
            saving_bytes=self._written(saving[0]) if saving is not None else None,
        )

    def _take(self, event: Mapping[str, Any]) -> None:
        name, step = event.get("event"), int(event.get("step", self._step))
        self._is_there, self._step = True, step
        if name == "metrics":
            self._metrics.take(step, event["values"])
        elif name == "planned":
            self._total = int(event["total_steps"])
        elif name == "epoch":
            self._epoch = int(event["epoch"])
        elif name == "save":
            if self._saved is not None and self._saved[0] == step:
                return  # a loop that waits for each save tells of it when it is whole
            self._saving = (step, moment_of(event.get("time")))
        elif name == "saved":
            self._note_folder(event)
            self._saved = (int(event["saved"]), moment_of(event.get("time")), self._folder)
            self._saving = None
        elif name == "resumed":  # what the last attempt was saving is lost; steps are done again
            self._saving = None
            self._note_folder(event)
            self._metrics.go_back(step)
            if step:
                self._saved = (step, moment_of(event.get("time")), self._folder)

    def _note_folder(self, event: Mapping[str, Any]) -> None:
        self._folder = str(event.get("folder", ""))

    def _size(self) -> int | None:
        """Return the size of the newest snapshot, looked up once."""
        if self._saved is None or "://" in self._saved[2] or not self._saved[2]:
            return None
        step, _, folder = self._saved
        if self._sized is None or self._sized[0] != step:
            self._sized = (step, _folder_bytes(os.path.join(folder, f"step-{step:09}")))
        return self._sized[1]

    def _written(self, step: int) -> int | None:
        """Return what is there of a snapshot that is being written: in a folder named by the step and its writer."""
        if "://" in self._folder or not self._folder:
            return None
        of_step = re.compile(rf"\.step-{step:09}\.\d+\.tmp")
        with suppress(OSError, ValueError), os.scandir(self._folder) as entries:
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
