"""Continue a job's run in another job: by requeue, by a new job, or in the next job of a chain."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchmuster.core import proc
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.links import Link, Links, ResubmitMethod
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Result
from torchmuster.core.owner.record import read_result
from torchmuster.errors import MusterError, UsageError
from torchmuster.launcher.engines.base import Dialect, EngineError, Refusal
from torchmuster.launcher.engines.schedulers import facts_of
from torchmuster.launcher.jobs import jobs
from torchmuster.launcher.model.job import AfterKind, JobDependency, JobRequest
from torchmuster.launcher.model.run import record_of

QUICK_TIMEOUT_S = 3.0
COMMAND_TIMEOUT_S = 8.0  # the job itself has only seconds left
# The submit command would read these variables of the job as options for the new job.
_OF_LAUNCHERS = ("PMI_", "PMIX_")
Ask = Callable[[list[str]], proc.CommandOutput]


def ask_command(argv: list[str]) -> proc.CommandOutput:
    """Run a scheduler's command for at most 8 s.

    Raises:
        MusterError: The command can't be executed.
    """
    return proc.ask(argv, b"", COMMAND_TIMEOUT_S)


def ask_quickly(argv: list[str]) -> proc.CommandOutput:
    """Run a scheduler's command for at most 3 s, because a run waits for it.

    Raises:
        MusterError: The command can't be executed.
    """
    return proc.ask(argv, b"", QUICK_TIMEOUT_S)


def ask_spared(argv: list[str]) -> proc.CommandOutput:
    """Do the same, safely for any thread of an owner, which kills its other child processes.

    Raises:
        MusterError: The command can't be executed.
    """
    return proc.ask_spared(argv, QUICK_TIMEOUT_S)


def find_end(
    dialect: Dialect, job_id: str, clock: Callable[[], float], ask: Ask = ask_quickly
) -> float | None:
    """Ask the scheduler when a job must end (seconds since 1970); None if it doesn't say."""
    for argv in dialect.end_argv(job_id):
        try:
            answer = ask(argv)
        except MusterError:
            continue
        if answer.status == 0:
            end = dialect.job_end(answer.stdout.decode(errors="replace"), clock())
            if end is not None:
                return end
    return None


_TRY_EVERY_S, _TRY_LATER_S = 5.0, 60.0


