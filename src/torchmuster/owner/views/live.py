"""Read a run again and again while it lives: its record, the training's, and how its ranks stand, as one value.

Records are read from where the last look ended. What another version has written, or a crash has torn, is left out
and said; a value never depends on a file being whole.
"""

import itertools
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from torchmuster.errors import RunDirectoryError
from torchmuster.files.layout import RunDir
from torchmuster.files.tail import last_bytes
from torchmuster.model import codec
from torchmuster.model.display.bars import BarWords, read_bar
from torchmuster.model.display.live import LiveAttempt, LiveRun, LiveTask
from torchmuster.model.display.narration import narrate, narrate_wait
from torchmuster.model.event import moment_of
from torchmuster.model.job import describe_job
from torchmuster.model.sample import RankSample
from torchmuster.model.states import JobState, RunState
from torchmuster.owner.views.account import account_of
from torchmuster.owner.views.find import view_job, view_run
from torchmuster.owner.views.live_training import TrainingTail
from torchmuster.owner.views.record import (
    DAMAGED,
    RecordTail,
    newest_training,
    unreadable,
    without_ends,
)
from torchmuster.owner.views.run_view import RunView, problems_of
from torchmuster.owner.views.sweep_view import MemberView, SweepView

MOST_ATTEMPTS = 200  # that are kept; 10,000 are counted
_MOST_SAID = 4
_LOG_BYTES = 8192
_FRESH_S = 15.0
_SAID = (
    "hang",
    "head_replaced",
    "start_wait",
    "node_left_out",
    "node_lost",
    "spare_lost",
    "spare_taken",
    "newcomer",
    "stopping",
    "shrunk",
    "notice",
)

AskBoard = Callable[[], tuple[RankSample | None, str]]


class LiveReader:
    """Reads one run.

    Args:
        run_dir: Of the run.
        ask_board: Returns how the ranks stand by the head, or why it does not say; never waits.
    """

    def __init__(self, run_dir: RunDir, ask_board: AskBoard | None = None) -> None:
        self._run_dir = run_dir
        self._ask_board = ask_board
        self._events: list[dict[str, Any]] = []
        self._tail = RecordTail(run_dir.events)
        self._training = TrainingTail(run_dir)

    def read(self) -> LiveRun:
        """Return the run as it is now.

        Raises:
            RunDirectoryError: What is in its record can't be understood.
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

    def _read(self) -> LiveRun:
        new, anew = self._tail.read()
        if anew:
            self._events = []
        self._events += without_ends(new)
        view = view_run(self._run_dir, self._events)
        now = time.time()
        account = account_of(view, now)
        attempts = _closed(self._attempts(), view, account.elapsed_s)
        sample, sample_at, unheard = self._sample(view)
        training = self._training.read(is_over=view.state.is_final)
        running = bool(attempts) and attempts[-1].ended_at is None and not view.state.is_final
        return LiveRun(
            run_id=view.run_id,
            state=view.state.value,
            is_final=view.state.is_final,
            now=now,
            command=_command(view),
            place=account.place,
            elapsed_s=account.elapsed_s,
            num_attempts=len(attempts),
            attempts=tuple(attempts[-MOST_ATTEMPTS:]),
            sample=sample,
            sample_at=sample_at,
            unheard=unheard,
            waits=self._waits(view) or ("" if running or view.state.is_final else self._doing(now)),
            job=job_words(view),
            ends_at=self._last("time_limit", "ends_at") if not view.state.is_final else None,
            network=self._network(),
            said=self._said(),
            training=training,
            bar=self._bar(attempts) if running and training is None else None,
            tasks=_tasks(view),
            ended_by=account.ended_by or "",
            problems=problems_of(view),
        )

    # The record of the head.

    def _attempts(self) -> list[LiveAttempt]:
        found: dict[int, LiveAttempt] = {}
        for event in self._events:
            with suppress(*DAMAGED):
                _note_attempt(found, event)
        ordered = [found[number] for number in sorted(found)]
        for before, after in itertools.pairwise(ordered):
            if before.ended_at is None:  # its head was lost
                found[before.number] = _ended(before, after.began_at, before.ended_by)
        return [found[number] for number in sorted(found)]

    def _last(self, name: str, key: str) -> float | None:
        for event in reversed(self._events):
            value = event.get(key)
            if event.get("event") == name and isinstance(value, int | float):
                with suppress(OverflowError):  # a whole number of 400 digits is none of seconds
                    return float(value)
        return None

    def _waits(self, view: RunView) -> str:
        if view.state.is_final:
            return ""
        with suppress(*DAMAGED):
            return narrate_wait(self._events, datetime.now(UTC)) or ""
        return ""

    def _network(self) -> str:
        for event in reversed(self._events):
            if event.get("event") == "network":
                with suppress(*DAMAGED):
                    return (narrate("network", event) or "").removeprefix("network: ")
        return ""

    def _said(self) -> tuple[str, ...]:
        said: list[str] = []
        for event in reversed(self._events[-500:]):
            if event.get("event") in _SAID:
                with suppress(*DAMAGED):
                    sentence = narrate(str(event["event"]), event)
                    said += [f"{_clock(event)}  {sentence}"] if sentence else []
            if len(said) == _MOST_SAID:
                break
        return tuple(reversed(said))

    def _doing(self, now: float) -> str:
        """Return what a node that gets ready has just said, e.g. of its staging."""
        for event in reversed(self._events):
            if event.get("event") == "notice":
                at, text = moment_of(event.get("time")), event.get("text")
                fresh = at is not None and now - at < _FRESH_S
                return f"{event.get('node')}: {text}" if fresh and text else ""
        return ""

    # How the ranks stand.

    def _sample(self, view: RunView) -> tuple[RankSample | None, float | None, str]:
        why = ""
        if self._ask_board is not None and not view.state.is_final:
            sample, why = self._ask_board()
            if sample is not None:
                return sample, moment_of(sample.time), ""
        recorded = last_sample(self._run_dir)
        return recorded, moment_of(recorded.time) if recorded is not None else None, why

    def _bar(self, attempts: list[LiveAttempt]) -> BarWords | None:
        path = self._run_dir.rank_log(attempts[-1].number, 0)
        return read_bar(last_bytes(path, _LOG_BYTES).decode(errors="replace"))


def last_sample(run_dir: RunDir) -> RankSample | None:
    """Return the last whole line of the record of samples; None when there is none that can be read."""
    path = run_dir.samples
    num_bytes = 1 << 16
    while True:
        data = last_bytes(path, num_bytes)
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        whole = lines if len(data) < num_bytes else lines[1:]
        if whole:
            with suppress(*DAMAGED):
                return codec.from_plain(RankSample, _loads(whole[-1]))
            return None
        if len(data) < num_bytes or num_bytes > 64 << 20:
            return None
        num_bytes *= 8


def _loads(line: bytes) -> Any:
    import json

    return json.loads(line)


def _note_attempt(found: dict[int, LiveAttempt], event: Mapping[str, Any]) -> None:
    name = event.get("event")
    if name == "attempt_started":
        number = int(event["attempt"])
        found[number] = LiveAttempt(
            number=number,
            num_workers=int(event["world_size"]),
            num_nodes=int(event["num_nodes"]),
            began_at=moment_of(event["time"]),
            why=str(event.get("why", "")),
        )
    elif name == "attempt_failed":
        number = int(event["attempt"])
        ended = _ended(found[number], moment_of(event["time"]), str(event.get("what", "")))
        cause = event.get("cause")
        rank = cause.get("rank") if isinstance(cause, dict) else None
        found[number] = replace(ended, cause_rank=rank if isinstance(rank, int) else None)
    elif name == "run_ended" and found:
        number = max(found)
        before, state = found[number], str(event.get("state", "it ended"))
        if before.ended_at is None:
            found[number] = _ended(before, moment_of(event["time"]), state)


def _ended(attempt: LiveAttempt, at: float | None, by: str) -> LiveAttempt:
    ended_at = at if at is not None else attempt.began_at
    return replace(attempt, ended_at=ended_at, ended_by=by or "its head was lost")


def _closed(
    attempts: list[LiveAttempt], view: RunView, elapsed_s: float | None
) -> list[LiveAttempt]:
    """Return the attempts of a run; the last one has ended with the run, also where the record lacks its end."""
    if not attempts or not view.state.is_final or attempts[-1].ended_at is not None:
        return attempts
    began_at, last = moment_of(view.started), attempts[-1]
    ended_at = began_at + (elapsed_s or 0.0) if began_at is not None else None
    by = "" if view.state is RunState.LOST else view.state.value
    return [*attempts[:-1], _ended(last, ended_at, by)]


def _command(view: RunView) -> str:
    if view.workflow is not None:
        return f"workflow {view.workflow.plan.name}"
    if view.sweep is not None:
        return f"sweep of {' '.join(view.sweep.plan.run.program.display())}"
    return view.command


def command_of(view: RunView) -> str:
    """Return its command with the name of its script only; of a run whose plan can't be read, that."""
    if view.plan is None:
        return _command(view) or "; ".join(problems_of(view))
    program = view.plan.program
    return " ".join((os.path.basename(program.target), *program.args))


