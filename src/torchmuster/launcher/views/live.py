"""Read a live run repeatedly: its record, its training's record, and its ranks, as one value.

Reading continues where it last ended. Lines that another version wrote, or a crash has torn, are
skipped and reported; no value depends on a complete file.
"""

import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime

from torchmuster.core.files.layout import RunDir, last_bytes
from torchmuster.core.model import codec
from torchmuster.core.model.codec import moment_of
from torchmuster.core.model.events import NoticeEvent
from torchmuster.core.model.narration import narrate
from torchmuster.core.model.states import RunState
from torchmuster.core.owner.record import DAMAGED, unreadable
from torchmuster.errors import RunDirectoryError
from torchmuster.launcher.model import live
from torchmuster.launcher.model.job import JobState, describe_job
from torchmuster.launcher.model.progress import RankSample
from torchmuster.launcher.model.run import (
    AttemptRecord,
    RunReader,
    RunRecord,
    Series,
    TrainingState,
    thinned,
)
from torchmuster.launcher.views.account import account_of
from torchmuster.launcher.views.find import view_job, view_run
from torchmuster.launcher.views.run_view import RunView, problems_of
from torchmuster.launcher.views.training import TrainingReader

# The growing record of the training library: metrics and snapshots.


_MOST_FILES = 10_000  # in a snapshot
_MOST_CURVES, _MOST_POINTS = 9, 240


class TrainingTail:
    """Reads the state of a training repeatedly."""

    def __init__(self, run_dir: RunDir) -> None:
        self._reader = TrainingReader(run_dir)
        self._sized: tuple[int, int | None] | None = None

    def read(self, *, is_over: bool) -> live.LiveTraining | None:
        """Return the state of the training; None if it has recorded nothing.

        Args:
            is_over: Whether the run has ended, so that nothing is being saved any more.
        """
        state = self._reader.read()
        if not state.num_events:
            return None
        saved, saving = state.saved, None if is_over else state.saving
        series = state.metrics.series()
        name, first = next(iter(series.items()), ("", None))
        return live.LiveTraining(
            step=state.step,
            total_steps=state.total_steps,
            epoch=state.ended_last,
            values=tuple(state.metrics.values().items()),
            not_finite=tuple(state.metrics.not_finite().items()),
            curve_of=name,
            curve=tuple(value for _, value in first.points) if first is not None else (),
            curves=tuple((name, _short(one)) for name, one in [*series.items()][1:_MOST_CURVES]),
            saved_step=saved[0] if saved is not None else None,
            saved_at=saved[1] if saved is not None else None,
            saved_bytes=self._size(state),
            saving_since=saving[1] if saving is not None else None,
            saving_step=saving[0] if saving is not None else None,
            saving_bytes=_written(state.folder, saving[0]) if saving is not None else None,
        )

    def _size(self, state: TrainingState) -> int | None:
        """Return the size of the newest snapshot; look it up only once."""
        if state.saved is None or "://" in state.folder or not state.folder:
            return None
        step = state.saved[0]
        if self._sized is None or self._sized[0] != step:
            self._sized = (step, _folder_bytes(os.path.join(state.folder, f"step-{step:09}")))
        return self._sized[1]


def _short(series: Series) -> tuple[float, ...]:
    return tuple(value for _, value in thinned(series.points, _MOST_POINTS) if value is not None)


def _written(folder: str, step: int) -> int | None:
    """Return the bytes of an unfinished snapshot; its folder is named after step and writer."""
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
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None
    return total


MOST_ATTEMPTS = 200  # kept, while even 10,000 are counted
_MOST_SAID = 4
_LOG_BYTES = 8192
_FRESH_S = 15.0
_SAID = (
    *("hang", "head_replaced", "start_wait", "node_left_out", "node_lost", "spare_lost"),
    *("spare_taken", "newcomer", "stopping", "shrunk", "notice"),
)

AskBoard = Callable[[], tuple[RankSample | None, str]]


