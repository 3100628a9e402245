"""`muster run` on plain hosts: `--hosts`, `--hostfile`, or a section of kind ssh."""

import os
import shlex
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from torchmuster.cli.sites import my_sites
from torchmuster.errors import ManyErrors, UsageError
from torchmuster.files.layout import short_id

if TYPE_CHECKING:
    from torchmuster.engines.ssh_bundle import Bundle
    from torchmuster.engines.ssh_places import SshWishes
    from torchmuster.files.layout import RunDir
    from torchmuster.files.terminal import TerminalVoice
    from torchmuster.model.plan import RunPlan
    from torchmuster.model.verdict import Result
    from torchmuster.owner.views.run_view import RunView
    from torchmuster.spec.launch import RunRequest
    from torchmuster.spec.problems import Problems
    from torchmuster.spec.sites.site import Site

KIND = "ssh"


# Without the variable the line fails: the workers must not run in what else is there.
_SENT_LINES = (
    'export VIRTUAL_ENV="${MUSTER_ENVIRONMENT:?no environment has come}/env"',
    'export PATH="$VIRTUAL_ENV/bin:$PATH"; unset PYTHONHOME',
    '[ ! -d "$VIRTUAL_ENV/conda-meta" ] || export CONDA_PREFIX="$VIRTUAL_ENV"',
)


def find_ssh_site(name: str, hosts: str | None, hostfile: str | None) -> "Site | None":
    """Return the site when the run goes to plain hosts; None when it goes elsewhere.

    Raises:
        UsageError: Hosts are named for another kind of engine, or nobody names any.
        ManyErrors: Everything that is wrong with the hosts.
    """
    from torchmuster.spec.sites.site import Site

    named_here = bool(hosts or hostfile)
    sites = my_sites()
    site = sites.sites.get(name)
    if site is None and name == KIND:
        site = Site.model_construct(**_plain_site())
    if site is None or site.kind != KIND:
        if named_here:
            what = f"`--on {name}` takes no list of hosts"
            raise UsageError(what, where="--hosts", fix="--on ssh --hosts node1,node2")
        return None
    if named_here:
        site = site.model_copy(update={"hosts": _hosts_of(hosts, hostfile), "hostfile": None})
    if not site.hosts and site.hostfile is None:
        fix = '--hosts node1,node2:4, --hostfile FILE, or [engines.NAME] with kind = "ssh"'
        raise UsageError("no hosts are given", where=f"--on {name}", fix=fix)
    return site


def _plain_site() -> dict[str, Any]:
    from torchmuster.spec.sites.site import Site

    values = {key: field.get_default() for key, field in Site.model_fields.items()}
    return {**values, "name": KIND, "kind": KIND}


def _hosts_of(hosts: str | None, hostfile: str | None) -> Any:
    from torchmuster.spec.sites.hostfile import join_hosts, parse_host, read_hostfile

    if hosts and hostfile:
        raise UsageError("`--hosts` and `--hostfile` are both given: use one of them")
    if hostfile:
        return read_hostfile(hostfile)
    found, errors = [], []
    for word in (hosts or "").split(","):
        try:
            found.append(parse_host(word))
        except UsageError as error:
            errors.append(UsageError(error.what, where=f"--hosts {hosts}", fix=error.fix))
    if errors:
        raise ManyErrors(errors)
    return join_hosts(found)


def make_wishes(site: "Site", *, by_slots: bool) -> "SshWishes":
    """Return how the hosts of a site are reached."""
    from torchmuster.engines.ssh_command import SshHost
    from torchmuster.engines.ssh_places import SshWishes
    from torchmuster.spec.sites.site import site_hosts

    hosts = tuple(
        SshHost(name=h.name, user=h.user or site.user, port=site.port, slots=h.slots)
        for h in site_hosts(site)
    )
    shared = os.environ.get("MUSTER_SSH_SHARED", "") != "no"
    where = f"--on {site.name}" if site.name != KIND else "--on ssh"
    return SshWishes(hosts=hosts, where=where, by_slots=by_slots, may_share=shared)


