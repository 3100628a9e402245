"""Cells of workflows: check, show and start a workflow at each kind of place for runs."""

import json
import os
import shlex
import shutil
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.files.layout import short_id
from torchmuster.errors import ChannelError, ManyErrors, UsageError
from torchmuster.launcher.cli.ssh import make_bundle_for, make_wishes

if TYPE_CHECKING:
    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.model.verdict import WorkflowResult
    from torchmuster.launcher.spec.site import Site
    from torchmuster.workflow.owner.capacity import Machine
    from torchmuster.workflow.owner.task_hosts import TaskHosts
    from torchmuster.workflow.plan import WorkflowPlan


# `muster submit FILE --on NAME` with ssh hosts: this process owns the workflow; tasks run there.


def check_on_hosts(plan: "WorkflowPlan", site: "Site", *, detach: bool) -> None:
    """Refuse what a workflow can't do over ssh, before anything exists.

    Raises:
        ManyErrors: All that is refused.
    """
    from torchmuster.workflow.owner.capacity import largest_min_hosts
    from torchmuster.workflow.plan import TaskNetwork

    found: list[UsageError] = []
    if detach:
        words = [word for word in sys.argv[1:] if word != "--detach"]
        fix = f"tmux new -d '{shlex.join(['muster', *words])}'"
        why = "a workflow on plain hosts ends with its client: nothing else would watch it"
        what = "`--detach` can't be used with ssh"
        found.append(UsageError(what, where="--detach", why=why, fix=fix))
    if plan.network is TaskNetwork.PRIVATE:
        what = "`--task-network private` is for one machine: tasks on hosts use their network"
        found.append(UsageError(what, where="--task-network", fix="leave it out"))
    task, needed = largest_min_hosts(plan)
    hosts = make_wishes(site, by_slots=True).hosts
    if needed > len(hosts):
        number = f"{len(hosts)} host{'s' if len(hosts) != 1 else ''}"
        what = f"the task {task} needs {needed} hosts, {site.name} has {number}"
        found.append(UsageError(what, where=site.origin, fix=f"nodes: {len(hosts)}, or more hosts"))
    if found:
        raise ManyErrors(found)


def submit_to_hosts(run_dir: "RunDir", plan: "WorkflowPlan", site: "Site") -> int:
    """Run a prepared workflow on the hosts of a site and follow it to its end.

    Raises:
        ChannelError: Too few hosts can be used.
        UsageError: Hosts don't see the run directory.
    """
    from torchmuster.core.cli.ending import follow_run
    from torchmuster.core.files import atomic
    from torchmuster.workflow.cli.workflow import say_end

    atomic.write_json(run_dir.site, {"site": site.name})
    follow = partial(_follow, run_dir, plan, site)
    return follow_run(plan, run_dir, follow, say=say_end)


def _task_hosts(
    run_dir: "RunDir", plan: "WorkflowPlan", site: "Site", voice: "TerminalVoice"
) -> "TaskHosts":
    from torchmuster.launcher.engines.sites import setup_origin
    from torchmuster.launcher.net.remote_messages import SetUpTasks
    from torchmuster.workflow.owner.capacity import largest_min_hosts
    from torchmuster.workflow.owner.task_hosts import TaskHosts

    wishes = make_wishes(site, by_slots=True)
    trains = any(task.training is not None for group in plan.groups for task in group.tasks)
    set_up = SetUpTasks(
        run_dir=run_dir.path,
        may_share=wishes.may_share,
        folders=(plan.cwd,) if trains else (),
        lines=tuple(site.setup),
        environment=dict(site.environment),
        origin=setup_origin(site),
    )
    bundle = make_bundle_for((sys.executable,), wishes)
    return TaskHosts(run_dir, wishes, bundle, set_up, largest_min_hosts(plan)[1], voice.say)


def _follow(
    run_dir: "RunDir", plan: "WorkflowPlan", site: "Site", voice: "TerminalVoice"
) -> "WorkflowResult":
    from torchmuster.workflow.owner.capacity import HostCapacity, describe_crowding
    from torchmuster.workflow.owner.workflow import follow_workflow

    hosts = _task_hosts(run_dir, plan, site, voice)
    try:
        try:
            hosts.open()
        except (ChannelError, UsageError):  # nothing has started, so the folder is useless
            shutil.rmtree(run_dir.path, ignore_errors=True)
            raise
        used = ", ".join(one.name for one in hosts.facts)
        logs = os.path.join(run_dir.path, "logs")
        voice.say(f"run {short_id(plan.run_id)} on {used}; logs in {logs}")
        sentence = describe_crowding(plan, len(hosts.facts))
        if sentence is not None:
            voice.say(sentence)
        return follow_workflow(run_dir, voice, HostCapacity(hosts.facts, hosts.broker))
    finally:
        hosts.close()