class LiveReader:
    """Reads one run repeatedly.

    Args:
        run_dir: Directory of the run.
        ask_board: Returns the head's sample of the ranks, or why there is none; never waits.
    """

    def __init__(self, run_dir: RunDir, ask_board: AskBoard | None = None) -> None:
        self._run_dir = run_dir
        self._ask_board = ask_board
        self._reader = RunReader(run_dir)
        self._training = TrainingTail(run_dir)

    def read(self) -> live.LiveRun:
        """Return the current state of the run.

        Raises:
            RunDirectoryError: The record can't be understood.
        """
        try:
            return self._read()
        except DAMAGED as error:
            raise RunDirectoryError(
                unreadable(error),
                where=self._run_dir.path,
                why="it was written by another version of muster, or is damaged",
                fix="`muster explain` reads its logs",
            ) from error

    def _read(self) -> live.LiveRun:
        view = view_run(self._run_dir, self._reader.read())
        now, record = time.time(), view.record
        account = account_of(view, now)
        attempts = _closed(list(map(_shown, view.attempts)), view, account.elapsed_s)
        sample, sample_at, unheard = self._sample(view)
        training = self._training.read(is_over=view.state.is_final)
        running = bool(attempts) and attempts[-1].ended_at is None and not view.state.is_final
        return live.LiveRun(
            run_id=view.run_id,
            state=view.state.value,
            is_final=view.state.is_final,
            now=now,
            command=view.command,
            place=account.place,
            elapsed_s=account.elapsed_s,
            num_attempts=len(attempts),
            attempts=tuple(attempts[-MOST_ATTEMPTS:]),
            sample=sample,
            sample_at=sample_at,
            unheard=unheard,
            waits=_waits(record, now, is_running=running) if not view.state.is_final else "",
            job=describe_job_state(view),
            ends_at=record.ends_at if not view.state.is_final else None,
            network=(narrate(record.network) or "").removeprefix("network: ")
            if record.network
            else "",
            said=said_of(record),
            training=training,
            bar=self._bar(attempts) if running and training is None else None,
            tasks=view.parts(),
            ended_by=account.ended_by or "",
            problems=problems_of(view),
        )

    # The ranks.

    def _sample(self, view: RunView) -> tuple[RankSample | None, float | None, str]:
        why = ""
        if self._ask_board is not None and not view.state.is_final:
            sample, why = self._ask_board()
            if sample is not None:
                return sample, moment_of(sample.time), ""
        recorded = last_sample(self._run_dir)
        return recorded, moment_of(recorded.time) if recorded is not None else None, why

    def _bar(self, attempts: list[live.LiveAttempt]) -> live.ProgressBar | None:
        path = self._run_dir.rank_log(attempts[-1].number, 0)
        return live.read_bar(last_bytes(path, _LOG_BYTES).decode(errors="replace"))


def last_sample(run_dir: RunDir) -> RankSample | None:
    """Return the last complete line of the recorded samples; None if none can be read."""
    path = run_dir.samples
    num_bytes = 1 << 16
    while True:
        data = last_bytes(path, num_bytes)
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        whole = lines if len(data) < num_bytes else lines[1:]
        if whole:
            with suppress(*DAMAGED):
                return codec.from_plain(RankSample, json.loads(whole[-1]))
            return None
        if len(data) < num_bytes or num_bytes > 64 << 20:
            return None
        num_bytes *= 8


def _shown(attempt: AttemptRecord) -> live.LiveAttempt:
    """Return an attempt for display; without a failure, its head's end or loss ended it."""
    ended_by = attempt.failure.what if attempt.failure is not None else attempt.state
    cause = attempt.cause
    return live.LiveAttempt(
        number=attempt.number,
        num_workers=attempt.num_workers or 0,
        num_nodes=attempt.start.num_nodes,
        began_at=attempt.began,
        why=attempt.start.why,
        ended_at=attempt.ended,
        ended_by=(ended_by or "its head was lost") if attempt.ended is not None else "",
        cause_rank=cause.rank if cause is not None else None,
    )


def _waits(record: RunRecord, now: float, *, is_running: bool) -> str:
    """Return what a run waits for, or a node's fresh notice, e.g. about its staging."""
    said = record.notice
    if (waits := record.wait_sentence(now)) or is_running or said is None:
        return waits
    event = said.event
    is_fresh = now - said.at < _FRESH_S
    return f"{event.node}: {event.text}" if is_fresh and isinstance(event, NoticeEvent) else ""


def said_of(record: RunRecord) -> tuple[str, ...]:
    """Return what a head has said last of hangs, slow ranks, losses and stops, each with its time."""
    shown = [one for one in record.moments if one.kind in _SAID][-_MOST_SAID:]
    clocks = (datetime.fromtimestamp(one.at).astimezone() for one in shown)
    return tuple(f"{at:%H:%M:%S}  {one.text}" for at, one in zip(clocks, shown, strict=True))


def _closed(
    attempts: list[live.LiveAttempt], view: RunView, elapsed_s: float | None
) -> list[live.LiveAttempt]:
    """Return the attempts; if the run has ended, end the last one, even if unrecorded."""
    if not attempts or not view.state.is_final or attempts[-1].ended_at is not None:
        return attempts
    began_at, last = view.record.began, attempts[-1]
    ended_at = began_at + (elapsed_s or 0.0) if began_at is not None else last.began_at
    by = "its head was lost" if view.state is RunState.LOST else view.state.value
    return [*attempts[:-1], replace(last, ended_at=ended_at, ended_by=by)]


def command_of(view: RunView) -> str:
    """Return the command, its script without folder; if it can't be read, the problems."""
    if view.plan is None:
        return view.command if view.is_readable else "; ".join(problems_of(view))
    program = view.plan.program
    return " ".join((os.path.basename(program.target), *program.args))


def describe_job_state(view: RunView) -> str:
    """Return the state of the run's job; empty without a job and while it runs."""
    if view.state.is_final or not os.path.isfile(view.run_dir.job):
        return ""
    job = view_job(view.run_dir)
    if job is None or (job.state is JobState.RUNNING and job.reason is None):
        return ""
    return describe_job(job)


def num_workers_of(view: RunView) -> int | None:
    """Return the number of ranks of the last attempt, or of the first one to come."""
    with suppress(*DAMAGED):
        if view.record.attempts:
            return view.record.num_workers
        if view.plan is not None:
            return sum(view.plan.num_workers(place) for place in range(view.plan.max_nodes))
    return None
