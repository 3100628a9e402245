"""Find runs, and check whether they are alive."""

import glob
import heapq
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torchmuster.core import plugs, proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import Kind, RunDir, member_of_id, runs_dir, short_id
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import did_you_mean, few_of
from torchmuster.core.model.verdict import Result
from torchmuster.core.owner.record import (
    DAMAGED,
    changed_at,
    read_events,
    read_losses,
    read_plan,
    read_result,
    unreadable,
)
from torchmuster.errors import ChannelError, NotFoundError
from torchmuster.launcher.model.job import JobView
from torchmuster.launcher.model.run import RunRecord, record_of
from torchmuster.launcher.views.elsewhere import elsewhere, is_elsewhere
from torchmuster.launcher.views.run_view import RunView, SessionRun, submitted_at

if TYPE_CHECKING:
    from torchmuster.launcher.engines.base import Dialect

ViewOfKind = Callable[[RunDir, RunRecord], RunView]
ReadResult = Callable[[RunDir], Result | None]

_MOST_CANDIDATES = 5  # shown for an ambiguous word
_SLOT = re.compile(r"-session-sweep-[0-9a-f]{6}-\d+-[0-9a-f]{4}$")  # held by a sweep on hosts


def all_runs() -> list[RunView]:
    """Return all runs, oldest submission first.

    Raises:
        NotFoundError: The folder of all runs can't be read.
    """
    folders = all_dirs()
    ask_for_all(folders)
    views = [view_run(folder) for folder in folders]
    return sorted(views, key=lambda view: view.submitted)


def all_dirs() -> list[RunDir]:
    """Return the folders of all runs; none before the first run.

    Raises:
        NotFoundError: The folder of all runs can't be read.
    """
    return [RunDir(os.path.join(runs_dir(), name)) for name in _names()]


def newest_and_open(most: int) -> list[RunView]:
    """Return the user's last `most` runs, preceded by all older ones that have not ended.

    Of the runs that have ended, only the last are read, since there may be thousands.

    Raises:
        NotFoundError: The folder of all runs can't be read.
    """
    ended: list[RunDir] = []
    folders: list[RunDir] = []
    for folder in filter(_is_of_user, all_dirs()):
        (ended if _has_ended(folder) else folders).append(folder)
    ask_for_all(folders)
    views = sorted(map(view_run, folders + _last(ended, most)), key=lambda view: view.submitted)
    first = max(0, len(views) - most)
    return [view for place, view in enumerate(views) if place >= first or not view.state.is_final]


def _last(folders: Iterable[RunDir], most: int) -> list[RunDir]:
    """Return the last `most` by submission, which is never after the folder's last change."""
    newest: list[tuple[float, str]] = []
    changed = ((changed_at(folder.path) or 0.0, folder.path) for folder in folders)
    for last_change, path in sorted(changed, reverse=True):
        if len(newest) == most and last_change <= newest[0][0]:
            break
        heapq.heappush(newest, (_submitted(RunDir(path)), path))
        if len(newest) > most:
            heapq.heappop(newest)
    return [RunDir(path) for _, path in sorted(newest)]


def _has_ended(run_dir: RunDir) -> bool:
    """Return whether a run has its final result: a further link may replace that of a job."""
    return os.path.isfile(run_dir.result) and not run_dir.has_jobs


