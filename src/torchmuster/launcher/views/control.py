"""Control a live run: wait for its end, stop it, follow its logs."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from torchmuster.core import plugs, proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.ranks import name_ranks
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import did_you_mean
from torchmuster.core.model.verdict import AT_ONCE, Report, Result
from torchmuster.core.net import messages
from torchmuster.core.owner.record import Follow, recorded_seconds
from torchmuster.core.plainfile import open_plain
from torchmuster.errors import ChannelError, NotFoundError
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.jobs.jobs import NeverStartsWatch, cancel_jobs
from torchmuster.launcher.views import find
from torchmuster.launcher.views.elsewhere import RecordCopy, is_elsewhere
from torchmuster.launcher.views.head_call import call_head
from torchmuster.launcher.views.run_view import RunView

_POLL_S = 0.1
_SETTLE_S = 2.0  # from a job's end to its result, which a shared file system may show late
_BEGINS_S = 5.0  # from an owner's start to its head's


async def wait_for_result(run_dir: RunDir, copy: RecordCopy | None = None) -> Result | None:
    """Wait for the run's result; None if its owner left none. `copy` fetches it from pods."""
    never = NeverStartsWatch()
    while True:
        result = find.any_result(run_dir)
        if result is not None:
            return result
        if not find.owner_lives(run_dir) and (copy is None or copy.take_last_words()):
            return find.any_result(run_dir)
        never.cancel_if_hopeless(run_dir)
        await asyncio.sleep(_POLL_S)


async def send_stop(view: RunView, signum: int, *, at_once: bool) -> None:
    """Stop the run: through its head, its jobs or its owner, whichever it has.

    Raises:
        ChannelError: The head or the owner can't be reached.
    """
    # From files alone: the kind of a damaged record is unknown, but its jobs can be cancelled.
    if any(stop(view.run_dir) for stop in plugs.every("stops")):
        return
    if view.is_conducted_by_owner:
        _signal_owner(view, signum, at_once=at_once)
        return
    try:
        if cancel_jobs(view.run_dir):
            return
    except EngineError as refused:
        try:
            await _tell_head(view, signum, at_once=at_once)
        except ChannelError:
            raise refused from None
        return
    try:
        await _tell_head(view, signum, at_once=at_once)
    except ChannelError:
        if not _owner_ends_heads(view.run_dir):
            raise
        atomic.write_json(view.run_dir.cancelled, {"by": "muster cancel"})
        _signal_owner(view, signum, at_once=at_once)


async def _tell_head(view: RunView, signum: int, *, at_once: bool) -> None:
    # The run was started here just now, and its head is about to: a stop may be that early.
    deadline = time.monotonic() + _BEGINS_S
    while time.monotonic() < deadline and _has_no_head_yet(view.run_dir):
        await asyncio.sleep(_POLL_S)
    channel = await call_head(view)
    channel.send_nowait(messages.Stop(signum=signum, at_once=at_once))
    await channel.close()


def _has_no_head_yet(run_dir: RunDir) -> bool:
    if os.path.exists(run_dir.head) or is_elsewhere(run_dir):
        return False
    return find.owner_is_here(run_dir) and find.owner_lives(run_dir)


def _owner_ends_heads(run_dir: RunDir) -> bool:
    """Return whether an owner on this machine follows the head: it ends one that is silent."""
    return (
        os.path.isfile(run_dir.head) and find.owner_is_here(run_dir) and find.owner_lives(run_dir)
    )


def _signal_owner(view: RunView, signum: int, *, at_once: bool) -> None:
    """Stop the run by a signal to its owner on this machine."""
    owner = atomic.read_json(view.run_dir.owner)
    if not isinstance(owner, dict) or not find.owner_is_here(view.run_dir):
        raise find.owner_is_on(view, "ssh", f"cancel {short_id(view.run_id)}")
    proc.kill_quietly(int(owner["pid"]), AT_ONCE if at_once else signum)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChoice:
    """Selection of logs; None means all tasks, the last attempt, all ranks.

    Attributes:
        rather: Without `rank`, only this rank if it has a log.
    """

    task: str | None = None
    attempt: int | None = None
    rank: int | None = None
    rather: int | None = None


def log_files(view: RunView, choice: LogChoice) -> list[tuple[int, str]]:
    """Return (rank, path) of the selected logs; for a workflow (number of the task, path).

    Raises:
        NotFoundError: There is no such task, attempt or rank, or no output yet.
    """
    logs = view.task_logs()
    return _rank_logs(view, choice) if logs is None else _task_logs(view, logs, choice)


def _task_logs(
    view: RunView, of_tasks: list[tuple[str, list[tuple[int, str]]]], choice: LogChoice
) -> list[tuple[int, str]]:
    names, task, attempt = view.task_names, choice.task, choice.attempt
    if task is not None and task not in names:
        fix = did_you_mean(task, names, f"its tasks: {', '.join(names[:12])}")
        raise NotFoundError(f"the run {view.run_id} has no task `{task}`", fix=fix)
    found: list[tuple[int, str]] = []
    for name, logs in of_tasks:
        chosen = logs[-1:] if attempt is None else [log for log in logs if log[0] == attempt]
        if task is None or name == task:
            found += [(names.index(name), path) for _, path in chosen]
    if not found:
        which = f" of attempt {attempt}" if attempt is not None else ""
        whose = f"the task {task}" if task else f"the run {view.run_id}"
        yet = "" if view.state.is_final else " yet"
        raise NotFoundError(f"{whose} has no logs{which}{yet}", where=view.run_dir.path)
    return found