@dataclass(slots=True)
class Chain:
    """The links of one run, seen from the newest one.

    Attributes:
        num_resubmits: How many further jobs the run may use.
        way: The method to try first; None for the scheduler's preferred one.
    """

    run_dir: RunDir
    dialect: Dialect
    job_id: str
    num_resubmits: int = 0
    way: ResubmitMethod | None = None
    ask: Ask = ask_command
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    links: Links = field(default_factory=Links)
    _is_in_doubt: bool = False

    def begin(self, first_attempt: int) -> str | None:
        """Record this job as the run's newest link; return a sentence if nothing is left to do."""
        links = jobs.read_links(self.run_dir) or Links()
        newest = links.newest
        if jobs.is_cancelled(self.run_dir):
            return "the run was cancelled: nothing is left to do"
        is_new = newest is None or newest.job_id != self.job_id
        result = read_result(self.run_dir)
        if newest is not None and result is not None and _is_complete(result, links, is_new=is_new):
            return f"the run is complete ({result.state.value}): nothing is left to do"
        known = links.links
        if is_new:
            way = ResubmitMethod.CHAIN if known else None
            known += (Link(job_id=self.job_id, way=way, first_attempt=first_attempt),)
        self._note(Links(most=self.num_resubmits + 1, links=known))
        return None

    @property
    def has_link_left(self) -> bool:
        """Return whether another link may follow."""
        return len(self.links.links) < self.links.most

    def go_on(
        self,
        result: Result,
        *,
        time_was_up: bool,
        say: Callable[[str], None],
        pause: Callable[[float], bool] = lambda _: False,
    ) -> bool:
        """Continue a run that ran out of time or lost a node, or record why it ends.

        Return whether it continues.

        Args:
            result: The result of this link.
            time_was_up: Whether the job's time limit ended it.
            say: Shows a sentence to the user.
            pause: Waits so many seconds before the next try; returns False if there is no time for
                one.
        """
        wanted = time_was_up or result.node_was_lost
        if result.state is not RunState.PREEMPTED or not wanted:
            self._note(replace(self.links, ended=result.state.value))
            return False
        if jobs.is_cancelled(self.run_dir):
            self._note(replace(self.links, ended="cancelled"))
            return False
        if not self.num_resubmits and result.node_was_lost and self._requeues(say):
            return True
        if not self.has_link_left:
            if self.num_resubmits:
                say(f"{self.links.label} has ended, and --resubmit {self.num_resubmits} is spent")
            self._note(replace(self.links, ended="no link is left"))
            return False
        ways = dict.fromkeys((self.way, *self.dialect.resubmit_methods))
        pause_s, shown = _TRY_EVERY_S, set[str]()
        while True:
            is_away = False
            for way in filter(None, ways):
                why = self._try(way, result.attempts)
                if why is None:
                    newest = self.links.newest
                    job_id = newest.job_id if newest is not None else self.job_id
                    say(f"the run continues: {self.links.label} is job {job_id}, by {way.value}")
                    return self._unless_cancelled(say)
                sentence = f"the run can't continue by {way.value}: {why}"
                if sentence not in shown:
                    shown.add(sentence)
                    say(sentence)
                is_away = is_away or self._is_unreachable(why)
            # A server may be away for a minute; one that may have got a job must not get another.
            if self._is_in_doubt or not is_away or not pause(pause_s):
                self._note(replace(self.links, ended="no way to continue"))
                return False
            if jobs.is_cancelled(self.run_dir):
                self._note(replace(self.links, ended="cancelled"))
                return False
            pause_s = min(2 * pause_s, _TRY_LATER_S)

    def _is_unreachable(self, why: str) -> bool:
        """Return whether the message says that the scheduler was not reached: then try again."""
        known: Sequence[Refusal] = getattr(self.dialect, "refusals", ())
        return any(one.is_away and re.search(one.pattern, why, re.IGNORECASE) for one in known)

    def _requeues(self, say: Callable[[str], None]) -> bool:
        """Requeue a job that has lost a node, as the same link, if its scheduler always does so."""
        if self.dialect.resubmit_methods[:1] != (ResubmitMethod.REQUEUE,):
            return False
        try:
            self._requeue()
        except MusterError as error:
            say(f"job {self.job_id} can't be requeued: {error.why or error.what}")
            return False
        name = self.dialect.name
        say(
            f"job {self.job_id} has lost a node for good: it is requeued, as {name} does with a job that has no muster in it"
        )
        return True

    def _try(self, way: ResubmitMethod, first_attempt: int) -> str | None:
        """Make the next link; return why it was refused, or None."""
        before = self.links
        if way is not ResubmitMethod.CHAIN and way not in self.dialect.resubmit_methods:
            return f"{self.dialect.name} does not support it"
        try:
            if way is ResubmitMethod.REQUEUE:
                # Record it first: the job may be ended while the command still runs.
                self._append(self.job_id, way, first_attempt)
                self._requeue()
            elif way is ResubmitMethod.SUBMIT:
                self._append(self._submit(), way, first_attempt)
            else:
                self._append(self._next_of_chain(), way, first_attempt)
        except MusterError as error:
            if self.links is not before:
                self._note(before)
            return error.why or error.what
        return None

    def _next_of_chain(self) -> str:
        chain = jobs.read_chain(self.run_dir)
        position = chain.index(self.job_id) + 1 if self.job_id in chain else len(chain)
        if position >= len(chain):
            raise EngineError("no job of the chain is left")
        return chain[position]

    def _submit(self) -> str:
        """Submit the script again; the new job waits for this one's end and uses its folder."""
        after = JobDependency(job_id=self.job_id, kind=AfterKind.ANY)
        name = os.path.basename(self.run_dir.path)
        job = JobRequest(
            name=name, chunks=(), head=(), log_path=self.run_dir.job_log, after=(after,)
        )
        argv = self.dialect.submit_argv(job, self.run_dir.job_script)
        return self.dialect.job_id(self._command([*self._outside(), *argv]))

    def _requeue(self) -> None:
        """Requeue this job.

        A command that a signal ended without output has succeeded: it ended with the job.
        """
        answer = self.ask(self.dialect.requeue_argv(self.job_id))
        was_ended = answer.status is not None and answer.status < 0 and not answer.stderr.strip()
        if not was_ended:
            self._judge(answer)

    def _outside(self) -> list[str]:
        facts = facts_of(self.dialect)
        begins = (*facts.variables, *_OF_LAUNCHERS)
        names = (name for name in self.environment if name.startswith(begins))
        return [
            "env",
            *(f"--unset={name}" for name in sorted(names) if name not in facts.variables_of_users),
        ]

    def _command(self, argv: list[str]) -> str:
        return self._judge(self.ask(argv))

    def _judge(self, answer: proc.CommandOutput) -> str:
        if answer.status != 0:
            self._is_in_doubt = answer.status is None
            lines = answer.stderr.decode(errors="replace").strip().splitlines()
            silent = "no answer in time" if answer.status is None else "it printed nothing"
            raise EngineError("refused", why=lines[-1][:200] if lines else silent)
        return answer.stdout.decode(errors="replace")

    def _unless_cancelled(self, say: Callable[[str], None]) -> bool:
        """Return True; if the user has cancelled the run, cancel its new job and return False."""
        newest = self.links.newest
        if newest is None or not jobs.is_cancelled(self.run_dir):
            return True
        try:
            jobs.cancel_job(self.dialect, newest.job_id)
        except MusterError as error:
            say(f"job {newest.job_id} can't be cancelled: {error.why or error.what}")
        self._note(replace(self.links, ended="cancelled"))
        return False

    def _append(self, job_id: str, way: ResubmitMethod, first_attempt: int) -> None:
        link = Link(job_id=job_id, way=way, first_attempt=first_attempt)
        self._note(replace(self.links, links=(*self.links.links, link)))

    def _note(self, links: Links) -> None:
        self.links = links
        jobs.write_links(self.run_dir, links)


def restarts_spent(run_dir: RunDir, max_restarts: int) -> int:
    """Return how many restarts a run's earlier attempts have spent: a chain has one budget."""
    failures = (one.failure for one in record_of(run_dir).attempts if one.failure is not None)
    left = [one.restarts_left for one in failures if one.restarts_left is not None]
    return min(max(max_restarts - min(left, default=max_restarts), 0), max_restarts)


def parse_method(text: str | None) -> ResubmitMethod | None:
    """Return the method with this name.

    Raises:
        UsageError: There is no such method.
    """
    words = [way.value for way in ResubmitMethod]
    if text is not None and text not in words:
        raise UsageError(f"`{text}` is not a way to continue", fix=f"one of {', '.join(words)}")
    return ResubmitMethod(text) if text is not None else None


def _is_complete(result: Result, links: Links, *, is_new: bool) -> bool:
    """Return whether nothing may follow this result; after a requeue, only a success is final.

    For example, PBS starts a job again when it believes the host dead, even if the script has just
    ended.
    """
    if result.state is RunState.SUCCEEDED:
        return True
    return is_new and (result.state is RunState.FAILED or links.ended is not None)
