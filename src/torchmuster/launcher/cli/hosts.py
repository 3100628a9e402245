"""Runs on plain hosts: `--hosts`, `--hostfile`, or a section of kind ssh."""

import os
import shlex
import signal
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli.place import Place, too_few
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.files.terminal import TerminalVoice
from torchmuster.core.model.events import RecordEvent, WorkerEndedEvent
from torchmuster.core.owner.create import note_failed_start
from torchmuster.core.owner.record import read_plan
from torchmuster.core.owner.session import EarlyStop, note_on_session
from torchmuster.core.owner.supervise import own_run
from torchmuster.core.spec.launch import JobLimits, RunRequest, plan_run
from torchmuster.errors import UsageError
from torchmuster.launcher.cli import sites
from torchmuster.launcher.cli.ship import start_packing
from torchmuster.launcher.engines.sites import with_node_setup
from torchmuster.launcher.engines.ssh import SshEngine, SshOptions
from torchmuster.launcher.files.code_copy import find_code
from torchmuster.launcher.views.account import find_saved

if TYPE_CHECKING:
    from torchmuster.core.cli.place import Follow
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.core.model.verdict import Result
    from torchmuster.core.spec.problems import Problems
    from torchmuster.launcher.engines.ssh_host import Bundle
    from torchmuster.launcher.spec.site import Site
    from torchmuster.launcher.views.run_view import RunView

_SESSION_SERVER_ENDED = (0, "exit code 0")  # on the first node, by itself
# Without the variable the line fails: the workers must not use any other environment.
_SENT_LINES = (
    'export VIRTUAL_ENV="${MUSTER_ENVIRONMENT:?no environment has come}/env"',
    'export PATH="$VIRTUAL_ENV/bin:$PATH"; unset PYTHONHOME',
    '[ ! -d "$VIRTUAL_ENV/conda-meta" ] || export CONDA_PREFIX="$VIRTUAL_ENV"',
)


class HostsPlace(Place):
    """Hosts of ssh; a run on them ends with this process."""

    kind = "hosts"
    takes_no_job_options = "plain hosts have no scheduler"

    def __init__(self, site: "Site", *, by_slots: bool = False) -> None:
        self.name, self.site = site.name, site
        self.wishes = sites.make_wishes(site, by_slots=by_slots)

    def fill(self, request: "RunRequest") -> "RunRequest":

        nodes = request.nodes or sites.nodes_of_site(self.site, spares=request.spares) or "1"
        return replace(request, nodes=nodes)

    def check_detach(self, words: str, problems: "Problems") -> None:
        why = "a run on plain hosts ends with its client: nothing else would watch it"
        fix = f"tmux new -d '{words}'"
        problems.add("`--detach` can't be used with ssh", "--detach", why, fix)

    def plan(
        self, request: "RunRequest", run_id: str, limits: "JobLimits", problems: "Problems"
    ) -> "RunPlan | None":

        del limits
        # The interpreter is the hosts': it need not exist here.
        workers = request.nproc_per_node or str(self.site.gpus_per_node or 1)
        asked = replace(request, python=None, nproc_per_node=workers)
        plan = plan_run(asked, run_id, (), problems)
        if plan is None:
            return None
        hosts = self.wishes.hosts
        if (short := too_few(plan, len(hosts))) is not None:
            what = f"{short[0]} are asked for, there are {len(hosts)} hosts"
            problems.add(what, f"--nodes {request.nodes}", fix=short[1])
            return None
        most = min(plan.max_nodes, len(hosts))
        names = tuple(host.name for host in hosts[: most + plan.spares])
        plan = replace(plan, max_nodes=most, node_names=names, engine=self.name)
        plan = with_node_setup(plan, self.site, python_given=request.python is not None)
        if request.python is not None:
            python = tuple(shlex.split(request.python))
            plan = replace(plan, program=replace(plan.program, python=python))
        if request.ship_env is not None and not problems.found:
            # The hosts get a virtual environment of this machine.
            self.wishes = replace(self.wishes, environment=start_packing(request.ship_env))
            old = plan.node_setup
            setup = replace(old, lines=(*old.lines, *_SENT_LINES), python_follows=True)
            program = replace(plan.program, python=("python3", *plan.program.python[1:]))
            plan = replace(plan, node_setup=setup, program=program)
        return plan

    def _bundle(self, plan: "RunPlan") -> "Bundle":
        return sites.make_bundle_for((sys.executable, plan.program.python[0]), self.wishes)

    def show(self, plan: "RunPlan") -> None:

        bundle = self._bundle(plan)
        if self.wishes.environment is not None:
            self.wishes.environment()
        for place, host in enumerate(self.wishes.hosts):
            spare = "" if place < plan.max_nodes else "  # spare"
            spare += ", with torch loaded" if plan.max_nodes <= place < plan.num_places else ""
            click.echo(f"$ {shlex.join(bundle.argv(host))}{spare}")
        code = find_code(plan.program.cwd)
        click.echo(f"\n# on hosts that don't share this file system: a copy of {code.describe()}")
        click.echo("no host was contacted (--dry-run)", err=True)

    def start(self, plan: "RunPlan", run_dir: "RunDir", *, detach: bool) -> "Follow":
        del detach  # it was refused
        return partial(own_on_hosts, plan, run_dir, self.wishes, self._bundle(plan))

    def look(self) -> list[dict[str, Any]]:

        from torchmuster.launcher.cli.engines import host_rows

        return host_rows(self.wishes.hosts)

    def try_out(self, limit_s: float) -> tuple[list[dict[str, Any]], str]:

        from torchmuster.launcher.cli.engines import reach_hosts

        del limit_s  # ssh has its own limit
        note = "each host was contacted, nothing was started there"
        return reach_hosts(self.wishes.hosts), note


