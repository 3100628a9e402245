"""Commands on the record of a workflow: its status, logs, replay and restart."""

import contextlib
import time
from typing import TYPE_CHECKING

from torchmuster.core.files.layout import short_id
from torchmuster.errors import UsageError
from torchmuster.launcher.cli.echo import echo, echo_json

if TYPE_CHECKING:
    from torchmuster.core.cli.place import Place
    from torchmuster.workflow.owner.view import WorkflowRun, WorkflowView

_MAX_ROWS = 60


def check_logs(view: "WorkflowRun", task: str | None) -> None:
    """Accept any task; the search for its logs refuses unknown ones.

    Raises:
        NotFoundError: The plan can't be read.
    """
    del task
    view.tasks_view()


def check_replay(view: "WorkflowRun") -> None:
    """Refuse to replay a step.

    Raises:
        UsageError: Always, because only its training tasks have steps.
    """
    name = short_id(view.run_id)
    fix = f"muster replay {name}/TASK --step N"
    raise UsageError(f"{name} is a workflow: its training tasks have steps", fix=fix)


def print_status(view: "WorkflowRun", *, as_json: bool) -> int:
    """Print the status of a workflow: every task with its state and the reason for every wait."""
    from torchmuster.core.cli.messages import paint_report
    from torchmuster.core.model import codec
    from torchmuster.launcher.cli.record import print_account
    from torchmuster.launcher.views.account import account_of
    from torchmuster.workflow.cli.places import workflow_summary

    workflow = view.tasks_view()
    if as_json:
        plain = {
            "run_id": view.run_id,
            "state": view.state.value,
            "workflow": workflow.plan.name,
            "groups": codec.to_plain(workflow.groups),
            "result": codec.to_plain(workflow.result),
        }
        echo_json(plain)
        return 0
    echo(f"run      {short_id(view.run_id)}")
    echo(f"state    {view.state.value}")
    echo(f"file     {workflow.plan.spec_path}: workflow {workflow.plan.name}")
    echo(f"folder   {view.run_dir.path}")
    print_account(account_of(view, time.time()))
    echo()
    _print_tasks(workflow)
    if workflow.is_elsewhere and view.state.value == "lost":
        echo("\nit has no pods any more: the machine that submitted it has its end", err=True)
    elif view.state.value == "lost":
        why = "its owner was killed before it ended, or could not write the result (a full disk?)"
        go_on = f"muster restart {short_id(view.run_id)} continues with what had not finished"
        echo(f"\n{why}\nhint: {go_on}", err=True)
    if workflow.result is not None:
        echo(f"\n{workflow_summary(workflow.result)}")
        for report in workflow.result.reports:
            echo(paint_report(report, colour=False), nl=False)
    return 0


def _print_tasks(workflow: "WorkflowView") -> None:
    from torchmuster.launcher.ui.table import render_table

    rows: list[list[str]] = []
    for group in workflow.groups:
        several = len(group.tasks) > 1
        for task in group.tasks:
            lead = "*" if task.is_lead and several else ""
            why = task.why or (group.why if not task.state.is_final else None) or ""
            cells = [group.name, task.name + lead, task.state.value, str(task.attempt)]
            rows.append([*cells, why[:90]])
    shown = rows[:_MAX_ROWS]
    echo(render_table(["GROUP", "TASK", "STATE", "ATTEMPT", "WHY"], shown), nl=False)
    if len(rows) > len(shown):
        echo(f"and {len(rows) - len(shown)} more tasks: muster status --json has all")


def restart(view: "WorkflowRun", *, detach: bool) -> int:
    """Restart a workflow: start a new run that reuses the completed groups."""
    import os
    import uuid
    from dataclasses import replace

    from torchmuster.core.owner.create import new_run_id
    from torchmuster.workflow.owner.workflow import create_workflow_dir

    workflow = view.tasks_view()
    if workflow.is_elsewhere:
        what = f"the workflow {short_id(view.run_id)} was submitted on another machine"
        why = "its file and the outputs that have come are there"
        raise UsageError(what, where=view.run_dir.path, why=why, fix="restart it there")
    finished = workflow.finished_groups()
    if len(finished) == len(workflow.groups):
        fix = f"muster submit {workflow.plan.spec_path} runs it again"
        raise UsageError(f"all groups of the run {view.run_id} have completed", fix=fix)
    plan = replace(
        workflow.plan,
        run_id=new_run_id(workflow.plan.name),
        uuid=uuid.uuid4().hex,
        reused=dict.fromkeys(finished, view.run_dir.path),
    )
    texts = ["", ""]
    for i, path in enumerate((view.run_dir.spec, view.run_dir.rendered)):
        with contextlib.suppress(OSError), open(path) as file:
            texts[i] = file.read()
    place = _place_of(view)
    at = place.cell("workflow")
    at.check(plan, detach=detach)
    at.settle_again(view.run_dir)
    run_dir = create_workflow_dir(plan, texts[0], texts[1])
    for task in (task for group in plan.groups for task in group.tasks):
        earlier = os.path.join(view.run_dir.task_folder(task.name), "snapshots")
        if task.training is not None and os.path.isdir(earlier):
            ours = os.path.join(run_dir.task_folder(task.name), "snapshots")
            os.symlink(os.path.realpath(earlier), ours)
    code: int = at.submit(run_dir, plan, detach=detach)
    return code


def _place_of(view: "WorkflowRun") -> "Place":
    """Return the place for runs to which a workflow was submitted.

    Raises:
        UsageError: Its site no longer exists.
    """
    from torchmuster.core.cli.find import Where, find_place
    from torchmuster.core.files import atomic
    from torchmuster.core.spec.problems import Problems
    from torchmuster.launcher.jobs.jobs import read_jobs

    noted = atomic.read_json(view.run_dir.site)
    name = str(noted.get("site")) if isinstance(noted, dict) else None
    if (jobs := read_jobs(view.run_dir)) is not None:
        name = str(atomic.read_json(view.run_dir.jobs).get("site") or jobs[0].name)
    problems = Problems()
    place = find_place(Where(engine=name, here=name is None), problems)
    problems.checked(place)
    return place
