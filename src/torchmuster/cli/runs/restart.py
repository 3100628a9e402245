"""`muster restart`."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from torchmuster.cli import options, status_line
from torchmuster.cli.completion import complete_runs
from torchmuster.errors import UsageError
from torchmuster.files.layout import short_id
from torchmuster.model.plan import WARN_S

if TYPE_CHECKING:
    from torchmuster.files.layout import RunDir
    from torchmuster.model.plan import RunPlan
    from torchmuster.owner.views.run_view import RunView


@click.command()
@click.argument("run", shell_complete=complete_runs)
@options.detach
@status_line.option
def restart(run: str, *, detach: bool) -> int:
    """Start RUN again with its options in the same place: a new run on the same snapshots.

    A run that was a job is submitted again; a run on ssh hosts is started on them.

    Of a workflow, the groups that have completed are not run again. A sweep goes on in its own folder, with
    the members that have not succeeded.
    """
    from torchmuster.cli.ending import shown_here
    from torchmuster.cli.runs.start import start
    from torchmuster.cli.workflow_views import restart_workflow
    from torchmuster.diagnose.facts.gpus import visible_gpus
    from torchmuster.errors import NotFoundError
    from torchmuster.model.states import RunState
    from torchmuster.owner.create import create_run_dir, link_snapshots, new_run_id
    from torchmuster.owner.views.find import find_run, owner_lives

    view = find_run(run)
    is_forgotten = view.state is RunState.UNKNOWN and not owner_lives(view.run_dir)
    if not view.state.is_final and not is_forgotten:
        raise UsageError(
            f"the run {view.run_id} has not ended: it is {view.state.value}",
            fix=f"muster cancel {view.run_id}, then restart it",
        )
    if view.is_workflow:
        return restart_workflow(view, detach=detach)
    if view.is_sweep:
        from torchmuster.cli.runs.sweep import restart_sweep

        return restart_sweep(view, detach=detach)
    plan = view.plan
    if plan is None:
        raise NotFoundError("the run has no plan that can be read", where=view.run_dir.plan)
    if plan.rdzv_id is not None:
        raise UsageError(
            f"the run {view.run_id} was started by `muster torchrun`, once on each machine",
            fix="type its command again, with folder=... on a shared file system in the script",
        )
    if plan.engine == "local":
        _check_snapshots(view)
    run_id = new_run_id(plan.program.target)
    again = replace(plan, run_id=run_id, job_id=None, session=None, every_line=())
    if os.path.isfile(view.run_dir.job):
        return _submit_again(again, view.run_dir, detach=detach)
    if plan.job_id is not None:
        return _run_in_job_again(replace(again, node_names=()), view, detach=detach)
    if plan.engine != "local":
        from torchmuster.cli.runs.ssh import run_again_on_hosts

        return run_again_on_hosts(again, view, detach=detach)
    again = shown_here(again, detach=detach)
    run_dir = create_run_dir(again)
    link_snapshots(run_dir, view.run_dir.snapshots)
    return start(again, run_dir, visible_gpus(), detach=detach)


def _check_snapshots(view: "RunView") -> None:
    """Refuse where what the training has saved is gone: it would begin again at step 0 without a word."""
    from torchmuster.owner.create import holds_snapshots
    from torchmuster.owner.views.account import find_saved

    saved = find_saved(view.run_dir)
    if saved is not None and not saved.is_seen and not holds_snapshots(saved.folder):
        raise UsageError(
            f"the snapshots of {short_id(view.run_id)} are gone: the last was of step {saved.step}",
            where=saved.folder,
            fix="put them back, or type its command again to start over at step 0",
        )


def _submit_again(plan: "RunPlan", old: "RunDir", *, detach: bool) -> int:
    """Submit a job like the one that conducted the run: on a login node nothing is started here."""
    from torchmuster.cli.runs.job import submit_and_follow
    from torchmuster.owner.create import create_run_dir, link_snapshots
    from torchmuster.owner.jobs.jobs import read_request

    if os.path.isdir(os.path.join(old.path, "pods")):
        from torchmuster.cli.runs.pods import check_origin

        check_origin(old)
    asked = read_request(old)
    if asked.request.brings:
        from torchmuster.cli.runs.pods import submit_to_pods_again

        return submit_to_pods_again(plan, old, asked, detach=detach)
    run_dir = create_run_dir(plan)
    link_snapshots(run_dir, old.snapshots)
    job = asked.renamed(old, run_dir)
    return submit_and_follow(
        plan, run_dir, job, asked.dialect, num_more=asked.num_more, detach=detach
    )


def _run_in_job_again(plan: "RunPlan", view: "RunView", *, detach: bool) -> int:
    """Run on the nodes of the job around us; the one that the run was in has ended, or is this one.

    Raises:
        UsageError: There is no job around us, or the run is to go on in the background.
    """
    from torchmuster.cli.runs.job import find_allocation, no_background, run_in_allocation

    inside = find_allocation()
    if inside is None:
        job_id = view.plan.job_id if view.plan is not None else None
        raise UsageError(
            f"the run {short_id(view.run_id)} used the nodes of job {job_id}, and this shell is not in a job",
            fix=f"in a new job: muster restart {short_id(view.run_id)}",
        )
    if detach:
        raise no_background()
    return run_in_allocation(plan, inside, WARN_S, view.run_dir.snapshots)
