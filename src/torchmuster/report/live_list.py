"""Read the list of all runs repeatedly: records from where the last read ended, ended runs once.

A run whose record can't be read gets a row that says so; the other runs are still listed.
"""

import os
import time

from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.codec import moment_of
from torchmuster.core.owner.record import DAMAGED, unreadable
from torchmuster.launcher.model.live import LiveRow, left_s
from torchmuster.launcher.model.progress import RankSample
from torchmuster.launcher.model.run import RunReader, bad_loss
from torchmuster.launcher.views.account import account_of
from torchmuster.launcher.views.find import all_dirs, ask_for_all, view_run
from torchmuster.launcher.views.live import (
    TrainingTail,
    command_of,
    describe_job_state,
    last_sample,
    num_workers_of,
)
from torchmuster.launcher.views.run_view import RunView

_MOST_ENDED = 15
_SETTLED_AFTER_S = 600.0  # after this time, no scheduler restarts a job that has ended
Mark = tuple[tuple[int, int] | None, ...]


class ListReader:
    """Reads the list of all runs; keeps what it has read for the next time."""

    def __init__(self) -> None:
        self._runs: dict[str, _ListedRun] = {}

    def read(self) -> list[LiveRow]:
        """Return rows for all waiting and running runs, then the last ended ones, newest first.

        Raises:
            NotFoundError: The folder of all runs can't be read.
        """
        folders = all_dirs()
        known = self._runs
        self._runs = {one.path: known.get(one.path) or _ListedRun(one) for one in folders}
        changed = [one for one in self._runs.values() if not one.is_settled()]
        ask_for_all([one.run_dir for one in changed])
        for one in changed:
            one.look()
        ordered = sorted(self._runs.values(), key=lambda one: one.submitted, reverse=True)
        is_open = [one for one in ordered if not one.is_final]
        ended = [one for one in ordered[:_MOST_ENDED] if one.is_final]
        return [one.row(time.time()) for one in (*is_open, *ended)]


class _ListedRun:
    """The state of one run that is kept between two reads."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.is_final = False
        self.submitted = 0.0
        self._mark: Mark | None = None
        self._row: LiveRow | None = None
        self._forget()

    def _forget(self) -> None:
        self._view: RunView | None = None
        self._reader = RunReader(self.run_dir)
        self._training = TrainingTail(self.run_dir)
        self._sample: tuple[Mark, RankSample | None] | None = None

    def is_settled(self) -> bool:
        """Return whether the run has ended and its files have not changed since the last read."""
        return self.is_final and self._mark is not None and self._mark == _mark_of(self.run_dir)

    def look(self) -> RunView:
        """Read what is new in the run's record; return its view."""
        self._row = None
        mark = _mark_of(self.run_dir)
        view = self._view = view_run(self.run_dir, self._reader.read())
        self.is_final, self.submitted = view.state.is_final, view.submitted
        self._mark = mark if self.is_final and _is_old(self.run_dir, mark) else None
        return view

    def row(self, now: float) -> LiveRow:
        """Return the run's row; for a settled run it is made only once."""
        if self._row is not None:
            return self._row
        view = self._view or self.look()
        problem = view.problem
        try:
            row = self._line(view, now) if not problem else None
        except DAMAGED as error:
            row, problem = None, unreadable(error)
        if row is None:
            row = LiveRow(
                run_id=view.run_id,
                state=view.state.value,
                place="",
                num_workers=None,
                step=None,
                left_s=None,
                elapsed_s=None,
                why=problem,
            )
        if self._mark is not None:
            self._row = row
            self._forget()
        return row

    def _line(self, view: RunView, now: float) -> LiveRow:
        account = account_of(view, now)
        sample = self._newest_sample() if view.has_ranks else None
        training = self._training.read(is_over=view.state.is_final)
        bad = bad_loss(dict(training.values), dict(training.not_finite)) if training else ""
        steps = [step for step in (sample.steps if sample is not None else ()) if step is not None]
        waits = view.record.wait_sentence(now) if not view.state.is_final else ""
        return LiveRow(
            run_id=view.run_id,
            state=view.state.value,
            place=account.place,
            num_workers=num_workers_of(view),
            step=max([training.step, *steps]) if training is not None else None,
            left_s=left_s(
                training,
                sample,
                sample_at=moment_of(sample.time) if sample is not None else None,
                now=now,
                is_final=view.state.is_final,
            ),
            elapsed_s=account.elapsed_s,
            why=account.ended_by or waits or bad or describe_job_state(view) or command_of(view),
        )

    def _newest_sample(self) -> RankSample | None:
        mark = (_stat(self.run_dir.samples),)
        if self._sample is None or self._sample[0] != mark:
            self._sample = (mark, last_sample(self.run_dir))
        return self._sample[1]


def _mark_of(run_dir: RunDir) -> Mark:
    """Return a mark that changes whenever a file changes that the run's row depends on."""
    of_jobs = (run_dir.job, run_dir.jobs, run_dir.links, run_dir.arrays, run_dir.cancelled)
    files = (run_dir.events, run_dir.result, run_dir.owner, run_dir.plan, run_dir.training)
    return tuple(map(_stat, (*files, *of_jobs)))


def _is_old(run_dir: RunDir, mark: Mark) -> bool:
    """Return whether an ended run's state is settled: a scheduler may still restart its job."""
    if not run_dir.has_jobs:
        return True
    newest = max((one[0] for one in mark if one is not None), default=0)
    return time.time() - newest / 1e9 > _SETTLED_AFTER_S


def _stat(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
