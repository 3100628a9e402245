"""Cache of what schedulers say about jobs, so that many viewers cause few questions.

All users share a scheduler: an answer is reused for 2 s, and for up to 30 s while it stays the
same. One command asks about all jobs of an engine.
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from torchmuster.core import proc
from torchmuster.errors import MusterError
from torchmuster.launcher.engines.base import Dialect, EngineError, NodeQuestion, object_dialect
from torchmuster.launcher.engines.wait_reasons import reasons_of
from torchmuster.launcher.model.job import JobState, JobView

FIRST_POLL_S, LAST_POLL_S = 2.0, 30.0
_GROWTH = 1.5
_MOST_REASON = 400  # characters: a refusal names the user, and then the right
_COMMAND_TIMEOUT_S = 30.0
_MOST_AT_ONCE = 8  # clusters
_MOST_IDS = 500  # on one command line
# What schedulers say about an id that they have forgotten; any other failure means that they don't
# know.
_FORGOTTEN = re.compile(
    r"invalid job id|unknown job|illegal job id|no such job|job has finished|job \S+ not found",
    re.IGNORECASE,
)
Ask = Callable[[Sequence[str]], proc.CommandOutput]


@dataclass(slots=True)
class _Known:
    view: JobView | None
    asked_at: float
    poll_s: float


def find_node_loss(question: NodeQuestion, job_id: str, node: str, ask: Ask) -> str | None:
    """Return the scheduler's words if it says that a node of a job is lost; else None."""
    for argv in question.argv_for(job_id, node):
        with contextlib.suppress(MusterError):
            answer = ask(argv)
            output = answer.stdout.decode(errors="replace") if answer.status == 0 else ""
            if (words := question.is_lost(output, node)) is not None:
                return words
    return None


def ask_scheduler(argv: Sequence[str]) -> proc.CommandOutput:
    """Run a scheduler's command for at most 30 s; see `limit_questions` for a shorter limit.

    Raises:
        MusterError: The command can't be executed.
    """
    return ask_patiently(argv, b"", _COMMAND_TIMEOUT_S)


# In a process that only shows state: the limit of a question, in seconds.
_QUESTION_LIMIT: list[float] = []
_SILENT: dict[tuple[str, ...], float] = {}  # silent clusters, and until when to skip them
_SILENT_S = 20.0


def limit_questions() -> None:
    """Limit this process's questions to 5 s each, and skip silent servers: it only shows state."""
    _QUESTION_LIMIT[:] = [5.0]


def has_limited_questions() -> bool:
    """Return whether this process only shows state."""
    return bool(_QUESTION_LIMIT)


def ask_patiently(argv: Sequence[str], data: bytes, limit_s: float) -> proc.CommandOutput:
    """Run a command with a time limit; a process that only shows state skips a silent server.

    Raises:
        MusterError: The command can't be executed.
    """
    if not _QUESTION_LIMIT:
        return proc.ask(argv, data, limit_s)
    # Commands without a context ask this machine's scheduler.
    server = tuple(word for word in argv if word.startswith("--context="))
    if _SILENT.get(server, 0.0) > time.monotonic():
        return proc.CommandOutput(status=None, stdout=b"", stderr=b"")
    said = proc.ask(argv, data, min(limit_s, *_QUESTION_LIMIT))
    if said.status is None:
        _SILENT[server] = time.monotonic() + _SILENT_S
    return said


class JobStatusCache:
    """Caches the scheduler's views of jobs and answers from the cache while they are fresh."""

    def __init__(self, ask: Ask = ask_scheduler, clock: Callable[[], float] = time.monotonic):
        self._ask = ask
        self._clock = clock
        self._known: dict[tuple[str, str], _Known] = {}
        self._asking = threading.Lock()  # later callers share the answer to the open question
        self._forgets = False
        self._news: dict[tuple[str, str], float] = {}

    def views(self, dialect: Dialect, job_ids: Sequence[str]) -> dict[str, JobView]:
        """Return the views of these jobs, without those that the scheduler has forgotten."""
        with self._asking:
            return self._views(dialect, job_ids)

    def _views(self, dialect: Dialect, job_ids: Sequence[str]) -> dict[str, JobView]:
        self._apply_marks()
        now = self._clock()
        keys = {job_id: (dialect.name, job_id) for job_id in job_ids}
        if any(self._is_stale(key, now) for key in keys.values()):
            ids = [*keys, *self._open_others(dialect, keys)]
            for first in range(0, len(ids), _MOST_IDS):
                part = ids[first : first + _MOST_IDS]
                found = ask_views(dialect, part, self._ask)
                for job_id in part:
                    self._learn((dialect.name, job_id), found.get(job_id), now)
        known = {job_id: self._known[key].view for job_id, key in keys.items()}
        return {job_id: view for job_id, view in known.items() if view is not None}

    def forget(self) -> None:
        """Ask again next time, because a job was changed. Never waits for an open question."""
        self._forgets = True

    def doubt(self, dialect: Dialect, job_ids: Sequence[str], since: float) -> None:
        """Ask again next time about jobs with news from `since`, unless asked after it.

        From then on they are polled often: pods change before their Job does. Never waits, like
        `forget`.
        """
        for job_id in job_ids:
            self._news[dialect.name, job_id] = since

    def _apply_marks(self) -> None:
        """Apply what `forget` and `doubt` have recorded."""
        if self._forgets:
            self._forgets = False
            self._known.clear()
        for key in list(self._news):
            since, known = self._news.pop(key), self._known.get(key)
            if known is not None and known.asked_at < since:
                known.asked_at, known.poll_s = float("-inf"), FIRST_POLL_S

    def _open_others(self, dialect: Dialect, ids: Container[str]) -> list[str]:
        """Return the other jobs that have not ended, to ask about all of them at once."""
        return [
            job_id
            for (name, job_id), known in self._known.items()
            if name == dialect.name and job_id not in ids
            if known.view is not None and not known.view.state.is_final
        ]

    def _is_stale(self, key: tuple[str, str], now: float) -> bool:
        known = self._known.get(key)
        return known is None or now - known.asked_at >= known.poll_s

    def _learn(self, key: tuple[str, str], view: JobView | None, now: float) -> None:
        known = self._known.get(key)
        is_same = known is not None and known.view == view
        poll_s = min(known.poll_s * _GROWTH, LAST_POLL_S) if known and is_same else FIRST_POLL_S
        self._known[key] = _Known(view=view, asked_at=now, poll_s=poll_s)