def _names() -> list[str]:
    try:
        with os.scandir(runs_dir()) as entries:
            return sorted(e.name for e in entries if e.name[0] != "." and e.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise NotFoundError(
            "the folder of all runs can't be read",
            where=runs_dir(),
            why=error.strerror,
            fix="is MUSTER_HOME your own? other users' runs are private",
        ) from error


def _submitted(run_dir: RunDir) -> float:
    first = next(read_events(run_dir.events), None)
    return submitted_at(run_dir, first.at if first is not None else None)


def _is_of_user(run_dir: RunDir) -> bool:
    """Return whether the user started it: not a sweep's slot, nor a start that was refused."""
    if _SLOT.search(run_dir.path):
        return False
    began = (run_dir.events, run_dir.job, run_dir.jobs, run_dir.arrays, run_dir.workflow)
    if any(map(os.path.exists, began)):
        return True
    result = atomic.read_json(run_dir.result)
    return not isinstance(result, dict) or result.get("attempts") != 0


def ask_for_all(folders: Sequence[RunDir]) -> None:
    """Ask each scheduler once about all runs that have not ended; views use the cache."""
    batch = [f for f in folders if os.path.isfile(f.job) or os.path.isfile(f.jobs)]
    if not batch:
        return  # the usual case costs no import
    from torchmuster.launcher.jobs.answers import limit_questions
    from torchmuster.launcher.jobs.jobs import open_jobs, read_jobs, view_jobs

    asked: dict[str, tuple[Dialect, list[str]]] = {}
    for folder in batch:
        job, jobs = open_jobs(folder), read_jobs(folder)
        if job is not None and read_result(folder) is None:
            asked.setdefault(job[0].name, (job[0], []))[1].extend(job[1])
        if jobs is not None:
            dialect, ids = jobs
            open_ids = [
                i for name, i in ids.items() if atomic.read_json(folder.group(name).result) is None
            ]
            asked.setdefault(dialect.name, (dialect, []))[1].extend(open_ids)
    limit_questions()
    for dialect, job_ids in asked.values():
        view_jobs(dialect, job_ids)


def look_at(word: str) -> RunView:
    """Return the run that a word names, as `find_run` does, but wait for its cluster only briefly.

    Raises:
        NotFoundError: No run matches, or several do.
    """
    from torchmuster.launcher.jobs.answers import limit_questions

    limit_questions()
    return find_run(word)


class SeveralRunsError(NotFoundError):
    """A word matches several runs."""


def find_run(word: str) -> RunView:
    """Return the run that a word names: a run id, a path, an unambiguous part of an id, or `last`.

    `last` is the run that was submitted last, even if it still waits in a queue. `NAME.7` is a
    member of a sweep, `NAME/TASK` the last training of a workflow's task.

    Raises:
        NotFoundError: No run matches, or several do.
    """
    if os.sep in word and is_run(RunDir(word)):
        return _view_found(RunDir(os.path.abspath(word)))
    exact = os.path.join(runs_dir(), word)
    if os.sep not in word and word not in ("", ".", "..") and os.path.isdir(exact):
        return _view_found(RunDir(exact))
    names = _names()
    if word == "last" and (newest := _last(filter(_is_of_user, all_dirs()), 1)):
        return _view_found(newest[0])  # without a question to a scheduler
    matching = [name for name in names if short_id(name) == word]
    # A name given with --name wins over a part of another name.
    matching = matching or _last_of_restarts(
        [name for name in names if short_id(name).rpartition("-")[0] == word != ""]
    )
    parts = (name for name in names if not _SLOT.search(name))
    matching = matching or [name for name in parts if word and word in name]
    if len(matching) == 1:
        return _view_found(RunDir(os.path.join(runs_dir(), matching[0])))
    if matching:
        fix = f"one of: {few_of(reversed(_as_typed(matching)), _MOST_CANDIDATES)}"
        raise SeveralRunsError(f"`{word}` names {len(matching)} runs", where=runs_dir(), fix=fix)
    if (part := _member_dir(word) or _training_dir(word)) is not None:
        return _view_found(part)
    if (found := _on_clusters(word)) is not None:
        return _view_found(found)
    as_typed = [short_id(name) for name in reversed(names)]
    stems = Counter(name.rpartition("-")[0] for name in as_typed)  # as of --name
    ours = [stem for stem, number in stems.items() if number == 1]
    near = did_you_mean(word, [*as_typed, *ours, *names], "`muster ps` lists the runs")
    raise NotFoundError(f"there is no run `{word}`", where=runs_dir(), fix=near)


def _whole_named(word: str) -> RunView | None:
    """Return the run whose part is named; None if there is none.

    Raises:
        SeveralRunsError: Several runs match.
    """
    try:
        return find_run(word)
    except SeveralRunsError:
        raise
    except NotFoundError:
        return None


def _member_dir(word: str) -> RunDir | None:
    """Return the folder of a sweep's member: `NAME.7`, with any word for the sweep; else None.

    Raises:
        NotFoundError: The sweep has no such member, or the member has not begun.
    """
    named = member_of_id(word)
    view = _whole_named(named[0]) if named is not None else None
    return view.member(named[1]) if view is not None and named is not None else None


def _training_dir(word: str) -> RunDir | None:
    """Return the folder of a task's training, by `NAME/TASK` or its own id; None if none is named.

    Raises:
        NotFoundError: The workflow has no such training.
    """
    name, _, task = word.rpartition("/")
    if not name:
        folders = RunDir(os.path.join(glob.escape(runs_dir()), "*")).training_folder("*", 0)
        ending = ("*" if short_id(word) == word else "") + glob.escape(word)
        found = glob.glob(os.path.join(os.path.dirname(folders), "attempt-*", ending))
        return RunDir(found[0]) if len(found) == 1 and is_run(RunDir(found[0])) else None
    view = _whole_named(name)
    return view.training(task) if view is not None else None


def _last_of_restarts(names: list[str]) -> list[str]:
    """Return only the last run if all share their snapshots, as restarts do; else all."""
    homes = {os.path.realpath(RunDir(os.path.join(runs_dir(), name)).snapshots) for name in names}
    return names[-1:] if len(homes) == 1 else names


def _on_clusters(word: str) -> RunDir | None:
    """Return the folder, created here, of a run from another machine; None if no cluster has it."""
    from torchmuster.launcher.spec.site_files import project_file, user_file

    if not (user_file(os.environ) or project_file(os.getcwd())):
        return None  # without a site file there is no cluster to ask
    return elsewhere().find(word)


def _view_found(run_dir: RunDir) -> RunView:
    """Return the view of one run; update the copy of one in pods, which is too slow for lists."""
    if is_elsewhere(run_dir):
        elsewhere().catch_up(run_dir)
    return view_run(run_dir)


def _as_typed(names: list[str]) -> list[str]:
    """Return the short id of each run, or its whole id where two share the short one."""
    num_of = Counter(map(short_id, names))
    return [name if num_of[short_id(name)] > 1 else short_id(name) for name in names]


def is_run(run_dir: RunDir) -> bool:
    """Return whether a folder is a record that muster has written."""
    return run_dir.kind is not None


def view_run(run_dir: RunDir, record: RunRecord | None = None) -> RunView:
    """Return the state of a run directory; pass `record` if it has been read already."""
    record = record_of(run_dir) if record is None else record
    try:
        return replace(_view(run_dir, record), record=record, losses=read_losses(run_dir))
    except DAMAGED as error:  # one bad record must not break the list of all runs
        return RunView(
            run_id=os.path.basename(run_dir.path),
            run_dir=run_dir,
            state=RunState.UNKNOWN,
            plan=None,
            result=None,
            problem=unreadable(error),
        )


def _view(run_dir: RunDir, record: RunRecord) -> RunView:
    kind = run_dir.kind or Kind.RUN
    view: ViewOfKind = plugs.find("kinds", f"{kind.value} view")
    if view is None:
        raise LookupError(f"the room of {kind.value}s is not here")
    return view(run_dir, record)


def view_of_run(run_dir: RunDir, record: RunRecord) -> RunView:
    """Return the state of a run or a session."""
    result, plan = _settled_result(run_dir), read_plan(run_dir)
    cls = SessionRun if plan is not None and plan.is_session else RunView
    return cls(
        run_id=os.path.basename(run_dir.path),
        run_dir=run_dir,
        state=result.state if result is not None else _state(run_dir, record),
        plan=plan,
        result=result,
    )


def _settled_result(run_dir: RunDir) -> Result | None:
    result = read_result(run_dir)
    if result is None or not os.path.isfile(run_dir.job):
        return result  # the usual case costs no import
    from torchmuster.launcher.jobs.jobs import settled_result

    return settled_result(run_dir)


def _state(run_dir: RunDir, record: RunRecord) -> RunState:
    if os.path.isfile(run_dir.job):
        job = view_job(run_dir)
        state = job.state.of_run if job is not None else RunState.UNKNOWN
        if state is not RunState.RUNNING:
            return state
    elif (element_state := _state_of_element(run_dir)) is not None:
        if element_state is not RunState.RUNNING:
            return element_state
    elif not owner_lives(run_dir):
        return RunState.LOST
    if record.attempts:
        return RunState.RUNNING
    return RunState.WAITING if record.has_waited else RunState.STARTING


def _state_of_element(run_dir: RunDir) -> RunState | None:
    """Return the state of a sweep's member in an array or in pods; None for any other run."""
    sweep_dir = RunDir(os.path.dirname(os.path.dirname(run_dir.path)))
    named = member_of_id(os.path.basename(run_dir.path))
    if named is None:
        return None
    is_in_pods = sweep_dir.kind is Kind.SWEEP and os.path.isfile(sweep_dir.job)
    if not is_in_pods and not os.path.isfile(sweep_dir.arrays):
        return None
    return view_run(sweep_dir).member_state(named[1])


def owner_is_here(run_dir: RunDir) -> bool:
    """Return whether the owner of the run is a living process of this machine."""
    owner = atomic.read_json(run_dir.owner)
    if not isinstance(owner, dict) or owner.get("boot_id") != proc.boot_id():
        return False
    return owner_lives(run_dir)


def owner_is_on(view: RunView, ssh: str, command: str) -> ChannelError:
    """Return the error for a run whose owner is on another machine, where a command would help."""
    owner = atomic.read_json(view.run_dir.owner)
    host = owner.get("host", "another machine") if isinstance(owner, dict) else "nowhere"
    what = f"the owner of the run {view.run_id} is on {host}"
    return ChannelError(what, fix=f"{ssh} {host} muster {command}")


def owner_lives(run_dir: RunDir) -> bool:
    """Return whether the owning process or job still exists; on another machine, assume so."""
    if os.path.isfile(run_dir.job):  # a job that the scheduler has forgotten has ended
        job = view_job(run_dir)
        return job is not None and not job.state.is_final
    if os.path.isfile(run_dir.jobs):  # even if other files are damaged
        view: ViewOfKind | None = plugs.find("kinds", "workflow view")
        return view is not None and not view(run_dir, RunRecord()).state.is_final
    if os.path.isfile(run_dir.arrays):
        return not view_run(run_dir).state.is_final
    return owner_process_lives(run_dir)


def read_jobs_of(run_dir: RunDir) -> tuple[str, tuple[str, ...]] | None:
    """Return the engine and all submitted jobs of a run, a workflow or a sweep, even ended ones.

    A run whose submission was refused has an engine and no job.
    """
    arrays = atomic.read_json(run_dir.arrays)
    if isinstance(arrays, dict):
        return str(arrays["engine"]), tuple(str(one["job_id"]) for one in arrays["arrays"])
    if not os.path.isfile(run_dir.job) and not os.path.isfile(run_dir.jobs):
        return None  # the usual case costs no import
    from torchmuster.launcher.jobs.jobs import all_jobs, read_jobs

    if (one := all_jobs(run_dir)) is not None:
        return one[0].name, one[1]
    refused = atomic.read_json(run_dir.job)
    if isinstance(refused, dict) and "engine" in refused:
        return str(refused["engine"]), ()
    many = read_jobs(run_dir)
    return (many[0].name, tuple(many[1].values())) if many is not None else None


def view_job(run_dir: RunDir) -> JobView | None:
    """Return the scheduler's view of a run's job; None without a job or an answer."""
    from torchmuster.launcher.jobs.jobs import view_newest

    return view_newest(run_dir)


def any_result(run_dir: RunDir) -> Result | None:
    """Return the result of a run, a workflow or a sweep; None while it has none."""
    if os.path.isfile(run_dir.job):
        return _settled_result(run_dir)  # a link of a chain may follow
    if os.path.isfile(run_dir.jobs) or os.path.isfile(run_dir.arrays):
        return view_run(run_dir).result  # no process owns it that could write one
    kind = run_dir.kind or Kind.RUN
    read: ReadResult = plugs.find("kinds", f"{kind.value} result") or read_result
    return read(run_dir)


def owner_process_lives(run_dir: RunDir) -> bool:
    """Say whether the recorded owner process still exists; on another machine, assume so."""
    owner = atomic.read_json(run_dir.owner)
    if not isinstance(owner, dict):
        return False
    if owner.get("boot_id") != proc.boot_id():
        return owner.get("host") != socket.gethostname()
    facts = proc.read_process(int(owner.get("pid", -1)))
    return facts is not None and facts.can_run and facts.start_ticks == owner.get("start_ticks")