def run_on_hosts(request: "RunRequest", run_id: str, site: "Site", problems: "Problems") -> int:
    """Run on the hosts of a site and follow the run to its end; it ends with this process."""
    if request.detach:
        fix = f"tmux new -d '{shlex.join(['muster', *_without_detach(sys.argv[1:])])}'"
        why = "a run on plain hosts ends with its client: nothing else would watch it"
        problems.add("`--detach` can't be used with ssh", "--detach", why, fix)
    wishes = make_wishes(site, by_slots=request.nproc_per_node is None)
    plan = problems.checked(plan_for_hosts(request, run_id, site, wishes, problems))
    if request.ship_env is not None:
        plan, wishes = _with_environment(plan, wishes, request.ship_env)
    bundle = make_bundle_for((sys.executable, plan.program.python[0]), wishes)
    if request.dry_run:
        if wishes.environment is not None:
            wishes.environment()
        _show(plan, wishes, bundle)
        return 0
    return _follow(plan, wishes, bundle)


def _with_environment(
    plan: "RunPlan", wishes: "SshWishes", named: str
) -> "tuple[RunPlan, SshWishes]":
    """Return both for hosts that get a virtual environment of this machine.

    Raises:
        UsageError: There is none, or it can't travel.
    """
    from torchmuster.cli.runs.ship import begin_to_pack

    packed = begin_to_pack(named)
    old = plan.node_setup
    setup = replace(old, lines=(*old.lines, *_SENT_LINES), python_follows=True)
    program = replace(plan.program, python=("python3", *plan.program.python[1:]))
    plan = replace(plan, node_setup=setup, program=program)
    return plan, replace(wishes, environment=packed)


def run_again_on_hosts(plan: "RunPlan", view: "RunView", *, detach: bool) -> int:
    """Start a run again on its hosts.

    Raises:
        UsageError: Its snapshots are on its hosts only, or it is to go on in the background.
    """
    from torchmuster.owner.views.account import find_saved

    old, name = view.run_dir, short_id(view.run_id)
    if detach:
        raise UsageError(
            "`--detach` can't be used with ssh",
            why="a run on plain hosts ends with its client",
            fix=f"tmux new -d 'muster restart {name}'",
        )
    if _SENT_LINES[0] in plan.node_setup.lines:
        raise UsageError(
            f"{name} had an environment that was sent with it",
            where=old.plan,
            why="`muster restart` sends none",
            fix="type its command again, with --ship-env",
        )
    saved = find_saved(old)
    # Of a run without a record and without a result nobody knows what its hosts hold.
    if view.result is None if saved is None else not saved.is_seen:
        raise UsageError(
            f"the snapshots of {name} can't be seen from here",
            where=saved.folder if saved is not None else old.snapshots,
            why="its hosts do not share this file system, so they may be on the host of rank 0 only",
            fix="type its command again; folder=... on storage that all hosts see lets any host resume",
        )
    named = my_sites().sites.get(plan.engine)
    hosts = ",".join(plan.node_names) if named is None else None
    site = find_ssh_site(plan.engine, hosts, None)
    if site is None:
        raise UsageError(f"`{plan.engine}` is not a site of kind ssh", where=view.run_dir.plan)
    wishes = make_wishes(site, by_slots=False)
    bundle = make_bundle_for((sys.executable, plan.program.python[0]), wishes)
    return _follow(plan, wishes, bundle, old.snapshots)


def _without_detach(words: list[str]) -> list[str]:
    return [word for word in words if word != "--detach"]


