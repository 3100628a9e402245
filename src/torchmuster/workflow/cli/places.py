"""Cells of workflows: check, show and start a workflow at each kind of place, and follow it to its end."""

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
from torchmuster.launcher.cli.sites import make_bundle_for, make_wishes, my_sites
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.engines.schedulers import sees_files

if TYPE_CHECKING:
    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.launcher.engines.base import Dialect
    from torchmuster.launcher.spec.site import Site
    from torchmuster.workflow.jobs import GroupJob
    from torchmuster.workflow.owner.capacity import Machine
    from torchmuster.workflow.owner.task_hosts import TaskHosts
    from torchmuster.workflow.plan import WorkflowPlan
    from torchmuster.workflow.record import WorkflowResult

ALL = "all"


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
        """Print a table of the tasks that would run here."""
        from torchmuster.core.model import codec
        from torchmuster.launcher.ui.table import render_table
        from torchmuster.workflow.owner.capacity import cpus_of, gpus_of

        if as_json:
            click.echo(json.dumps(codec.to_plain(plan), indent=1))
            return
        rows = []
        for group in plan.groups:
            for task in group.tasks:
                words = " ".join(task.command)
                if task.training is not None:
                    words = f"{task.training.script} on {task.training.nodes} nodes"
                waits = ", ".join(group.after) or "-"
                lead = "*" if task.lead and len(group.tasks) > 1 else ""
                sizes = [str(cpus_of(task)), str(gpus_of(task))]
                rows.append([group.name, task.name + lead, waits, *sizes, words[:50]])
        header = ["GROUP", "TASK", "AFTER", "CPUS", "GPUS", "COMMAND"]
        click.echo(render_table(header, rows), nl=False)
        here = f"{machine.num_cpus} CPUs, {len(machine.gpus)} GPUs here"
        click.echo(f"\nlocal: {size_of(plan.groups)}; {here}")
        click.echo("nothing was started (--dry-run)", err=True)

    def submit(self, run_dir: "RunDir", plan: "WorkflowPlan", *, detach: bool) -> int:
        from torchmuster.core.cli.ending import follow_run, leave_in_background

        if detach:
            return leave_in_background(run_dir, plan.run_id)
        from torchmuster.core.files.layout import near
        from torchmuster.workflow.owner.workflow import own_workflow

        shown = near(os.path.dirname(os.path.dirname(run_dir.logs)))

        def follow(voice: "TerminalVoice") -> "WorkflowResult":
            voice.say(f"run {short_id(plan.run_id)}: {size_of(plan.groups)}; logs in {shown}")
            return own_workflow(run_dir, voice)

        return follow_run(plan, run_dir, follow, say=say_end)


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
    """A workflow on ssh hosts: this process owns it, and tasks run there."""

    def check(self, plan: "WorkflowPlan", *, detach: bool) -> None:
        from torchmuster.workflow.owner.capacity import largest_min_hosts
        from torchmuster.workflow.plan import TaskNetwork

        site, found = self.place.site, list[UsageError]()
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
            fix = f"nodes: {len(hosts)}, or more hosts"
            found.append(UsageError(what, where=site.origin, fix=fix))
        if found:
            raise ManyErrors(found)

    def show(self, plan: "WorkflowPlan", machine: "Machine", *, as_json: bool) -> None:
        """Print the ssh command of each host, and where tasks would go if no other group runs."""
        from torchmuster.workflow.owner.capacity import describe_crowding

        del machine
        wishes = make_wishes(self.place.site, by_slots=True)
        bundle = make_bundle_for((sys.executable,), wishes)
        commands = [bundle.argv(host) for host in wishes.hosts]
        names = [host.name for host in wishes.hosts]
        placed = _sample_placement(plan, names)
        if as_json:
            shown = {"site": self.place.site.name, "hosts": names}
            click.echo(json.dumps({**shown, "commands": commands, "tasks": placed}, indent=1))
            return
        for command in commands:
            click.echo(f"$ {shlex.join(command)}")
        click.echo("\n# tasks, while no other group runs:")
        for task, hosts in placed.items():
            click.echo(f"#   {task}: {', '.join(hosts)}")
        sentence = describe_crowding(plan, len(names))
        if sentence is not None:
            click.echo(f"# {sentence}")
        click.echo(
            "# all hosts must see $MUSTER_HOME: tasks pass data on through the run directory"
        )
        click.echo("no host was contacted (--dry-run)", err=True)

    def submit(self, run_dir: "RunDir", plan: "WorkflowPlan", *, detach: bool) -> int:
        """Run a prepared workflow on the hosts and follow it to its end.

        Raises:
            ChannelError: Too few hosts can be used.
            UsageError: Hosts don't see the run directory.
        """
        from torchmuster.core.cli.ending import follow_run
        from torchmuster.core.files import atomic

        del detach  # `check` has refused it
        atomic.write_json(run_dir.site, {"site": self.place.site.name})
        return follow_run(plan, run_dir, partial(self._follow, run_dir, plan), say=say_end)

    def _follow(
        self, run_dir: "RunDir", plan: "WorkflowPlan", voice: "TerminalVoice"
    ) -> "WorkflowResult":
        from torchmuster.workflow.owner.capacity import HostCapacity, describe_crowding
        from torchmuster.workflow.owner.workflow import own_workflow

        hosts = self._task_hosts(run_dir, plan, voice)
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
            return own_workflow(run_dir, voice, HostCapacity(hosts.facts, hosts.broker))
        finally:
            hosts.close()

    def _task_hosts(
        self, run_dir: "RunDir", plan: "WorkflowPlan", voice: "TerminalVoice"
    ) -> "TaskHosts":
        from torchmuster.launcher.engines.sites import setup_origin
        from torchmuster.launcher.net.remote_messages import SetUpTasks
        from torchmuster.workflow.owner.capacity import largest_min_hosts
        from torchmuster.workflow.owner.task_hosts import TaskHosts

        site = self.place.site
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


