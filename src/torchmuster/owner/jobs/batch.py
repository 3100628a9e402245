"""Follow a run that is a job: what it does from its run directory, where it stands from its scheduler."""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from torchmuster.engines.base import Dialect, object_dialect
from torchmuster.errors import MusterError
from torchmuster.files.layout import RunDir
from torchmuster.files.terminal import TerminalVoice
from torchmuster.model.job import JobView, describe_job
from torchmuster.model.plan import RunPlan, Tee
from torchmuster.model.record.events import AttemptStartedEvent
from torchmuster.model.verdict import Result
from torchmuster.owner.jobs.links import cancel_jobs, describe_link, settled_result, view_newest
from torchmuster.owner.jobs.never import NeverWatch
from torchmuster.owner.views.record import Follow
from torchmuster.owner.views.run_view import lost_head

if TYPE_CHECKING:
    from torchmuster.owner.pods.copy import RunCopy

_POLL_S = 1.0
_LOOK_S = 0.3
_SETTLE_S = 10.0  # from the job's end to its result: a shared file system may show it late
_SECOND_CTRL_C_S = 3.0
_OWN_WORDS = ("muster: ", "error: ", "  at: ", "  because: ", "hint: ")
_SAY_EVERY_S = 10.0  # of the same wait, whose parts change
_SILENT_S = 5.0


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


def _beside(work: Callable[[], None]) -> asyncio.Future[None]:
    """Work in a thread which nothing waits for at the end: a scheduler may be silent for a minute."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if not done.cancelled():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        error: Exception | None = None
        try:
            work()
        except Exception as found:  # noqa: BLE001 - it is raised where the answer is wanted
            error = found
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, error)

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


@dataclass(slots=True)
class JobFollower:
    """Shows what a job does, from its run directory and its scheduler, until it has a result."""

    plan: RunPlan
    run_dir: RunDir
    dialect: Dialect
    job_id: str
    voice: TerminalVoice
    _view: JobView | None = None
    _news: JobNews = field(default_factory=JobNews)
    _follow: Follow = field(init=False)
    _attempts: set[int] = field(default_factory=set)
    _never: NeverWatch = field(default_factory=NeverWatch)
    _copy: "RunCopy | None" = None
    _lost: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Copy the record of a run whose nodes don't see our files."""
        self._follow = Follow(self.run_dir.events)
        if object_dialect(self.dialect) is not None:
            from torchmuster.owner.pods.copy import RunCopy

            self._copy = RunCopy.of(self.run_dir, self.voice.say, self._show_line)

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

    async def follow(self) -> Result | None:
        """Return the result; None when the job continues without us, or ended without one."""
        interrupts = TwiceCancels(
            self.voice,
            lambda: f"job {self.job_id} continues; again within 3 s cancels it",
            lambda: f"cancelling job {self.job_id}",
            partial(cancel_jobs, self.run_dir),
        )
        interrupts.listen()
        poll_at, ended_at = 0.0, None
        asking: asyncio.Future[None] | None = None
        while True:
            self._show_news()
            result = settled_result(self.run_dir)
            if result is not None:
                self._show_news()
                return result if self._copy is None else self._copy.join(result)
            now = time.monotonic()
            if self._copy is not None and self._copy.has_news():
                poll_at = now
            if interrupts.leaves() or (ended_at is not None and now > ended_at + _SETTLE_S):
                return None
            if asking is None and now >= poll_at:
                asking, asked_at, is_said = _beside(self._ask_scheduler), now, False
            if asking is not None and not asking.done() and not is_said:
                is_said = now > asked_at + _SILENT_S
                if is_said:
                    name = self.dialect.name
                    self.voice.say(
                        f"{name} does not answer: what the run prints is shown all the same"
                    )
            if asking is not None and asking.done():
                asking.result()  # the desk asks ever less often
                asking, poll_at = None, time.monotonic() + _POLL_S
                is_over = self._view is not None and self._view.state.is_final
                if self._copy is not None and is_over:
                    is_over = await asyncio.to_thread(self._copy.take_last_words)
                elif self._copy is not None:
                    await asyncio.to_thread(self._copy.look_after, self._view)
                ended_at = (ended_at or time.monotonic()) if is_over else None
            await asyncio.sleep(_LOOK_S)

    @property
    def view(self) -> JobView | None:
        """Return what the scheduler said last."""
        return self._view

    def _ask_scheduler(self) -> None:
        self._tell_where_it_stands()
        lost = lost_head(self.run_dir)
        if lost and lost != self._lost:
            self.voice.say(lost[0])
        self._lost = lost
        self._never.end_if_never(self.run_dir)

    def _tell_where_it_stands(self) -> None:
        view = view_newest(self.run_dir)
        link = describe_link(self.run_dir)
        if view is None:
            return
        self._view, self.job_id = view, view.job_id
        text = describe_job(view) + (f", {link}" if link is not None else "")
        if self._news.is_told(text, view, time.monotonic()):
            self.voice.say(text)

    def _show_news(self) -> None:
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
