"""The cells of sweeps and sessions: how each starts at each place for runs."""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core import proc
from torchmuster.core.cli.place import JOB_OPTIONS, say_ignored_of_a_job, warn
from torchmuster.errors import ChannelError, MusterError, UsageError

if TYPE_CHECKING:
    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.model.plan import NodeSetup, RunPlan
    from torchmuster.core.spec.problems import Problems
    from torchmuster.launcher.spec.site import Site
    from torchmuster.multirun.server.messages import SessionSetup
    from torchmuster.multirun.sweep.plan import SweepPlace, SweepPlan


# What sessions need: node setup, the owner, the wait for the job, and errors at the end.


_SOON_S = 600.0


def with_site(plan: "RunPlan", site: "Site", *, python_given: bool) -> "RunPlan":
    """Return the plan with the site's node setup; the servers learn which variables the site sets."""
    from torchmuster.core.model import contract
    from torchmuster.launcher.engines.sites import with_node_setup

    of_site = dict(site.environment)
    own = tuple((name, text) for name, text in plan.node_setup.environment if name not in of_site)
    names = (contract.SITE_NAMES_VARIABLE, " ".join(of_site))
    plan = replace(plan, node_setup=replace(plan.node_setup, environment=(*own, names)))
    return with_node_setup(plan, site, python_given=python_given)


def run_node_setup(setup: "NodeSetup", of_session: "RunPlan", *, python_given: bool) -> "NodeSetup":
    """Return the node setup for a run in a session.

    The servers have already done the session's; a restart outside of the session does it again.
    """
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


def with_session_setup(plan: "RunPlan", setup: "SessionSetup") -> "RunPlan":
    """Pass the setup to the servers by a variable: not every node sees the client's files."""
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
    """Reports the state of a session's job until the session is open."""

    def __init__(self, run_dir: "RunDir") -> None:
        from torchmuster.launcher.jobs.batch import JobReportFilter

        self._run_dir, self._news = run_dir, JobReportFilter()

    def look(self, name: str) -> None:
        """Ask for the state of the job, and print it if it is news.

        Raises:
            MusterError: The job has ended.
        """
        from torchmuster.core.files.layout import last_lines
        from torchmuster.launcher.jobs.jobs import view_newest
        from torchmuster.launcher.model.job import describe_job

        view = view_newest(self._run_dir)
        if view is None:
            return
        text = describe_job(view)
        if self._news.should_report(text, view, time.monotonic()):
            click.echo(f"muster: {text}", err=True)
        if view.state.is_final:
            raise MusterError(
                f"the session {name} has ended before it was open",
                where=self._run_dir.job_log,
                why="\n".join(last_lines(self._run_dir.job_log, 12)) or view.reason,
                fix=f"muster session start --name {name}",
            )


def error_at_end(run_dir: "RunDir", name: str) -> MusterError:
    """Return the error for a session that ended before it was open, with its result's report."""
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
    """Warn if the session's time limit ends soon; its idle time starts again with the run."""
    from torchmuster.core.model.text import in_minutes
    from torchmuster.multirun.server import messages
    from torchmuster.multirun.server.call import ask

    try:
        state = ask(run_dir, 0, messages.AskServerState())
    except ChannelError:
        return  # the start of the run reports it
    if not isinstance(state, messages.SessionServerState):
        return
    left_s = state.ends_in_s
    if left_s is not None and left_s < _SOON_S and "time limit" in state.why_ends:
        click.echo(
            f"muster: the session {name} ends in {in_minutes(left_s)}: {state.why_ends}", err=True
        )


# `muster sweep --hosts a,b`: slots on hosts.


def plan_on_hosts(given: dict[str, Any], site: "Site", problems: "Problems") -> "SweepPlan":
    """Return the plan of a sweep with slots on ssh hosts, by default one on each.

    Raises:
        ManyErrors: All problems of the options and the hosts.
    """
    from torchmuster.launcher.engines.sites import with_node_setup
    from torchmuster.launcher.spec.site import site_hosts
    from torchmuster.multirun.cli.sweep_words import plan_sweep, sweep_request

    hosts = [host.name for host in site_hosts(site)]
    request = sweep_request(given)
    num_gpus = given["gpus_per_node"] or site.gpus_per_node or 0
    slots = given["slots"] or len(hosts)
    words = {**given, "slots": slots}
    plan = plan_sweep(words, request, [], problems, is_job=True)
    run = with_node_setup(plan.run, site, python_given=request.python is not None)
    places = _places(site.name, hosts, plan.slots, num_gpus, run.num_workers(0))
    return replace(plan, run=run, places=places)


