"""Where a session may hold nodes: this machine, the job that we are in, hosts of ssh, or a job of its own. Each starts its owner."""

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import click

from torchmuster import proc
from torchmuster.errors import ChannelError, MusterError, UsageError

if TYPE_CHECKING:
    from torchmuster.engines.own_job import OwnJob
    from torchmuster.engines.session import HeldSession
    from torchmuster.files.layout import RunDir
    from torchmuster.files.terminal import TerminalVoice
    from torchmuster.model.plan import NodeSetup, RunPlan
    from torchmuster.model.verdict import Result
    from torchmuster.node.door.messages import SessionSetup
    from torchmuster.spec.problems import Problems
    from torchmuster.spec.sites.site import Site

_SOON_S = 600.0
_DOOR_ENDED = (0, "exit code 0")  # of the first node, by itself
_END_HINT = "muster session start --on slurm, --hosts a,b, or in a job: muster session start"


class Place(Protocol):
    """Where a session is held."""

    @property
    def most(self) -> int | None:
        """Return how many nodes there are; None for any number."""

    def settle(self, plan: "RunPlan", setup: "SessionSetup") -> "RunPlan":
        """Return the plan for there."""

    def own(self, plan: "RunPlan", run_dir: "RunDir") -> None:
        """Start the owner of the session."""


@dataclass(frozen=True, slots=True)
class Here:
    """Simulated nodes of this machine."""

    most = None

    def settle(self, plan: "RunPlan", setup: "SessionSetup") -> "RunPlan":
        """Return the plan as it is."""
        del setup
        return plan

    def own(self, plan: "RunPlan", run_dir: "RunDir") -> None:
        """Start a supervisor in the background."""
        from torchmuster.owner.detach import detach_supervisor

        del plan
        detach_supervisor(run_dir)


@dataclass(frozen=True, slots=True)
class InJob:
    """The nodes of the job that we are in: its first one owns the session."""

    job: "OwnJob"

    @property
    def most(self) -> int:
        """Return how many nodes the job has."""
        return len(self.job.nodes)

    def settle(self, plan: "RunPlan", setup: "SessionSetup") -> "RunPlan":
        """Return the plan with the nodes of the job."""
        job = self.job.from_here() or self.job
        job = job.with_nodes(job.nodes[: plan.max_nodes])
        plan = replace(
            plan,
            node_names=job.node_names,
            engine=job.dialect.name,
            job_id=job.allocation.job_id,
        )
        return _with_setup(plan, setup)

    def own(self, plan: "RunPlan", run_dir: "RunDir") -> None:
        """Start what conducts a run in a job, on its first node, in the background."""
        words = proc.node_program("conduct", run_dir.path, "--engine", plan.engine, "--warn", "120")
        here = self.job.from_here()
        argv = words if here is not None else self.job.argv(self.job.nodes[0], words)
        _start_owner(argv, run_dir)


@dataclass(frozen=True, slots=True)
class OnHosts:
    """Hosts of ssh; a process in the background keeps the connections."""

    site: "Site"
    words: tuple[str, ...]
    python_given: bool

    @property
    def most(self) -> int:
        """Return how many hosts there are."""
        from torchmuster.spec.sites.site import site_hosts

        return len(site_hosts(self.site))

    def settle(self, plan: "RunPlan", setup: "SessionSetup") -> "RunPlan":
        """Return the plan with the hosts; without modules of the user's own no code has to come with the session."""
        from torchmuster.spec.sites.site import site_hosts

        names = tuple(host.name for host in site_hosts(self.site))[: plan.max_nodes]
        plan = replace(plan, engine=self.site.name, node_names=names)
        plan = _with_site(plan, self.site, python_given=self.python_given)
        if not setup.preload:
            plan = replace(plan, program=replace(plan.program, cwd="/"))
        return _with_setup(plan, replace(setup, folder="", variables=()))

    def own(self, plan: "RunPlan", run_dir: "RunDir") -> None:
        """Start `muster session hold` in the background."""
        argv = [sys.executable, "-m", "torchmuster", "session", "hold", run_dir.path, *self.words]
        _start_owner(argv, run_dir, own_package=True)


@dataclass(frozen=True, slots=True)
class AsJob:
    """A job of a scheduler, which owns the session."""

    site: "Site"
    given: dict[str, Any]

    most = None

    def settle(self, plan: "RunPlan", setup: "SessionSetup") -> "RunPlan":
        """Return the plan with what the site says of its nodes."""
        plan = replace(plan, engine=self.site.name)
        given = self.given["python"] is not None
        return _with_setup(_with_site(plan, self.site, python_given=given), setup)

    def own(self, plan: "RunPlan", run_dir: "RunDir") -> None:
        """Submit the job.

        Raises:
            MusterError: It was refused.
        """
        from torchmuster.engines.registry import load_dialect
        from torchmuster.owner.jobs.jobs import make_job, note_refusal, submit_job
        from torchmuster.spec.launch import RunRequest, read_job_limits
        from torchmuster.spec.problems import Problems

        named = ("queue", "account", "cpus_per_node", "gpus_per_node", "mem", "time_limit")
        request = RunRequest(script="session", **{name: self.given[name] for name in named})
        problems = Problems()
        limits = read_job_limits(request, problems)
        dialect = load_dialect(self.site.kind)
        with note_refusal(run_dir):
            job = make_job(plan, run_dir, self.site, request, limits)
            submit_job(job, run_dir, dialect)