def own_on_hosts(
    plan: "RunPlan",
    run_dir: "RunDir",
    wishes: "SshOptions",
    bundle: "Bundle",
    voice: "TerminalVoice",
) -> "Result":
    """Start a run on ssh hosts and follow it to its end."""
    engine = SshEngine(plan, run_dir, wishes, bundle, voice.say)
    try:
        with note_failed_start(run_dir):
            engine.start_all()
        early = EarlyStop()
        plan = engine.plan
        used = ", ".join(engine.used_names)
        voice.say(f"run {short_id(plan.run_id)} on {used}; logs in {run_dir.logs}")
        note = note_on_session(may_detach=False)
        if note is not None:
            voice.say(note)
        result = own_run(engine, voice, forward_stdin=plan.stdin_rank is not None, early=early)
        engine.finish()
        return engine.localized(result)  # after `finish`, which fetches the hosts' results
    finally:
        engine.abandon()


def hold_session(path: str, given: dict[str, Any]) -> int:
    """Own a session on ssh hosts to its end, as the process in the background.

    Raises:
        UsageError: It has no plan, or no hosts.
    """
    run_dir = RunDir(path)
    plan = read_plan(run_dir)
    site = sites.find_ssh_site(given["engine"], given["hosts"], given["hostfile"])
    if plan is None or site is None:
        raise UsageError("this is no session on hosts", where=path)

    class Voice(TerminalVoice):
        def tell(self, event: RecordEvent) -> None:
            if (
                isinstance(event, WorkerEndedEvent)
                and (event.rank, event.what) == _SESSION_SERVER_ENDED
            ):
                # The first session server decides when the session ends; the others share no file
                # with it.
                os.kill(os.getpid(), signal.SIGTERM)
            super().tell(event)

    voice = Voice()
    voice.start()
    wishes = sites.make_wishes(site, by_slots=False)
    bundle = sites.make_bundle_for((sys.executable, plan.program.python[0]), wishes)
    try:
        result = own_on_hosts(plan, run_dir, wishes, bundle, voice)
    finally:
        voice.flush(5.0)
    return result.exit_code


def hosts_restart_place(plan: "RunPlan", view: "RunView") -> HostsPlace:
    """Return the hosts of an earlier run, to restart it there.

    Raises:
        UsageError: Its snapshots are only on its hosts, or its environment was sent to them.
    """
    old, name = view.run_dir, short_id(view.run_id)
    if _SENT_LINES[0] in plan.node_setup.lines:
        raise UsageError(
            f"{name} had an environment that was sent with it",
            where=old.plan,
            why="`muster restart` sends none",
            fix="type its command again, with --ship-env",
        )
    saved = find_saved(old)
    # Without a record or a result, it is unknown what the hosts hold.
    if view.result is None if saved is None else not saved.is_seen:
        raise UsageError(
            f"the snapshots of {name} can't be seen from here",
            where=saved.folder if saved is not None else old.snapshots,
            why="its hosts do not share this file system, so they may be on the host of rank 0 only",
            fix="type its command again; folder=... on storage that all hosts see lets any host resume",
        )
    named = sites.my_sites().sites.get(plan.engine)
    hosts = ",".join(plan.node_names) if named is None else None
    site = sites.find_ssh_site(plan.engine, hosts, None)
    if site is None:
        raise UsageError(f"`{plan.engine}` is not a site of kind ssh", where=view.run_dir.plan)
    return HostsPlace(site)