def _places(
    site: str, hosts: Sequence[str], num_slots: int, num_gpus: int, num_workers: int
) -> "tuple[SweepPlace, ...]":
    """Return where the slots are: round-robin over the hosts, and over the GPUs of each."""
    from torchmuster.multirun.sweep.plan import SweepPlace
    from torchmuster.multirun.sweep.runs import gpus_of_slots

    on_one = -(-num_slots // len(hosts))
    gpus = gpus_of_slots([str(n) for n in range(num_gpus)], on_one, num_workers)
    return tuple(
        SweepPlace(site=site, host=hosts[slot % len(hosts)], gpus=gpus[slot // len(hosts)])
        for slot in range(num_slots)
    )


StartSweep = Callable[..., int]  # takes a plan, and its folder if it exists already


class SweepCell:
    """A sweep at a place for runs."""

    def __init__(self, place: Any) -> None:
        self.place = place

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        """Start a sweep and follow it, or show it; return the exit code.

        Args:
            given: The options of the command line.
            problems: The problems found so far.
            start: Starts, or shows, a planned sweep that a process on this machine owns; a second
                argument is its folder if it exists already.

        Raises:
            ManyErrors: All problems of the options.
        """
        raise NotImplementedError


class SweepNowhere(SweepCell):
    """A sweep at an invalid place, already noted as a problem: only find all other problems."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        from torchmuster.multirun.cli.sweep_words import plan_sweep, sweep_request

        return start(plan_sweep(given, sweep_request(given), [], problems, is_job=True))


class SweepHere(SweepCell):
    """A sweep on this machine."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        from torchmuster.core.node.kernel import visible_gpus
        from torchmuster.multirun.cli.sweep_words import plan_sweep, sweep_request

        gpus = visible_gpus()
        say_ignored_of_a_job(self.place, given)
        if given["per_gpu"] > 1 and not gpus:
            fix = "--slots is the number of members at a time"
            warn([f"ignored: --per-gpu: no GPU is visible here; {fix}"])
        return start(plan_sweep(given, sweep_request(given), gpus, problems))


class SweepInJob(SweepHere):
    """A sweep on the first node of the job around this shell."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        job, job_id = self.place.job, self.place.job_id
        if not given["dry_run"] and (code := self.place.instead()) is not None:
            return int(code)
        if len(job.nodes) > 1:
            warn([f"members run on this node alone, of {len(job.nodes)} in job {job_id}"])
        return super().start(given, problems, start)


class SweepOnHosts(SweepCell):
    """A sweep on ssh hosts."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        if given["time_limit"] is not None:
            fix = "leave it out; `--stop` ends members early"
            raise UsageError("`--time` is for sweeps that are jobs", where="--time", fix=fix)
        return start(plan_on_hosts(given, self.place.site, problems))


class SweepAsArray(SweepCell):
    """A sweep as a scheduler's job array, which needs no owner."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        from torchmuster.multirun.cli.sweep_jobs import submit_sweep

        del start
        return submit_sweep(given, self.place.site, problems)


class SweepInSession(SweepCell):
    """A sweep in a session: its members run one after the other, each on all nodes."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        from torchmuster.multirun.cli.sweep_words import plan_sweep, sweep_request

        options = {"engine": "--on", "hosts": "--hosts", "hostfile": "--hostfile", **JOB_OPTIONS}
        others = [word for option, word in options.items() if given.get(option) is not None]
        for word in [*others, *["--per-gpu"] * (given["per_gpu"] > 1)]:
            why = "the session has its nodes already"
            problems.add(f"`{word}` can't be used in a session", word, why)
        if given["slots"] not in (None, 1):
            why = "a session has one run at a time"
            fix = "--hosts a,b makes slots of its own on hosts"
            problems.add("a session is one slot", f"--slots {given['slots']}", why, fix)
        held = self.place
        is_job = not held.is_here
        request = held.sweep_request(sweep_request(given), given)
        plan = plan_sweep({**given, "slots": 1}, request, list(held.gpus), problems, is_job=is_job)
        return start(replace(plan, run=held.sweep_run(plan.run, given["python"])))


class SessionCell:
    """A session at a place for runs.

    Attributes:
        refusal: Why no session can be held here; empty if one can.
    """

    refusal = ""

    def __init__(self, place: Any) -> None:
        self.place = place

    @property
    def most_nodes(self) -> int | None:
        """The number of nodes it can hold; None for any number."""
        return None

    def settle(
        self, plan: "RunPlan", setup: "SessionSetup", given: "Mapping[str, Any]"
    ) -> "RunPlan":
        """Return the session's plan for its nodes here; `given` are the command line's options."""
        raise NotImplementedError

    def own(self, plan: "RunPlan", run_dir: "RunDir", given: "Mapping[str, Any]") -> None:
        """Start the session's owner."""
        raise NotImplementedError


class SessionHere(SessionCell):
    """A session on this machine."""

    def settle(
        self, plan: "RunPlan", setup: "SessionSetup", given: "Mapping[str, Any]"
    ) -> "RunPlan":
        del setup, given
        return plan

    def own(self, plan: "RunPlan", run_dir: "RunDir", given: "Mapping[str, Any]") -> None:
        from torchmuster.core.owner.detach import start_background_owner

        del plan, given
        start_background_owner(run_dir)


class SessionInJob(SessionCell):
    """A session on the nodes of the job around this shell."""

    @property
    def most_nodes(self) -> int:
        return len(self.place.job.nodes)

    def settle(
        self, plan: "RunPlan", setup: "SessionSetup", given: "Mapping[str, Any]"
    ) -> "RunPlan":
        del given
        job = self.place.from_here or self.place.job
        names = job.node_names[: plan.max_nodes]
        plan = replace(plan, node_names=names, engine=self.place.name, job_id=self.place.job_id)
        return with_session_setup(plan, setup)

    def own(self, plan: "RunPlan", run_dir: "RunDir", given: "Mapping[str, Any]") -> None:
        """Start `conduct`, which heads a run in a job, on the first node in the background."""
        from torchmuster.core import proc
        from torchmuster.core.model.codec import to_arguments
        from torchmuster.core.model.plan import WARN_S
        from torchmuster.launcher.jobs.succession import ConductOptions

        del given
        conduct = ConductOptions(run_dir=run_dir.path, engine=plan.engine, warn=WARN_S)
        words = proc.node_program("conduct", *to_arguments(conduct))
        is_here, job = self.place.from_here is not None, self.place.job
        start_owner(words if is_here else job.argv(job.nodes[0], words), run_dir)


class SessionOnHosts(SessionCell):
    """A session on ssh hosts."""

    @property
    def most_nodes(self) -> int:
        return len(self.place.wishes.hosts)

    def settle(
        self, plan: "RunPlan", setup: "SessionSetup", given: "Mapping[str, Any]"
    ) -> "RunPlan":
        names = tuple(host.name for host in self.place.wishes.hosts)[: plan.max_nodes]
        plan = replace(plan, engine=self.place.name, node_names=names)
        plan = with_site(plan, self.place.site, python_given=given["python"] is not None)
        if not setup.preload:  # without the user's own modules no code is copied
            plan = replace(plan, program=replace(plan.program, cwd="/"))
        return with_session_setup(plan, replace(setup, folder="", variables=()))

    def own(self, plan: "RunPlan", run_dir: "RunDir", given: "Mapping[str, Any]") -> None:
        """Start `muster session hold` in the background: it keeps the connections."""
        del plan
        words = [w for o in ("hosts", "hostfile") if given[o] for w in (f"--{o}", given[o])]
        argv = [sys.executable, "-m", "torchmuster", "session", "hold", run_dir.path]
        start_owner([*argv, "--on", self.place.name, *words], run_dir, own_package=True)


class SessionAsJob(SessionCell):
    """A session as a job of a scheduler."""

    def settle(
        self, plan: "RunPlan", setup: "SessionSetup", given: "Mapping[str, Any]"
    ) -> "RunPlan":
        plan = replace(plan, engine=self.place.name)
        plan = with_site(plan, self.place.site, python_given=given["python"] is not None)
        return with_session_setup(plan, setup)

    def own(self, plan: "RunPlan", run_dir: "RunDir", given: "Mapping[str, Any]") -> None:
        """Submit the job that owns the session.

        Raises:
            MusterError: The scheduler has refused the job.
        """
        from torchmuster.core.spec.launch import RunRequest, read_job_limits
        from torchmuster.core.spec.problems import Problems
        from torchmuster.launcher.jobs.jobs import make_job, note_refusal, submit_job

        named = ("queue", "account", "cpus_per_node", "gpus_per_node", "mem", "time_limit")
        request = RunRequest(script="session", **{name: given[name] for name in named})
        limits = read_job_limits(request, Problems())
        with note_refusal(run_dir):
            job = make_job(plan, run_dir, self.place.site, request, limits)
            submit_job(job, run_dir, self.place.dialect)


class NoSessionInPods(SessionCell):
    """Sessions in pods, which are not possible yet."""

    refusal = "pods of a session are not made yet"
