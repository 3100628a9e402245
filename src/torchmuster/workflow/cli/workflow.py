"""Start a prepared workflow here or as jobs and follow it, or show its plan as a table."""

import json
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.files.layout import short_id

if TYPE_CHECKING:
    from torchmuster.core.files.layout import RunDir
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.model.verdict import WorkflowResult
    from torchmuster.launcher.engines.base import Dialect
    from torchmuster.launcher.spec.site import Site
    from torchmuster.workflow.owner.capacity import Machine
    from torchmuster.workflow.plan import WorkflowPlan


def start_workflow(run_dir: "RunDir", plan: "WorkflowPlan", *, detach: bool) -> int:
    """Run a prepared workflow to its end, or start it in the background."""
    from torchmuster.core.cli.ending import follow_run, leave_in_background

    if detach:
        return leave_in_background(run_dir, plan.run_id)
    from torchmuster.core.files.layout import near
    from torchmuster.workflow.owner.workflow import follow_workflow

    shown = near(os.path.dirname(os.path.dirname(run_dir.logs)))

    def follow(voice: "TerminalVoice") -> "WorkflowResult":
        voice.say(f"run {short_id(plan.run_id)}: {size_of(plan.groups)}; logs in {shown}")
        return follow_workflow(run_dir, voice)

    return follow_run(plan, run_dir, follow, say=say_end)


def submit_to_scheduler(
    run_dir: "RunDir", plan: "WorkflowPlan", site: "Site", *, detach: bool
) -> int:
    """Submit all groups as jobs and follow them; Ctrl-C leaves the jobs alone, twice cancels."""
    from torchmuster.core.cli.ending import follow_run, note_start, print_id
    from torchmuster.launcher.engines.registry import load_dialect
    from torchmuster.workflow.owner.batch import submit_groups

    dialect = load_dialect(site.kind)
    job_ids = submit_groups(plan, run_dir, dialect, site)
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


def show_plan(plan: "WorkflowPlan", machine: "Machine", *, as_json: bool) -> None:
    """Print a table of the tasks that would run on this machine."""
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
            cells = [group.name, task.name + lead, waits, str(cpus_of(task)), str(gpus_of(task))]
            rows.append([*cells, words[:50]])
    header = ["GROUP", "TASK", "AFTER", "CPUS", "GPUS", "COMMAND"]
    click.echo(render_table(header, rows), nl=False)
    click.echo(
        f"\nlocal: {size_of(plan.groups)}; {machine.num_cpus} CPUs, {len(machine.gpus)} GPUs here"
    )
    click.echo("nothing was started (--dry-run)", err=True)


def workflow_summary(result: "WorkflowResult") -> str:
    """Return the last line of a workflow's output."""
    from torchmuster.core.model.states import State
    from torchmuster.core.model.text import few_of

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
    from torchmuster.core.model.states import State
    from torchmuster.launcher.views.account import describe_workflow_results

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
