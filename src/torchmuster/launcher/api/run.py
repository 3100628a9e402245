"""Handle of a run in Python: the same code as `muster status`, `logs`, `wait` and `cancel`."""

import asyncio
import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchmuster.core.files.layout import RunDir, short_id, size_of
from torchmuster.core.model.failure import ValueNote
from torchmuster.core.model.ranks import name_ranks
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Result
from torchmuster.core.plainfile import open_own
from torchmuster.errors import ChannelError, MusterError, NotFoundError
from torchmuster.launcher.api.failures import Interrupted, RunFailed
from torchmuster.launcher.model.carried import own_python, unpack
from torchmuster.launcher.model.run import record_of
from torchmuster.launcher.views.find import any_result, owner_lives, view_run
from torchmuster.launcher.views.run_view import RunView

if TYPE_CHECKING:
    from torchmuster.launcher.views.elsewhere import RecordCopy


# Return values are read, checked against the record, and only then unpickled.
#
# The head of the run writes the record (`events.jsonl`); it receives the hash of each value over
# the authenticated channel. A value that is not recorded, or differs from its record, is never
# unpickled.


class ResultError(MusterError):
    """A rank's return value can't be read, or doesn't match the run's record."""


def noted_values(run_dir: RunDir) -> tuple[int, dict[int, ValueNote]]:
    """Return the last attempt's number, and the recorded notes on its return values by rank.

    Raises:
        NotFoundError: The run has no attempt, or ranks of the last attempt returned nothing.
    """
    attempts = record_of(run_dir).attempts
    attempt, world_size, found = -1, 0, dict[int, ValueNote]()
    if attempts:
        last = attempts[-1]
        attempt, world_size, found = last.number, last.num_workers or 0, last.values
    missing = [rank for rank in range(world_size) if rank not in found]
    if attempt < 0 or missing:
        who = name_ranks(missing) if missing else "no rank"
        raise NotFoundError(
            f"{who} of the run has returned no value" if missing else "the run has no values",
            where=run_dir.events,
            why="only functions return values: a script leaves files, or `torchmuster.train` metrics",
        )
    return attempt, {rank: found[rank] for rank in range(world_size)}


def have_arrived(run_dir: RunDir, attempt: int, notes: Mapping[int, ValueNote]) -> bool:
    """Return whether all value files have arrived; those of other hosts may follow the result."""
    return all(
        size_of(run_dir.rank_value(attempt, rank)) == note.size_bytes
        for rank, note in notes.items()
    )


def read_value(path: str, note: ValueNote, rank: int) -> Any:
    """Return a rank's return value.

    Raises:
        ResultError: The file doesn't match the record, or needs another Python.
    """
    if note.python != own_python():
        raise ResultError(
            f"the value of rank {rank} was pickled by Python {note.python}, this is Python {own_python()}",
            where=path,
            fix=f"read it with Python {note.python}",
        )
    try:
        with open_own(path) as file:
            data = file.read(note.size_bytes + 1)
    except OSError as error:
        raise ResultError(
            f"the value of rank {rank} can't be read", where=path, why=str(error)
        ) from None
    if len(data) != note.size_bytes or hashlib.sha256(data).hexdigest() != note.sha256:
        raise ResultError(
            f"the value of rank {rank} is not what the rank has sent",
            where=path,
            why=f"the record names {note.size_bytes} bytes with another hash, so nothing was unpickled",
            fix="run the function again",
        )
    return unpack(data, lambda module: _missing(module, rank))


def _missing(module: str, rank: int) -> ResultError:
    what = f"the value of rank {rank} needs the module `{module}`, which is not here"
    return ResultError(what, fix="return numbers, texts, lists, dictionaries or tensors")


_POLL_S = 0.02
# Polling pause: 2 % of the time waited so far, within these bounds, so that schedulers are asked
# less often.
_LEAST_POLL_S, _MOST_POLL_S, _POLL_SHARE = 0.004, 0.05, 0.02
_LOOK_AT_OWNER_S = 2.0  # the check may ask a scheduler
_FILES_COME_WITHIN_S = 10.0  # the files of other hosts, after the result


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """State of a run.

    Attributes:
        run_id: The run's id.
        state: `starting`, `waiting`, `running`, or how it ended: `succeeded`, `failed`,
            `cancelled`, ...
        is_final: Whether it has ended.
        num_attempts: Attempts started so far.
        elapsed_s: Seconds from its start until now, or until its end; None before the start.
        waits_for: What it waits for, in a sentence; empty if nothing.
        exit_code: The exit code that `muster run` would return; None while it runs.
    """

    run_id: str
    state: str
    is_final: bool
    num_attempts: int
    elapsed_s: float | None
    waits_for: str
    exit_code: int | None