class AsJobs(WorkflowCell):
    """A workflow as jobs of a scheduler, one per group."""

    def show(self, plan: "WorkflowPlan", machine: "Machine", *, as_json: bool) -> None:
        del machine
        show_jobs(plan, self.place.name, as_json=as_json)

    def with_task_setup(self, plan: "WorkflowPlan") -> "WorkflowPlan":
        from torchmuster.launcher.engines.sites import job_of_site, setup_origin

        site = self.place.site
        lines = job_of_site(site).node_lines or ()
        return replace(plan, setup=lines, setup_origin=setup_origin(site))

    def submit(self, run_dir: "RunDir", plan: "WorkflowPlan", *, detach: bool) -> int:
        """Submit all groups as jobs and follow them; Ctrl-C leaves the jobs alone, twice cancels."""
        from torchmuster.core.cli.ending import follow_run, note_start, print_id
        from torchmuster.workflow.owner.batch import submit_groups

        dialect = load_dialect(self.place.site.kind)
        job_ids = submit_groups(plan, run_dir, dialect, self.place.site)
        if detach:
            note_start(run_dir)
            return print_id(plan.run_id)
        follow = partial(_follow_jobs, run_dir, dialect, job_ids)
        return follow_run(plan, run_dir, follow, say=say_end)


def _follow_jobs(
    run_dir: "RunDir", dialect: "Dialect", job_ids: dict[str, str], voice: "TerminalVoice"
) -> "WorkflowResult | None":
    import asyncio

    from torchmuster.workflow.owner.batch import WorkflowFollower

    name = short_id(os.path.basename(run_dir.path))
    jobs = ", ".join(f"{group} is job {job_id}" for group, job_id in list(job_ids.items())[:8])
    voice.say(f"run {name}: {jobs} of {dialect.name}; files in {run_dir.path}")
    view = asyncio.run(WorkflowFollower(run_dir, dialect, job_ids, voice).follow())
    if view is None or view.result is None:
        voice.say(f"the jobs continue: muster status {name}")
        return None
    return view.result


def show_jobs(plan: "WorkflowPlan", engine: str, *, as_json: bool) -> None:
    """Print the submit commands and whole scripts of all groups, for each chosen site.

    Raises:
        UsageError: The site has no job scripts, or does not exist.
    """
    sites = my_sites()
    chosen = list(sites.sites.values()) if engine == ALL else [sites.get(engine)]
    with_scripts = [site for site in chosen if site.is_batch and sees_files(site.kind)]
    if not with_scripts:
        what = f"`{engine}` takes no job scripts: it is of kind {chosen[0].kind}"
        raise UsageError(what, where=chosen[0].origin, fix="leave --dry-run out")
    if as_json:
        shown = [entry for site in with_scripts for entry in _jobs_as_plain(plan, site)]
        click.echo(json.dumps(shown, indent=1))
        return
    for text in [_render_jobs(plan, site) for site in with_scripts]:  # all or none
        click.echo(text, nl=False)
    for site in chosen:
        if site.kind == "ssh":
            click.echo(f"{site.name} (ssh) has no job scripts", err=True)
    click.echo("nothing was submitted (--dry-run)", err=True)


