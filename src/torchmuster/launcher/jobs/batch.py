"""Follow a run that is a job: its actions from the run directory, its state from the scheduler."""

import asyncio
import contextlib
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from torchmuster.core.files.layout import RunDir
from torchmuster.core.files.terminal import TerminalVoice
from torchmuster.core.model.events import AttemptStartedEvent
from torchmuster.core.model.plan import RunPlan, Tee
from torchmuster.core.model.verdict import Result
from torchmuster.core.owner.record import Follow
from torchmuster.errors import MusterError
from torchmuster.launcher.engines.base import Dialect, object_dialect
from torchmuster.launcher.jobs.jobs import (
    NeverStartsWatch,
    cancel_jobs,
    describe_link,
    settled_result,
    view_newest,
)
from torchmuster.launcher.model.job import JobView, describe_job
from torchmuster.launcher.views.run_view import lost_head

if TYPE_CHECKING:
    from torchmuster.launcher.views.elsewhere import RecordCopy

_POLL_S = 1.0
_LOOK_S = 0.3
_SETTLE_S = 10.0  # from the job's end to its result, which a shared file system may show late
_SECOND_CTRL_C_S = 3.0
_OWN_WORDS = ("muster: ", "error: ", "  at: ", "  because: ", "hint: ")
_SAY_EVERY_S = 10.0  # for the same wait with other details
_SILENT_S = 5.0
_LAST_ANSWER_S = 2.0


def _run_in_thread(work: Callable[[], float]) -> asyncio.Future[float]:
    """Run work in a daemon thread: a silent scheduler must not delay the exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[float] = loop.create_future()

    def settle(settled: Future[float]) -> None:
        if not done.cancelled():
            error = settled.exception()
            done.set_result(settled.result()) if error is None else done.set_exception(error)

    def run() -> None:
        settled: Future[float] = Future()
        try:
            settled.set_result(work())
        except Exception as found:  # noqa: BLE001 - raised where the answer is awaited
            settled.set_exception(found)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, settled)

    threading.Thread(target=run, name="scheduler", daemon=True).start()
    return done


@dataclass(slots=True)
class JobReportFilter:
    """Decides when to report a job: a new state or meaning at once, new details every 10 s.

    Pods that start one by one change only the details, and each of many would be a line.
    """

    _text: str = ""
    _view: JobView | None = None
    _again_at: float = 0.0

    def should_report(self, text: str, view: JobView, now: float) -> bool:
        """Return whether to report this text on a job now."""
        before = self._view
        is_same = (
            before is not None
            and view.wait is not None
            and (view.job_id, view.state, view.wait) == (before.job_id, before.state, before.wait)
        )
        if text == self._text or (is_same and now < self._again_at):
            return False
        self._text, self._view, self._again_at = text, view, now + _SAY_EVERY_S
        return True


Ended = TypeVar("Ended")


class JobsFollower(ABC, Generic[Ended]):
    """Base: follows the jobs of a run, a workflow or a sweep until there is a result.

    Attributes:
        voice: Shows progress on the terminal.
        scheduler: The scheduler's name.
        jobs: How messages about Ctrl-C name the jobs.
        is_one: Whether there is only one job.
    """

    jobs = "the jobs"
    is_one = False

    def __init__(self, voice: TerminalVoice, scheduler: str) -> None:
        self.voice = voice
        self.scheduler = scheduler
        self._interrupted_at: float | None = None
        self._leaves = False

    def _interrupt(self) -> None:
        """Take Ctrl-C: once leaves the jobs alone, again within 3 s cancels them."""
        if self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
            go_on, them = ("continues", "it") if self.is_one else ("continue", "them")
            self.voice.say(f"{self.jobs} {go_on}; again within 3 s cancels {them}")
            return
        self._interrupted_at = None
        self.voice.say(f"cancelling {self.jobs}")
        try:
            self.cancel()
        except MusterError as error:
            self.voice.say(f"{error.what}: {error.why}")
            self._leaves = True

    def _is_to_leave(self, now: float) -> bool:
        """Return whether to leave the jobs: no second Ctrl-C came, or they can't be cancelled."""
        since = self._interrupted_at
        return self._leaves or (since is not None and now - since > _SECOND_CTRL_C_S)

    async def follow(self) -> Ended | None:
        """Return the result; None if the jobs continue without us, or ended without a result."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)
        poll_at, ended_at, is_said = 0.0, None, False
        asking: asyncio.Future[float] | None = None
        while True:
            self.show()
            ended = self.ended()
            if ended is not None:
                self.show()
                return ended
            now = time.monotonic()
            if self.has_news():
                poll_at = now
            if self._is_to_leave(now) or (ended_at is not None and now > ended_at + _SETTLE_S):
                if asking is not None:  # it may be recording an end and cancelling a job: let it
                    await asyncio.wait({asking}, timeout=_LAST_ANSWER_S)
                return None
            if asking is None and now >= poll_at:
                asking, asked_at = _run_in_thread(self.ask), now
            is_late = asking is not None and now > asked_at + _SILENT_S
            if asking is not None and not asking.done() and is_late and not is_said:
                is_said = True
                silent = f"no word from {self.scheduler} for {_SILENT_S:.0f} s"
                self.voice.say(f"{silent}; muster keeps asking")
            if asking is not None and asking.done():
                poll_at = time.monotonic() + asking.result()
                asking, is_said = None, is_late
                is_over = await self.take_answer()
                ended_at = (ended_at or time.monotonic()) if is_over else None
            await asyncio.sleep(_LOOK_S)

    @abstractmethod
    def ended(self) -> Ended | None:
        """Return the result; None while there is none."""

    @abstractmethod
    def ask(self) -> float:
        """Ask the scheduler, in a thread; return the seconds until the next question."""

    @abstractmethod
    def cancel(self) -> None:
        """Cancel the jobs."""

    def show(self) -> None:
        """Show what is new."""

    def has_news(self) -> bool:
        """Return whether to ask the scheduler at once."""
        return False

    async def take_answer(self) -> bool:
        """Handle the scheduler's answer; return whether the jobs have ended, so a result is due."""
        return False