def show_hosts(plan: "WorkflowPlan", site: "Site", *, as_json: bool) -> None:
    """Print the ssh command of each host, and where tasks would go if no other group runs."""
    from torchmuster.workflow.owner.capacity import describe_crowding

    wishes = make_wishes(site, by_slots=True)
    bundle = make_bundle_for((sys.executable,), wishes)
    commands = [bundle.argv(host) for host in wishes.hosts]
    placed = _sample_placement(plan, [host.name for host in wishes.hosts])
    if as_json:
        names = [host.name for host in wishes.hosts]
        shown = {"site": site.name, "hosts": names, "commands": commands, "tasks": placed}
        click.echo(json.dumps(shown, indent=1))
        return
    for command in commands:
        click.echo(f"$ {shlex.join(command)}")
    click.echo("\n# tasks, while no other group runs:")
    for task, hosts in placed.items():
        click.echo(f"#   {task}: {', '.join(hosts)}")
    sentence = describe_crowding(plan, len(wishes.hosts))
    if sentence is not None:
        click.echo(f"# {sentence}")
    click.echo("# all hosts must see $MUSTER_HOME: tasks pass data on through the run directory")
    click.echo("no host was contacted (--dry-run)", err=True)


def _sample_placement(plan: "WorkflowPlan", names: list[str]) -> dict[str, list[str]]:
    """Assign hosts to tasks in turn; hosts' resources are unknown before connecting."""
    placed: dict[str, list[str]] = {}
    for group in plan.groups:
        turn = 0
        for task in group.tasks:
            count = min(task.num_nodes, len(names))
            placed[task.name] = [names[(turn + i) % len(names)] for i in range(count)]
            turn += count
    return placed


class WorkflowCell:
    """A workflow at a place for runs.

    Attributes:
        is_this_machine: Whether this machine's resources decide which tasks can run.
    """

    is_this_machine = False

    def __init__(self, place: Any) -> None:
        self.place = place

    def check(self, plan: "WorkflowPlan", *, detach: bool) -> None:
        """Refuse what a workflow can't do at this place, before anything exists.

        Raises:
            ManyErrors: All that is refused.
        """

    def show(self, plan: "WorkflowPlan", machine: "Machine", *, as_json: bool) -> None:
        """Print what would start; `machine` is this one."""
        raise NotImplementedError

    def with_task_setup(self, plan: "WorkflowPlan") -> "WorkflowPlan":
        """Return the plan with the site's setup lines for nodes."""
        return plan

    def submit(self, run_dir: "RunDir", plan: "WorkflowPlan", *, detach: bool) -> int:
        """Start a prepared workflow; follow it, or detach; return the exit code."""
        raise NotImplementedError

    def settle_again(self, old: "RunDir") -> None:
        """Remove what an earlier start of the workflow has left, before its restart."""


class OnThisMachine(WorkflowCell):
    """A workflow on this machine."""

    is_this_machine = True

    def show(self, plan: "WorkflowPlan", machine: "Machine", *, as_json: bool) -> None:
        from torchmuster.workflow.cli.workflow import show_plan

        show_plan(plan, machine, as_json=as_json)

    def submit(self, run_dir: "RunDir", plan: "WorkflowPlan", *, detach: bool) -> int:
        from torchmuster.workflow.cli.workflow import start_workflow

        return start_workflow(run_dir, plan, detach=detach)


class InThisJob(OnThisMachine):
    """A workflow on the node of this shell, within the job around it."""

    def check(self, plan: "WorkflowPlan", *, detach: bool) -> None:
        del plan, detach
        job, name, job_id = self.place.job, self.place.name, self.place.job_id
        if self.place.from_here is None:
            raise UsageError(
                f"this is not a node of job {job_id}, and a workflow runs where it is started",
                where=f"job {job_id} of {name}",
                fix=f"start it on {job.nodes[0].name}, or here with --here",
            )


class OnHosts(WorkflowCell):
    """A workflow on ssh hosts."""

    def check(self, plan: "WorkflowPlan", *, detach: bool) -> None:
        check_on_hosts(plan, self.place.site, detach=detach)

    def show(self, plan: "WorkflowPlan", machine: "Machine", *, as_json: bool) -> None:
        del machine
        show_hosts(plan, self.place.site, as_json=as_json)

    def submit(self, run_dir: "RunDir", plan: "WorkflowPlan", *, detach: bool) -> int:
        del detach  # `check` has refused it
        return submit_to_hosts(run_dir, plan, self.place.site)


class AsJobs(WorkflowCell):
    """A workflow as jobs of a scheduler, one per group."""

    def show(self, plan: "WorkflowPlan", machine: "Machine", *, as_json: bool) -> None:
        from torchmuster.workflow.cli.submit import show_jobs

        del machine
        show_jobs(plan, self.place.name, as_json=as_json)

    def with_task_setup(self, plan: "WorkflowPlan") -> "WorkflowPlan":
        from torchmuster.launcher.engines.sites import job_of_site, setup_origin

        site = self.place.site
        lines = job_of_site(site).node_lines or ()
        return replace(plan, setup=lines, setup_origin=setup_origin(site))

    def submit(self, run_dir: "RunDir", plan: "WorkflowPlan", *, detach: bool) -> int:
        from torchmuster.workflow.cli.workflow import submit_to_scheduler

        return submit_to_scheduler(run_dir, plan, self.place.site, detach=detach)
