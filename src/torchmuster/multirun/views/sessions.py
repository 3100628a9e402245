"""Find the sessions of this user, and which of them are alive."""

import os
import re
import shlex
import time
from dataclasses import dataclass, replace

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, runs_dir
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.text import did_you_mean
from torchmuster.core.owner.record import read_plan
from torchmuster.errors import ChannelError, MusterError, NotFoundError, UsageError
from torchmuster.launcher.model.run import record_of
from torchmuster.launcher.views.find import owner_process_lives
from torchmuster.multirun.engine import HeldSession
from torchmuster.multirun.server import messages
from torchmuster.multirun.server.call import SESSION_FILE, ask, read_setup, server_file

PREFIX = "session-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")  # 40 with the prefix, as for a run
_STEM = re.compile(r"\d{8}-\d{6}-session-(.+)-[0-9a-f]{4}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """A session as its run directory and its servers show it.

    Attributes:
        state: The state of its first node's server; None if that does not answer.
        is_open: Whether all servers have opened, so that runs can begin.
        where: Its nodes, in words.
    """

    setup: messages.SessionSetup
    run_dir: RunDir
    state: messages.SessionServerState | None
    is_open: bool
    where: str = "this machine"


def lives(run_dir: RunDir) -> bool:
    """Return whether a session has an owner and no result; assume that an owner elsewhere lives."""
    if os.path.exists(run_dir.result):
        return False
    return owner_process_lives(run_dir) or (os.path.isfile(run_dir.job) and _job_lives(run_dir))


def _job_lives(run_dir: RunDir) -> bool:
    from torchmuster.launcher.views.find import (
        owner_lives,  # imported here: a run in a session on this machine does not need it
    )

    return owner_lives(run_dir)


def session_dirs(name: str | None = None) -> list[RunDir]:
    """Return the run directories of all sessions, or those with this name, newest first."""
    try:
        entries = sorted(os.listdir(runs_dir()), reverse=True)
    except OSError:
        return []
    found = []
    for entry in entries:
        match = _STEM.match(entry)
        if match is not None and name in (None, match[1]):
            path = os.path.join(runs_dir(), entry)
            if os.path.isfile(os.path.join(path, SESSION_FILE)):
                found.append(RunDir(path))
    return found


def living_sessions() -> list[RunDir]:
    """Return the run directories of the live sessions, newest first."""
    plans = ((one, read_plan(one)) for one in session_dirs() if lives(one))
    known = ((one, plan) for one, plan in plans if plan is not None)
    return [one for one, plan in known if plan.engine == "local" or _job_is_alive(one, plan)]


def name_of_session(run_dir: RunDir) -> str:
    """Return the session's name, from the name of its folder."""
    match = _STEM.match(os.path.basename(run_dir.path))
    return match[1] if match is not None else ""


def check_name(name: str) -> None:
    """Check that a new session can have this name.

    Raises:
        UsageError: The name is not valid, or a live session has it.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"`{name}` is not a valid name for a session",
            where=f"--name {shlex.quote(name)}",
            why="it is part of a folder's name",
            fix="a letter or digit, then up to 31 letters, digits, `.`, `_` and `-`",
        )
    taken = next((one for one in living_sessions() if name_of_session(one) == name), None)
    if taken is not None:
        raise UsageError(
            f"there is a session `{name}` already",
            where=taken.path,
            fix=f"muster run --session {name} SCRIPT, muster session end {name}, or another --name",
        )


def find_session(name: str) -> HeldSession:
    """Return the live session with this name.

    Raises:
        NotFoundError: There is no such session, or it has ended.
    """
    folders = session_dirs(name)
    newest = next((one for one in folders if lives(one)), None)
    if newest is not None:
        return HeldSession(name=name, run_dir=newest, lives=lambda: lives(newest))
    if folders:
        over = os.path.exists(folders[0].result)
        why = "its result is recorded" if over else "its owner has gone without a result"
        raise NotFoundError(
            f"the session {name} has ended",
            where=folders[0].path,
            why=why,
            fix=f"muster session start --name {name}",
        )
    known = [name_of_session(one) for one in living_sessions()]
    hint = did_you_mean(name, known, f"muster session start --name {name}")
    raise NotFoundError(f"there is no session `{name}`", where=runs_dir(), fix=hint)


def plan_of(run_dir: RunDir) -> RunPlan:
    """Return the plan of the run that is a session.

    Raises:
        ChannelError: The plan can't be read.
    """
    plan = read_plan(run_dir)
    if plan is None:
        raise ChannelError("the plan of the session can't be read", where=run_dir.plan)
    return plan


def why_gone(held: HeldSession, error: ChannelError) -> ChannelError:
    """Return the error for a session that can't be reached; it names the session's end if known."""
    plan = plan_of(held.run_dir)
    over = None
    if os.path.exists(held.run_dir.result):
        over = "its result is recorded"
    elif plan.engine != "local" and not _job_is_alive(held.run_dir, plan):
        over = f"the job of its nodes is over ({plan.engine})"
    if over is None:
        fix = f"muster session list; muster session end {held.name}, and start it again"
        return ChannelError(
            f"the session {held.name} can't be used",
            where=error.where or held.run_dir.path,
            why="\n".join(word for word in (error.what, error.why) if word),
            fix=error.fix or fix,
        )
    return ChannelError(
        f"the session {held.name} has ended",
        where=held.run_dir.path,
        why=over,
        fix=f"muster session start --name {held.name}",
    )


def _job_is_alive(run_dir: RunDir, plan: RunPlan) -> bool:
    """Return whether the job of a session still runs; if the scheduler can't say, assume so."""
    job_id, engine = plan.job_id, plan.engine
    if os.path.isfile(run_dir.job):
        return _job_lives(run_dir)
    if job_id is None:
        return owner_process_lives(run_dir)
    from torchmuster.launcher.engines.registry import dialect_of_record
    from torchmuster.launcher.jobs.jobs import view_jobs

    try:
        view = view_jobs(dialect_of_record(engine), [job_id]).get(job_id)
    except MusterError:
        return True
    return view is not None and not view.state.is_final


def view_session(run_dir: RunDir) -> SessionView:
    """Return the view of a session, with the state of its servers."""
    setup = read_setup(run_dir)
    plan = plan_of(run_dir)
    if plan.engine != "local":
        return _view_elsewhere(run_dir, setup, plan)
    is_open = all(os.path.isfile(server_file(run_dir, place)) for place in range(setup.nodes))
    state = None
    if is_open:
        try:
            answer = ask(run_dir, 0, messages.AskServerState())
        except ChannelError:
            answer = None
        state = answer if isinstance(answer, messages.SessionServerState) else None
    return SessionView(setup=setup, run_dir=run_dir, state=state, is_open=is_open)


def _view_elsewhere(run_dir: RunDir, setup: messages.SessionSetup, plan: RunPlan) -> SessionView:
    """Return the view of a session on other nodes; it is open only if all its servers answer."""
    from torchmuster.launcher.views.find import view_run
    from torchmuster.multirun.views.session_route import ask_servers

    try:
        states = ask_servers(view_run(run_dir), plan.node_names)
    except MusterError:
        states = []
    noted = atomic.read_json(run_dir.job)
    job_id = plan.job_id or (noted.get("job_id") if isinstance(noted, dict) else None)
    where = f"job {job_id} of {plan.engine}" if job_id is not None else plan.engine
    ends_at = record_of(run_dir).ends_at
    state = states[0] if states else None
    if state is not None and ends_at is not None:
        left_s = ends_at - time.time()
        if state.ends_in_s is None or left_s < state.ends_in_s:
            state = replace(state, ends_in_s=left_s, why_ends="the time of its job")
    return SessionView(
        setup=setup,
        run_dir=run_dir,
        state=state,
        is_open=bool(states),
        where=f"{where}: {', '.join(plan.node_names)}",
    )


def session_names() -> list[str]:
    """Return the names of all sessions for completion, dead ones too: checking takes too long."""
    return list(dict.fromkeys(name_of_session(one) for one in session_dirs()))