def _render_jobs(plan: "WorkflowPlan", site: "Site") -> str:
    """Return the submit commands as a shell text, followed by the job scripts."""
    from torchmuster.workflow.jobs import job_variables

    dialect, variables, jobs = load_dialect(site.kind), job_variables(plan), _jobs(plan, site)
    title = site.name if site.name == site.kind else f"{site.name} ({site.kind})"
    lines = [f"# {title}: {len(jobs)} job{'s' if len(jobs) != 1 else ''}"]
    for group in jobs:
        argv = dialect.submit_argv(group.job, _script_name(group))
        lines.append(f"{variables[group.group]}=$({' '.join(map(_shown, argv))})")
    for group in jobs:
        lines += ["", f"# ---- {_script_name(group)}"]
        lines += [f"# not mapped: {sentence}" for sentence in group.warnings]
        lines.append(dialect.script(group.job).rstrip("\n"))
    return "\n".join([*lines, "", ""])


def _jobs(plan: "WorkflowPlan", site: "Site") -> "tuple[GroupJob, ...]":
    from torchmuster.core.files.layout import RunDir, runs_dir
    from torchmuster.launcher.engines.sites import job_of_site
    from torchmuster.workflow.jobs import job_variables, plan_jobs

    run_dir = RunDir(os.path.join(runs_dir(), plan.run_id))
    shown = {group: f"${variable}" for group, variable in job_variables(plan).items()}
    return plan_jobs(plan, load_dialect(site.kind), run_dir, job_of_site(site), shown)


def _script_name(group: "GroupJob") -> str:
    return f"{group.group}.sh"


def _shown(word: str) -> str:
    """Quote a word for display; variables of other jobs stay variables."""
    return f'"{word}"' if "$JOB_" in word else shlex.quote(word)


def _jobs_as_plain(plan: "WorkflowPlan", site: "Site") -> list[dict[str, Any]]:
    dialect = load_dialect(site.kind)
    return [
        {
            "engine": dialect.name,
            "site": site.name,
            "group": group.group,
            "submit": dialect.submit_argv(group.job, _script_name(group)),
            "script": dialect.script(group.job),
            "not_mapped": list(group.warnings),
            "node_tasks": list(group.node_tasks),
        }
        for group in _jobs(plan, site)
    ]


def workflow_summary(result: "WorkflowResult") -> str:
    """Return the last line of a workflow's output."""
    from torchmuster.core.model.text import few_of
    from torchmuster.workflow.record import State

    text = f"{result.state.value} after {result.elapsed_s:.1f} s"
    failed = [f"{name} {state}" for name, state in result.groups.items() if state != "COMPLETED"]
    if result.state is State.COMPLETED:
        return text
    go_on = f"continue with: muster restart {short_id(result.run_id)}"
    return f"{text} ({few_of(failed, 6)}); {go_on}" if failed else f"{text}; {go_on}"


def say_end(voice: "TerminalVoice", result: "WorkflowResult", run_dir: "RunDir") -> int:
    """Show the end of a workflow; return its exit code."""
    from torchmuster.core.cli.ending import say_report
    from torchmuster.core.cli.messages import paint_report, uses_colour
    from torchmuster.workflow.owner.view import describe_workflow_results
    from torchmuster.workflow.record import State

    for report in result.reports:
        voice.print(paint_report(report, colour=uses_colour()))
    voice.say(workflow_summary(result))
    if not result.state.is_failed:
        voice.say(describe_workflow_results(run_dir, tuple(result.groups)))
    elif result.state is not State.FAILED_CANCELED:
        say_report(voice, run_dir, result.run_id)
    return result.exit_code


def size_of(groups: Any) -> str:
    """Return the size of a workflow as text: `2 groups, 5 tasks`."""
    num_tasks = sum(len(group.tasks) for group in groups)
    tasks = f"{num_tasks} task{'s' if num_tasks != 1 else ''}"
    return f"{len(groups)} group{'s' if len(groups) != 1 else ''}, {tasks}"