def ask_views(
    dialect: Dialect, job_ids: Sequence[str], ask: Ask = ask_scheduler
) -> dict[str, JobView]:
    """Ask a scheduler about jobs; those that need separate questions are asked for separately."""
    objects = object_dialect(dialect)
    if objects is None:
        return _ask_views(dialect, job_ids, ask)
    together: dict[str, list[str]] = {}
    for job_id in job_ids:
        together.setdefault(objects.apart(job_id), []).append(job_id)
    if len(together) == 1:
        return _ask_views(dialect, job_ids, ask)
    found: dict[str, JobView] = {}
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_MOST_AT_ONCE, "clusters") as pool:
        for views in pool.map(lambda ids: _ask_views(dialect, ids, ask), together.values()):
            found |= views
    return found


def _ask_views(dialect: Dialect, job_ids: Sequence[str], ask: Ask) -> dict[str, JobView]:
    """Ask a scheduler about jobs: one command for all, further ones only for jobs still unknown.

    If no command answers, the jobs are UNKNOWN, with the scheduler's message; jobs that it has
    forgotten are left out.
    """
    found: dict[str, JobView] = {}
    problems: list[str] = []
    has_answered = False
    commands = dialect.status_argv(job_ids)
    for position in range(len(commands)):
        missing = [i for i in job_ids if i not in found or found[i].state is JobState.UNKNOWN]
        if not missing:
            break
        if len(missing) < len(job_ids):
            commands = dialect.status_argv(missing)
        argv = commands[position]
        views, problem = _answer(dialect, argv, ask)
        has_answered = has_answered or problem is None
        if problem is not None:
            problems.append(problem)
        for job_id, view in views.items():
            known = found.get(job_id)
            if known is None or known.state is JobState.UNKNOWN:
                found[job_id] = view
    if problems and not has_answered:
        for job_id in job_ids:
            silent = JobView(job_id=job_id, state=JobState.UNKNOWN, reason=problems[0])
            found.setdefault(job_id, silent)
    return found


def _answer(
    dialect: Dialect, argv: Sequence[str], ask: Ask
) -> tuple[dict[str, JobView], str | None]:
    """Return the views from one command, and its failure, if any; a forgotten job is none."""
    try:
        said = ask(argv)
    except MusterError as error:  # a site without sacct
        return {}, f"`{argv[0]}` can't be started: {error.why or error.what}"
    stderr = said.stderr.decode(errors="replace").strip()
    try:
        # Some print the jobs that they know and an error about the others.
        views = dialect.views(_whole_answer(dialect, argv, said, ask))
        reasons = reasons_of(dialect)
        if reasons is not None:
            views = {job_id: reasons.explained(view) for job_id, view in views.items()}
    except EngineError as error:
        return {}, f"the answer of `{argv[0]}` can't be read: {error.why or error.what}"
    if said.status == 0 or _FORGOTTEN.search(stderr):
        return views, None
    if said.status is None:
        return (
            views,
            f"`{argv[0]}` did not answer within {min([_COMMAND_TIMEOUT_S, *_QUESTION_LIMIT]):g} s",
        )
    last = (stderr or f"exit code {said.status}").splitlines()[-1][:_MOST_REASON]
    objects = object_dialect(dialect)
    names_right = objects is None or "Forbidden" in stderr  # the message names the missing right
    hint = None if names_right or objects is None else objects.explain_refusal(stderr).hint
    return views, None if views else f"`{argv[0]}`: {last}" + (f"; {hint}" if hint else "")


def _whole_answer(dialect: Dialect, argv: Sequence[str], said: proc.CommandOutput, ask: Ask) -> str:
    """Return an answer, followed by the answers to the dialect's further questions about it."""
    text = said.stdout.decode(errors="replace")
    objects = object_dialect(dialect)
    if objects is None or said.status != 0:
        return text
    for more in objects.more_argv(argv, text):
        # E.g. events may be forbidden: the state is known without them.
        with contextlib.suppress(MusterError):
            answer = ask(more)
            text += answer.stdout.decode(errors="replace") if answer.status == 0 else ""
    return text