def poll_until_ended(
    run_dir: RunDir,
    timeout_s: float | None,
    pause_s: Callable[[float], float],
    is_all_here: Callable[[], bool] = lambda: True,
) -> Generator[float, None, Result | None]:
    """Yield pauses between polls; return the result, or None if the owner left none.

    Args:
        run_dir: Directory of a run, or of something that consists of runs.
        timeout_s: The longest wait, in seconds; None for no limit.
        pause_s: Returns the next pause from the time waited so far, both in seconds.
        is_all_here: Fetches the last data from another machine; false while more is to come.

    Raises:
        TimeoutError: The time is up.
    """
    started = look_at_owner_at = time.monotonic()
    while (result := any_result(run_dir)) is None:
        now = time.monotonic()
        if timeout_s is not None and now - started >= timeout_s:
            name = short_id(os.path.basename(run_dir.path))
            raise TimeoutError(f"{name} has not ended within {timeout_s:g} s")
        if now >= look_at_owner_at:
            look_at_owner_at = now + _LOOK_AT_OWNER_S
            if not owner_lives(run_dir) and is_all_here():
                return any_result(run_dir)
        yield pause_s(now - started)
    return result


class RunHandle:
    """A handle of a run that `launch`, another process or the command line has started.

    It keeps no state: all handles of one run agree, in any process of this user.

    Every waiting method has a twin for event loops, with the suffix `_async`; `await run` is
    `await run.wait_async()`. Cancelling a task that waits leaves the run alone.

    Attributes:
        run_id: The id, which every command accepts.
        path: The run's directory.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.run_id = os.path.basename(run_dir.path)
        self.path = run_dir.path
        self._dir = run_dir

    def __repr__(self) -> str:
        """Return the short id and the state."""
        return f"<torchmuster.Run {short_id(self.run_id)}: {self._view().state.value}>"

    def __eq__(self, other: object) -> bool:
        """Return whether both are handles of the same run."""
        return isinstance(other, RunHandle) and other.path == self.path

    def __hash__(self) -> int:
        """Return the hash of its path."""
        return hash(self.path)

    def __await__(self) -> Generator[Any, None, "RunHandle"]:
        """Wait as `wait_async` does: `await run`, or `asyncio.gather(*runs)`."""
        return self.wait_async().__await__()

    # State.

    def status(self) -> RunStatus:
        """Return the state of the run now; for a job, this asks the scheduler.

        Raises:
            torchmuster.errors.EngineError: The scheduler does not answer.
        """
        from torchmuster.launcher.views.live import LiveReader

        result = any_result(self._dir)
        live = LiveReader(self._dir).read()
        return RunStatus(
            run_id=self.run_id,
            state=live.state,
            is_final=live.is_final,
            num_attempts=live.num_attempts,
            elapsed_s=live.elapsed_s,
            waits_for=live.waits or live.job,
            exit_code=result.exit_code if result is not None else None,
        )

    def logs(self, rank: int = 0, *, attempt: int | None = None) -> str:
        """Return all output of a rank so far.

        Args:
            rank: The rank.
            attempt: The attempt's number, from 0; None for the last.

        Raises:
            torchmuster.errors.NotFoundError: There is no such rank or attempt, or no output yet.
        """
        from torchmuster.launcher.views.control import LogChoice, log_files

        (_, path), *_ = log_files(self._view(), LogChoice(rank=rank, attempt=attempt))
        with open(path, errors="replace", newline="") as file:  # progress bars end frames with \r
            return file.read()

    # Waiting and cancelling.

    def wait(self, timeout_s: float | None = None) -> "RunHandle":
        """Wait until the run succeeds; return it.

        Args:
            timeout_s: The longest wait, in seconds; None for no limit. The run continues after it.

        Raises:
            RunFailed: The run did not succeed.
            TimeoutError: The time is up.
        """
        try:
            with copied_run(self._dir) as copy:
                for pause_s in self._shown(self._look_until_ended(timeout_s, copy)):
                    threading.Event().wait(pause_s)
        except KeyboardInterrupt:
            raise Interrupted(self._runs_on()) from None
        return self

    async def wait_async(self, timeout_s: float | None = None) -> "RunHandle":
        """Wait as `wait` does, without blocking the event loop: `await run.wait_async()`."""
        try:
            with copied_run(self._dir) as copy:
                for pause_s in self._shown(self._look_until_ended(timeout_s, copy)):
                    await asyncio.sleep(pause_s)
        except asyncio.CancelledError:
            from torchmuster.launcher.api.follow import in_notebook

            if in_notebook():  # the kernel's interrupt
                print(self._runs_on())
            raise
        return self

    def _shown(self, pauses: Iterator[float]) -> Iterator[float]:
        if "IPython" not in sys.modules:
            return pauses
        from torchmuster.launcher.api.follow import shown

        return shown(self._dir, pauses)

    def _runs_on(self) -> str:
        name = short_id(self.run_id)
        return f"{name} runs on; muster cancel {name} ends it, find_run({name!r}) finds it again"

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """Wait until the run succeeds; return its function's return values, in the order of ranks.

        Only values of the last attempt count. Each was sent by a worker of this run, over a channel
        with the run's key; a value whose hash differs from the one sent is not unpickled.

        Args:
            timeout_s: As for `wait`.

        Raises:
            RunFailed: The run did not succeed.
            TimeoutError: The time is up.
            ResultError: A value is missing, damaged or of another Python.
            torchmuster.errors.NotFoundError: The run was a script.
        """
        self.wait(timeout_s)
        for pause_s in self._poll_for_values():
            threading.Event().wait(pause_s)
        return self._values()

    async def results_async(self, timeout_s: float | None = None) -> list[Any]:
        """Return the same as `results`, without blocking the event loop."""
        await self.wait_async(timeout_s)
        for pause_s in self._poll_for_values():
            await asyncio.sleep(pause_s)
        return self._values()

    def follow(self) -> "RunHandle":
        """Show rank 0's output and a status line until the run ends; return the run.

        In a notebook the cell shows them. An interrupt (Ctrl-C, the button of a notebook) cancels
        the run.

        Raises:
            RunFailed: The run did not succeed.
            KeyboardInterrupt: The wait was interrupted, and the run has been cancelled.
        """
        from torchmuster.launcher.api.follow import follow

        with interrupt_cancels(self.run_id, self.cancel), copied_run(self._dir):
            follow(self._dir)
        return self.wait()

    async def follow_async(self) -> "RunHandle":
        """Show the same as `follow`, without blocking the event loop.

        Cancelling the task only stops the display; the run continues.

        Raises:
            RunFailed: The run did not succeed.
        """
        from torchmuster.launcher.api.follow import follow_async

        with copied_run(self._dir):
            await follow_async(self._dir)
        return await self.wait_async()

    def cancel(self, *, at_once: bool = False, timeout_s: float = 60.0) -> None:
        """Stop the run and wait for its end; do nothing if it has ended.

        Args:
            at_once: Skip the time that workers have to save (`grace`).
            timeout_s: How long to wait for the end, in seconds.

        Raises:
            torchmuster.errors.ChannelError: The head can't be reached.
            TimeoutError: The run was asked to stop and has not ended within `timeout_s`.
        """
        import concurrent.futures

        from torchmuster.launcher.views.control import stop_and_wait

        if any_result(self._dir) is not None:
            return
        view = self._view()
        until = time.monotonic() + timeout_s
        while True:
            try:
                # In a thread: in a notebook, this one already runs an event loop.
                with concurrent.futures.ThreadPoolExecutor(1, "muster") as pool:
                    result = pool.submit(
                        stop_and_wait, view, at_once=at_once, timeout_s=timeout_s
                    ).result()
                break
            except ChannelError:
                # A run that was just launched has no head yet.
                is_new = not os.path.exists(self._dir.head) and owner_lives(self._dir)
                if not is_new or time.monotonic() > until:
                    raise
                threading.Event().wait(_POLL_S)
        if result is None:
            raise TimeoutError(
                f"{short_id(self.run_id)} was told to stop {timeout_s:g} s ago and has not ended"
            )

    async def cancel_async(self, *, at_once: bool = False, timeout_s: float = 60.0) -> None:
        """Stop the run as `cancel` does, without blocking the event loop."""
        await asyncio.to_thread(self.cancel, at_once=at_once, timeout_s=timeout_s)

    # Shared steps.

    def _view(self) -> RunView:
        return view_run(self._dir)

    def _look_until_ended(self, timeout_s: float | None, copy: "RecordCopy | None") -> Any:
        """Yield pauses between polls until the run succeeds."""
        result = yield from poll_until_ended(
            self._dir,
            timeout_s,
            lambda waited_s: min(max(_POLL_SHARE * waited_s, _LEAST_POLL_S), _MOST_POLL_S),
            lambda: copy is None or copy.take_last_words(),
        )
        self._raise_unless_succeeded(result)

    def _raise_unless_succeeded(self, result: Result | None) -> None:
        state = result.state if result is not None else RunState.LOST
        if state is not RunState.SUCCEEDED:
            raise RunFailed(short_id(self.run_id), result, state.value)

    def _poll_for_values(self) -> Any:
        """Yield pauses between polls until all values have arrived, or the time is up."""
        attempt, notes = noted_values(self._dir)
        until = time.monotonic() + _FILES_COME_WITHIN_S
        while not have_arrived(self._dir, attempt, notes) and time.monotonic() < until:
            yield _POLL_S

    def _values(self) -> list[Any]:
        attempt, notes = noted_values(self._dir)
        return [
            read_value(self._dir.rank_value(attempt, rank), note, rank)
            for rank, note in notes.items()
        ]


@contextlib.contextmanager
def interrupt_cancels(run_id: str, cancel: Callable[[], None]) -> Iterator[None]:
    """Make an interrupt of the block cancel a run or a sweep, and report it.

    Raises:
        Interrupted: The block was interrupted.
    """
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):  # a second one ends the wait
            cancel()
        raise Interrupted(f"cancelled {short_id(run_id)}") from None


def copied_run(run_dir: RunDir) -> "contextlib.AbstractContextManager[RecordCopy | None]":
    """While waiting, copy the record of a run in pods, as `muster wait` does."""
    from torchmuster.launcher.views.elsewhere import copied, is_elsewhere

    return copied(run_dir) if is_elsewhere(run_dir) else contextlib.nullcontext()
