"""Follow a run that is a job: what it does from its run directory, where it stands from its scheduler."""

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
from torchmuster.launcher.jobs.links import cancel_jobs, describe_link, settled_result, view_newest
from torchmuster.launcher.jobs.never import NeverWatch
from torchmuster.launcher.model.job import JobView, describe_job
from torchmuster.launcher.views.run_view import lost_head

if TYPE_CHECKING:
    from torchmuster.launcher.views.elsewhere import RecordCopy

_POLL_S = 1.0
_LOOK_S = 0.3
_SETTLE_S = 10.0  # from the job's end to its result: a shared file system may show it late
_SECOND_CTRL_C_S = 3.0
_OWN_WORDS = ("muster: ", "error: ", "  at: ", "  because: ", "hint: ")
_SAY_EVERY_S = 10.0  # of the same wait, whose parts change
_SILENT_S = 5.0
_LAST_ANSWER_S = 2.0


@dataclass(slots=True)
class TwiceCancels:
    """Ctrl-C while jobs are followed: once leaves them alone, again within 3 s cancels them.

    Attributes:
        goes_on: What is said at the first.
        cancelling: What is said at the second.
        cancel: Cancels the jobs.
    """

    voice: TerminalVoice
    goes_on: Callable[[], str]
    cancelling: Callable[[], str]
    cancel: Callable[[], object]
    _since: float | None = None
    _leaves: bool = False

    def listen(self) -> None:
        """Take the signal from now on."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._take)

    def leaves(self) -> bool:
        """Say whether the jobs continue without us: nobody asked again, or they can't be cancelled."""
        since = self._since
        return self._leaves or (since is not None and time.monotonic() - since > _SECOND_CTRL_C_S)

    def _take(self) -> None:
        if self._since is None:
            self._since = time.monotonic()
            self.voice.say(self.goes_on())
            return
        self._since = None
        self.voice.say(self.cancelling())
        try:
            self.cancel()
        except MusterError as error:
            self.voice.say(f"{error.what}: {error.why}")
            self._leaves = True


def _beside(work: Callable[[], float]) -> asyncio.Future[float]:
    """Work in a thread which nothing waits for at the end: a scheduler may be silent for a minute."""
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
        except Exception as found:  # noqa: BLE001 - it is raised where the answer is wanted
            settled.set_exception(found)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, settled)

    threading.Thread(target=run, name="scheduler", daemon=True).start()
    return done


@dataclass(slots=True)
class JobNews:
    """Which changes of a job are told: another state or meaning at once, other words for the same one every 10 s.

    Pods that come one by one change the words only, and each of many would be a line.
    """

    _text: str = ""
    _view: JobView | None = None
    _again_at: float = 0.0

    def is_told(self, text: str, view: JobView, now: float) -> bool:
        """Say whether this text on a job is told now."""
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
    """Follows what jobs of a scheduler do until there is a result: a run, a workflow, a sweep.

    Attributes:
        voice: Shows it.
        scheduler: Its name.
        jobs: What Ctrl-C speaks of.
        is_one: These are one job.
    """

    jobs = "the jobs"
    is_one = False

    def __init__(self, voice: TerminalVoice, scheduler: str) -> None:
        self.voice = voice
        self.scheduler = scheduler

    async def follow(self) -> Ended | None:
        """Return how it ended; None when the jobs continue without us, or ended without a result."""
        go_on, them = ("continues", "it") if self.is_one else ("continue", "them")
        interrupts = TwiceCancels(
            self.voice,
            lambda: f"{self.jobs} {go_on}; again within 3 s cancels {them}",
            lambda: f"cancelling {self.jobs}",
            self.cancel,
        )
        interrupts.listen()
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
            if interrupts.leaves() or (ended_at is not None and now > ended_at + _SETTLE_S):
                if (
                    asking is not None
                ):  # it may note an end, and cancel a job for it: not the one alone
                    await asyncio.wait({asking}, timeout=_LAST_ANSWER_S)
                return None
            if asking is None and now >= poll_at:
                asking, asked_at = _beside(self.ask), now
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
        """Return how it ended; None while it has not."""

    @abstractmethod
    def ask(self) -> float:
        """Ask the scheduler, in a thread; return how many seconds later to ask again."""

    @abstractmethod
    def cancel(self) -> None:
        """Cancel the jobs."""

    def show(self) -> None:
        """Show what is new."""

    def has_news(self) -> bool:
        """Return whether the scheduler should be asked at once."""
        return False

    async def take_answer(self) -> bool:
        """Take what the scheduler has said; return whether the jobs have ended, so that the result comes soon or never."""
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
        self.view: JobView | None = None  # what the scheduler said last
        self.jobs = f"job {job_id}"
        self._news = JobNews()
        self._follow = Follow(run_dir.events)
        self._attempts: set[int] = set()
        self._never = NeverWatch()
        self._lost: tuple[str, ...] = ()
        self._copy: RecordCopy | None = None  # of a run whose nodes don't see our files
        if object_dialect(dialect) is not None:
            from torchmuster.launcher.views.elsewhere import elsewhere

            self._copy = elsewhere().follow(run_dir, voice.say, self._show_line)

    def _show_line(self, line: str) -> None:
        """Show a line of the first pod's log: what its ranks print, and muster's own words."""
        if line.startswith(_OWN_WORDS):
            self.voice.print(line)
        else:
            self.voice.show(0, 1, line, 0)

    def close(self) -> None:
        """End what copies the record; of a run that is over nothing stays on its cluster."""
        if self._copy is not None:
            self._copy.close()

    def ended(self) -> Result | None:
        """Return the result, with what only the cluster knew."""
        result = settled_result(self.run_dir)
        return result if result is None or self._copy is None else self._copy.join(result)

    def cancel(self) -> None:
        """Cancel the job."""
        cancel_jobs(self.run_dir)

    def has_news(self) -> bool:
        """Return whether the copy of the record saw something end."""
        return self._copy is not None and self._copy.has_news()

    def ask(self) -> float:
        """Ask where the job stands, and end it if it can never start."""
        self._tell_where_it_stands()
        lost = lost_head(self.run_dir)
        if lost and lost != self._lost:
            self.voice.say(lost[0])
        self._lost = lost
        self._never.end_if_never(self.run_dir)
        return _POLL_S  # the desk asks ever less often

    async def take_answer(self) -> bool:
        """Return whether the job has ended; its record is copied meanwhile."""
        is_over = self.view is not None and self.view.state.is_final
        if self._copy is not None and is_over:
            return await asyncio.to_thread(self._copy.take_last_words)
        if self._copy is not None:
            await asyncio.to_thread(self._copy.look_after, self.view)
        return is_over

    def _tell_where_it_stands(self) -> None:
        view = view_newest(self.run_dir)
        link = describe_link(self.run_dir)
        if view is None:
            return
        self.view, self.jobs = view, f"job {view.job_id}"
        text = describe_job(view) + (f", {link}" if link is not None else "")
        if self._news.is_told(text, view, time.monotonic()):
            self.voice.say(text)

    def show(self) -> None:
        """Show what the run has noted and printed."""
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
