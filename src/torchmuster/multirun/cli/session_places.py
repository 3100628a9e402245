"""What a session needs of its place: its set-up on the nodes, its owner, the wait for its job, and what is said at its end."""

import json
import os
import shlex
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from torchmuster.core import proc
from torchmuster.errors import ChannelError, MusterError

if TYPE_CHECKING:
    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.model.plan import NodeSetup, RunPlan
    from torchmuster.launcher.spec.site import Site
    from torchmuster.multirun.door.messages import SessionSetup

_SOON_S = 600.0


def with_site(plan: "RunPlan", site: "Site", *, python_given: bool) -> "RunPlan":
    """Return the plan with what the site says of its nodes; the doors learn which variables are the site's."""
    from torchmuster.core.model import contract
    from torchmuster.launcher.engines.sites import with_node_setup

    of_site = dict(site.environment)
    own = tuple((name, text) for name, text in plan.node_setup.environment if name not in of_site)
    names = (contract.SITE_NAMES_VARIABLE, " ".join(of_site))
    plan = replace(plan, node_setup=replace(plan.node_setup, environment=(*own, names)))
    return with_node_setup(plan, site, python_given=python_given)


def for_runs(setup: "NodeSetup", of_session: "RunPlan", *, python_given: bool) -> "NodeSetup":
    """Return the set-up of a run on the held nodes: the doors have done the session's, an ordinary restart does it again."""
    from torchmuster.core.model import contract

    theirs = of_session.node_setup
    variables = dict(theirs.environment)
    of_site = variables.get(contract.SITE_NAMES_VARIABLE, "").split()
    exports = tuple(f"export {name}={shlex.quote(variables[name])}" for name in of_site)
    return replace(
        setup,
        lines=(*exports, *theirs.lines),
        scratch=theirs.scratch,
        origin=theirs.origin,
        python_follows=theirs.python_follows and not python_given,
    )


def with_setup(plan: "RunPlan", setup: "SessionSetup") -> "RunPlan":
    """Let the doors read what the session was started with: not every node sees the client's files."""
    from torchmuster.core.model import codec, contract

    text = json.dumps(codec.to_plain(setup))
    added = (*plan.node_setup.environment, (contract.SESSION_VARIABLE, text))
    return replace(plan, node_setup=replace(plan.node_setup, environment=added))


def start_owner(argv: list[str], run_dir: "RunDir", *, own_package: bool = False) -> None:
    """Start the owner of a session in the background."""
    from torchmuster.core.owner.create import write_owner

    log = os.open(run_dir.supervisor_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    environment = proc.own_package_environment() if own_package else None
    try:
        child = proc.start(argv, env=environment, stdout=log, stderr=log)
    finally:
        os.close(log)
    write_owner(run_dir, child.pid)


class JobWait:
    """Says where the job of a session stands, until it is open."""

    def __init__(self, run_dir: "RunDir") -> None:
        from torchmuster.launcher.jobs.batch import JobNews

        self._run_dir, self._news = run_dir, JobNews()

    def look(self, name: str) -> None:
        """Ask and say.

        Raises:
            MusterError: The job has ended.
        """
        from torchmuster.core.files.layout import last_lines
        from torchmuster.launcher.jobs.links import view_newest
        from torchmuster.launcher.model.job import describe_job

        view = view_newest(self._run_dir)
        if view is None:
            return
        text = describe_job(view)
        if self._news.is_told(text, view, time.monotonic()):
            click.echo(f"muster: {text}", err=True)
        if view.state.is_final:
            raise MusterError(
                f"the session {name} has ended before it was open",
                where=self._run_dir.job_log,
                why="\n".join(last_lines(self._run_dir.job_log, 12)) or view.reason,
                fix=f"muster session start --name {name}",
            )


def error_at_end(run_dir: "RunDir", name: str) -> MusterError:
    """Return the error of a session that has ended before it was open, with the words of its result where it has one."""
    from torchmuster.core.files.layout import short_id
    from torchmuster.core.owner.record import read_result

    what, result = f"the session {name} has ended before it was open", read_result(run_dir)
    report = result.report if result is not None else None
    has_logs = os.path.isdir(run_dir.logs) and any(
        entry.startswith("attempt-") for entry in os.listdir(run_dir.logs)
    )
    logs = f"muster logs {short_id(os.path.basename(run_dir.path))}" if has_logs else None
    if report is None:
        return MusterError(what, where=run_dir.path, fix=logs or f"cat {run_dir.supervisor_log}")
    at = f"at: {report.at}" if report.at is not None else ""
    why = "\n".join(filter(None, (report.error, at, *report.because)))
    return MusterError(what, where=run_dir.path, why=why, fix=report.hint or logs)


def say_when_it_ends(run_dir: "RunDir", name: str) -> None:
    """Warn of the end of the session's time: its idle time begins anew with the run."""
    from torchmuster.core.model.text import in_minutes
    from torchmuster.multirun.door import messages
    from torchmuster.multirun.door.call import ask

    try:
        state = ask(run_dir, 0, messages.AskDoor())
    except ChannelError:
        return  # the start says it
    if not isinstance(state, messages.DoorState):
        return
    left_s = state.ends_in_s
    if left_s is not None and left_s < _SOON_S and "time limit" in state.why_ends:
        click.echo(
            f"muster: the session {name} ends in {in_minutes(left_s)}: {state.why_ends}", err=True
        )