def job_words(view: RunView) -> str:
    """Return where its job stands; empty where none waits."""
    if view.state.is_final or not os.path.isfile(view.run_dir.job):
        return ""
    job = view_job(view.run_dir)
    if job is None or (job.state is JobState.RUNNING and job.reason is None):
        return ""
    return describe_job(job)


def num_workers_of(view: RunView) -> int | None:
    """Return how many ranks the last attempt has, or the first will have."""
    with suppress(*DAMAGED):
        if view.attempts:
            return view.num_workers
        if view.plan is not None:
            return sum(view.plan.num_workers(place) for place in range(view.plan.max_nodes))
    return None


def _tasks(view: RunView) -> tuple[LiveTask, ...]:
    if view.sweep is not None:
        return tuple(_member(view, view.sweep, member) for member in view.sweep.members)
    groups = view.workflow.groups if view.workflow is not None else ()
    return tuple(
        LiveTask(
            group=group.name,
            name=task.name,
            state=task.state.value,
            attempt=task.attempt,
            why=task.why or (group.why if not task.state.is_final else None) or "",
            folder=newest_training(view.run_dir, task.name) or "",
            log=view.run_dir.task_log(group.name, task.name, task.attempt),
        )
        for group in groups
        for task in group.tasks
    )


def _member(view: RunView, sweep: SweepView, member: MemberView) -> LiveTask:
    values = sweep.plan.values_of(member.number)
    name = " ".join(f"{name}={value}" for name, value in values.items())
    metric = sweep.plan.metric
    value = f"{metric.name} {member.value:.6g}" if metric and member.value is not None else ""
    run_dir = RunDir(os.path.join(view.run_dir.members, sweep.plan.member_id(member.number)))
    return LiveTask(
        group=str(member.number),
        name=name[:60],
        state=member.state.value,
        attempt=member.attempt or 0,
        why=member.why or value,
        folder=run_dir.path if os.path.isdir(run_dir.path) else "",
        log=run_dir.rank_log(member.attempt or 0, 0),
    )


def _clock(event: Mapping[str, Any]) -> str:
    at = moment_of(event.get("time"))
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S") if at is not None else "?"