def plan_for_hosts(
    request: "RunRequest",
    run_id: str,
    site: "Site",
    wishes: "SshWishes",
    problems: "Problems",
) -> "RunPlan | None":
    """Return the plan; which host is which place is known when they have answered."""
    from torchmuster.engines.sites import with_node_setup
    from torchmuster.spec.launch import plan_run

    # The interpreter is the hosts' own: it need not exist here.
    python = shlex.split(request.python) if request.python is not None else []
    workers = request.nproc_per_node or str(site.gpus_per_node or 1)
    plan = plan_run(replace(request, python=None, nproc_per_node=workers), run_id, (), problems)
    if plan is None:
        return None
    if plan.min_nodes + plan.spares > len(wishes.hosts):
        asked = f"{plan.min_nodes} nodes" + (f" and {plan.spares} spare" if plan.spares else "")
        what = f"{asked} are asked for, there are {len(wishes.hosts)} hosts"
        fix = f"--nodes {max(len(wishes.hosts) - plan.spares, 1)}"
        problems.add(what, f"--nodes {request.nodes}", fix=fix)
        return None
    most = min(plan.max_nodes, len(wishes.hosts))
    names = tuple(host.name for host in wishes.hosts[: most + plan.spares])
    plan = replace(plan, max_nodes=most, node_names=names, engine=site.name)
    plan = with_node_setup(plan, site, python_given=request.python is not None)
    if python:
        plan = replace(plan, program=replace(plan.program, python=tuple(python)))
    return plan


def make_bundle_for(own_pythons: "tuple[str, ...]", wishes: "SshWishes") -> "Bundle":
    """Return what the hosts are offered; these interpreters of this machine are tried there first."""
    from torchmuster.engines.ssh_bundle import make_bundle
    from torchmuster.engines.ssh_command import ssh_command

    own = os.environ.get("MUSTER_SSH_PYTHON")
    pythons = [own] if own else []
    pythons += own_pythons
    return make_bundle(ssh_command(os.environ), pythons, may_share=wishes.may_share)


def _show(plan: "RunPlan", wishes: "SshWishes", bundle: "Bundle") -> None:
    from torchmuster.files.code_copy import find_code

    for place, host in enumerate(wishes.hosts):
        spare = "" if place < plan.max_nodes else "  # spare"
        spare += ", with torch loaded" if plan.max_nodes <= place < plan.num_places else ""
        click.echo(f"$ {shlex.join(bundle.argv(host))}{spare}")
    code = find_code(plan.program.cwd)
    click.echo(f"\n# on hosts that don't share this file system: a copy of {code.describe()}")
    click.echo("no host was contacted (--dry-run)", err=True)


def _follow(
    plan: "RunPlan", wishes: "SshWishes", bundle: "Bundle", snapshots: str | None = None
) -> int:
    from torchmuster.cli.ending import follow_run, shown_here
    from torchmuster.owner.create import create_run_dir, link_snapshots

    plan = shown_here(plan)
    run_dir = create_run_dir(plan)
    if snapshots is not None:
        link_snapshots(run_dir, snapshots)
    follow = partial(own_on_hosts, plan, run_dir, wishes, bundle)
    return follow_run(plan, run_dir, follow)


def own_on_hosts(
    plan: "RunPlan",
    run_dir: "RunDir",
    wishes: "SshWishes",
    bundle: "Bundle",
    voice: "TerminalVoice",
) -> "Result":
    """Start a run on hosts of ssh and follow it to its end."""
    from torchmuster.engines.ssh import SshEngine
    from torchmuster.owner.create import note_failed_start
    from torchmuster.owner.session import note_on_session
    from torchmuster.owner.supervise import own_run

    engine = SshEngine(plan, run_dir, wishes, bundle, voice.say)
    try:
        with note_failed_start(run_dir):
            engine.start_all()
        plan = engine.plan
        used = ", ".join(engine.used_names)
        voice.say(f"run {short_id(plan.run_id)} on {used}; logs in {run_dir.logs}")
        note = note_on_session(may_detach=False)
        if note is not None:
            voice.say(note)
        result = own_run(engine, voice, forward_stdin=plan.stdin_rank is not None)
        engine.finish()
        return engine.localized(result)  # behind `finish`, which brings the host's own
    finally:
        engine.abandon()