def _rank_logs(view: RunView, choice: LogChoice) -> list[tuple[int, str]]:
    numbers = _numbers(view.run_dir.logs, "attempt-", "")
    if not numbers and os.path.isfile(os.path.join(view.run_dir.path, "pods", "no-reach.json")):
        return [(0, view.run_dir.job_log)]
    if not numbers:
        yet = "" if view.state.is_final else " yet"
        why = "nobody wrote anything" if view.attempts else "it has made no attempt"
        error = f"the run {view.run_id} has no logs{yet}"
        raise NotFoundError(error, where=view.run_dir.logs, why=why)
    chosen = numbers[-1] if choice.attempt is None else choice.attempt
    if chosen not in numbers:
        known = f"it has {name_ranks(numbers).replace('rank', 'attempt')}"
        what = f"the run {view.run_id} has no attempt {chosen}"
        if any(one.number == chosen for one in view.record.attempts):
            what = f"the logs of attempt {chosen} of {view.run_id} were removed"
            known = f"of very many attempts the first and the last are kept: {known}"
        raise NotFoundError(what, where=view.run_dir.logs, why=known)
    folder, rank = view.run_dir.attempt_logs(chosen), choice.rank
    ranks = _numbers(folder, "rank-", ".log")
    if rank is not None and rank not in ranks:
        known = f"it has logs of {name_ranks(ranks)}" if ranks else "nobody wrote anything"
        raise NotFoundError(f"attempt {chosen} has no log of rank {rank}", where=folder, why=known)
    if rank is None and choice.rather in ranks:
        rank = choice.rather
    wanted = ranks if rank is None else [rank]
    return [(number, view.run_dir.rank_log(chosen, number)) for number in wanted]


def _numbers(folder: str, before: str, after: str) -> list[int]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    words = [n.removeprefix(before).removesuffix(after) for n in names if n.startswith(before)]
    return sorted(int(word) for word in words if word.isdigit())


async def follow_logs(
    view: RunView, choice: LogChoice, write: Callable[[int, str], None], tail: int | None = None
) -> None:
    """Write the output of ranks or tasks until the run ends, from the last `tail` lines on."""
    follow = Follow()
    if tail is not None:
        with contextlib.suppress(NotFoundError):
            logs = log_files(view, choice)
            follow.skip_to({path: offset_of_last_lines(path, tail) for _, path in logs})
    while True:
        over = find.any_result(view.run_dir) is not None or not find.owner_lives(view.run_dir)
        with contextlib.suppress(NotFoundError):
            for number, text in follow.texts(log_files(find.view_run(view.run_dir), choice)):
                write(number, text)
        if over:
            return
        await asyncio.sleep(_POLL_S)


def stop_and_wait(view: RunView, *, at_once: bool, timeout_s: float) -> Result | None:
    """Stop a run and wait for its end; return None if it takes longer."""

    async def stop() -> Result | None:
        await send_stop(view, int(signal.SIGTERM), at_once=at_once)
        deadline = time.monotonic() + timeout_s
        ended_at: float | None = None
        while time.monotonic() < deadline:
            result = find.any_result(view.run_dir)
            if result is not None:
                return result
            if ended_at is None:
                job = find.view_job(view.run_dir)
                ended_at = time.monotonic() if job is not None and job.state.is_final else None
            if ended_at is not None and time.monotonic() - ended_at > _SETTLE_S:
                return _cancelled(view)
            await asyncio.sleep(_POLL_S)
        return None

    return asyncio.run(stop())


def _cancelled(view: RunView) -> Result:
    """Write the result of a cancelled run for a head that was killed or never started."""
    report = Report(error="the run was stopped", because=("its job was cancelled",))
    result = Result(
        run_id=view.run_id,
        state=RunState.CANCELLED,
        exit_code=128 + signal.SIGTERM,
        attempts=len(view.attempts),
        restarts_spent=0,
        elapsed_s=recorded_seconds(view.run_dir.events, until=time.time()),
        report=report,
    )
    atomic.write_json(view.run_dir.result, codec.to_plain(result))
    return result


_BLOCK_BYTES = 1 << 16


def offset_of_last_lines(path: str, num_lines: int) -> int:
    """Return the byte offset of the last lines of a file; 0 if it has fewer or can't be read."""
    try:
        with open_plain(path) as file:
            end = file.seek(0, os.SEEK_END)
            if num_lines == 0:
                return end
            position, found = end, 0
            while position > 0:
                begin = max(0, position - _BLOCK_BYTES)
                file.seek(begin)
                block = file.read(position - begin)
                at = len(block) - 1 if position == end and block.endswith(b"\n") else len(block)
                while (at := block.rfind(b"\n", 0, at)) >= 0:
                    found += 1
                    if found == num_lines:
                        return begin + at + 1
                position = begin
    except OSError:
        pass
    return 0