def _with_site(plan: "RunPlan", site: "Site", *, python_given: bool) -> "RunPlan":
    """Return the plan with what the site says of its nodes; the doors learn which variables are the site's."""
    from torchmuster.engines.sites import with_node_setup
    from torchmuster.model import contract

    of_site = dict(site.environment)
    own = tuple((name, text) for name, text in plan.node_setup.environment if name not in of_site)
    names = (contract.SITE_NAMES_VARIABLE, " ".join(of_site))
    plan = replace(plan, node_setup=replace(plan.node_setup, environment=(*own, names)))
    return with_node_setup(plan, site, python_given=python_given)


def for_runs(setup: "NodeSetup", of_session: "RunPlan", *, python_given: bool) -> "NodeSetup":
    """Return the set-up of a run on the held nodes: the doors have done the session's, an ordinary restart does it again."""
    from torchmuster.model import contract

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


def _with_setup(plan: "RunPlan", setup: "SessionSetup") -> "RunPlan":
    """Let the doors read what the session was started with: not every node sees the client's files."""
    from torchmuster.model import codec, contract

    text = json.dumps(codec.to_plain(setup))
    added = (*plan.node_setup.environment, (contract.SESSION_VARIABLE, text))
    return replace(plan, node_setup=replace(plan.node_setup, environment=added))


def _start_owner(argv: list[str], run_dir: "RunDir", *, own_package: bool = False) -> None:
    from torchmuster.owner.create import write_owner

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
        from torchmuster.owner.jobs.batch import JobNews

        self._run_dir, self._news = run_dir, JobNews()

    def look(self, name: str) -> None:
        """Ask and say.

        Raises:
            MusterError: The job has ended.
        """
        from torchmuster.files.tail import last_lines
        from torchmuster.model.job import describe_job
        from torchmuster.owner.jobs.links import view_newest

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


def find_place(given: dict[str, Any], problems: "Problems") -> Place:
    """Return where a session is to be held.

    Raises:
        UsageError: There is no such place.
    """
    from torchmuster.cli.runs import job
    from torchmuster.cli.runs.ssh import find_ssh_site

    hosts = given["hosts"] or given["hostfile"]
    engine = job.choose_engine(given["engine"] or ("ssh" if hosts else None), here=given["here"])
    if engine == "local" and not hosts:
        inside = None if given["here"] else job.find_allocation()
        return Here() if inside is None else InJob(inside)
    site = find_ssh_site(engine, given["hosts"], given["hostfile"])
    if site is not None:
        words = [w for o in ("hosts", "hostfile") if given[o] for w in (f"--{o}", given[o])]
        return OnHosts(site, ("--on", engine, *words), given["python"] is not None)
    batch = job.check_engine(engine, problems)
    if batch is not None and job.find_objects(engine) is not None:
        problems.add(
            f"a session can't be held on `{engine}`",
            f"--on {engine}",
            "pods of a session are not made yet",
            _END_HINT,
        )
    return AsJob(batch, given) if batch is not None else Here()


def hold(path: str, given: dict[str, Any]) -> int:
    """Own a session on hosts of ssh to its end: the process in the background.

    Raises:
        UsageError: It has no plan, or no hosts.
    """
    from torchmuster.cli.runs.ssh import find_ssh_site, make_bundle_for, make_wishes, own_on_hosts
    from torchmuster.files.layout import RunDir
    from torchmuster.files.terminal import TerminalVoice
    from torchmuster.owner.views.record import read_plan

    run_dir = RunDir(path)
    plan = read_plan(run_dir)
    site = find_ssh_site(given["engine"], given["hosts"], given["hostfile"])
    if plan is None or site is None:
        raise UsageError("this is no session on hosts", where=path)

    class Voice(TerminalVoice):
        def tell(self, event: str, fields: "Mapping[str, Any]") -> None:
            if event == "worker_ended" and (fields.get("rank"), fields.get("what")) == _DOOR_ENDED:
                # The first door decides when the session ends; the others share no file with it.
                os.kill(os.getpid(), signal.SIGTERM)
            super().tell(event, fields)

    voice = Voice()
    voice.start()
    wishes = make_wishes(site, by_slots=False)
    bundle = make_bundle_for((sys.executable, plan.program.python[0]), wishes)
    try:
        result = own_on_hosts(plan, run_dir, wishes, bundle, voice)
    finally:
        voice.flush(5.0)
    return result.exit_code


def follow_on_nodes(plan: "RunPlan", run_dir: "RunDir", held: "HeldSession") -> int:
    """Start a run on the nodes of a session on other machines, and follow it to its end."""
    from torchmuster.cli.ending import follow_run
    from torchmuster.files.layout import short_id
    from torchmuster.owner.held import own_on_nodes
    from torchmuster.owner.views.account import near

    def follow(voice: "TerminalVoice") -> "Result":
        def begun(plan: "RunPlan") -> None:
            names = ", ".join(plan.node_names)
            voice.say(f"run {short_id(plan.run_id)} on {names}; logs in {near(run_dir.logs)}")

        return own_on_nodes(plan, run_dir, held, voice, begun=begun)

    return follow_run(plan, run_dir, follow)


def error_at_end(run_dir: "RunDir", name: str) -> MusterError:
    """Return the error of a session that has ended before it was open, with the words of its result where it has one."""
    from torchmuster.files.layout import short_id
    from torchmuster.owner.views.record import read_result

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
    from torchmuster.model.display.text import in_minutes
    from torchmuster.node.door import messages
    from torchmuster.node.door.call import ask

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