class JobFollower(JobsFollower[Result]):
    """Shows what a job does, from its run directory and its scheduler, until it has a result."""

    is_one = True

    def __init__(
        self, plan: RunPlan, run_dir: RunDir, dialect: Dialect, job_id: str, voice: TerminalVoice
    ) -> None:
        super().__init__(voice, dialect.name)
        self.plan = plan
        self.run_dir = run_dir
        self.view: JobView | None = None  # the scheduler's last answer
        self.jobs = f"job {job_id}"
        self._news = JobReportFilter()
        self._follow = Follow(run_dir.events)
        self._attempts: set[int] = set()
        self._never = NeverStartsWatch()
        self._lost: tuple[str, ...] = ()
        self._copy: RecordCopy | None = None  # for a run whose nodes don't see our files
        if object_dialect(dialect) is not None:
            from torchmuster.launcher.views.elsewhere import elsewhere

            self._copy = elsewhere().follow(run_dir, voice.say, self._show_line)

    def _show_line(self, line: str) -> None:
        """Show a line of the first pod's log: output of its ranks, or muster's own."""
        if line.startswith(_OWN_WORDS):
            self.voice.print(line)
        else:
            self.voice.show(0, 1, line, 0)

    def close(self) -> None:
        """Stop copying the record; the copier leaves nothing of a finished run on its cluster."""
        if self._copy is not None:
            self._copy.close()

    def ended(self) -> Result | None:
        """Return the result, joined with what only the cluster knew."""
        result = settled_result(self.run_dir)
        return result if result is None or self._copy is None else self._copy.join(result)

    def cancel(self) -> None:
        """Cancel the job."""
        cancel_jobs(self.run_dir)

    def has_news(self) -> bool:
        """Return whether the copied record shows that something ended."""
        return self._copy is not None and self._copy.has_news()

    def ask(self) -> float:
        """Report the state of the job, and end it if it can never start."""
        self._report_state()
        lost = lost_head(self.run_dir)
        if lost and lost != self._lost:
            self.voice.say(lost[0])
        self._lost = lost
        self._never.cancel_if_hopeless(self.run_dir)
        return _POLL_S  # `JobStatusCache` asks less and less often

    async def take_answer(self) -> bool:
        """Copy the job's record; return whether the job has ended and its record is complete."""
        is_over = self.view is not None and self.view.state.is_final
        if self._copy is not None and is_over:
            return await asyncio.to_thread(self._copy.take_last_words)
        if self._copy is not None:
            await asyncio.to_thread(self._copy.look_after, self.view)
        return is_over

    def _report_state(self) -> None:
        view = view_newest(self.run_dir)
        link = describe_link(self.run_dir)
        if view is None:
            return
        self.view, self.jobs = view, f"job {view.job_id}"
        text = describe_job(view) + (f", {link}" if link is not None else "")
        if self._news.should_report(text, view, time.monotonic()):
            self.voice.say(text)

    def show(self) -> None:
        """Show the run's new events and output."""
        for one in self._follow.events():
            if isinstance(one.event, AttemptStartedEvent):
                self._attempts.add(one.event.attempt)
            self.voice.tell(one.event)
        if self.plan.tee is Tee.NONE:
            return
        for rank, text in self._follow.texts(self._logs()):
            new = text if self._copy is None else self._copy.lines.new_of("record", text)
            self.voice.show(rank, 1, new, 0)

    def _logs(self) -> Iterator[tuple[int, str]]:
        plan, num_ranks = self.plan, 1
        if plan.tee is Tee.ALL:
            num_ranks = sum(plan.num_workers(place) for place in range(plan.max_nodes))
        for attempt in sorted(self._attempts):
            for rank in range(num_ranks):
                yield rank, self.run_dir.rank_log(attempt, rank)
