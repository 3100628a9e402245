"""`muster restart`."""

from dataclasses import replace

import click

from torchmuster.cli.completion import complete_runs


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", shell_complete=complete_runs)
@click.option("--detach", is_flag=True, help="Return at once; the run goes on in the background.")
def restart(run: str, *, detach: bool) -> int:
    """Start RUN again with what it was started with: a new run on the same snapshots.

    Of a workflow, the groups that have completed are not run again.
    """
    from torchmuster.cli.run import start
    from torchmuster.cli.workflow_views import restart_workflow
    from torchmuster.doctor.gpus import visible_gpus
    from torchmuster.errors import NotFoundError, UsageError
    from torchmuster.model.verdict import RunState
    from torchmuster.run.create import create_run_dir, link_snapshots, new_run_id
    from torchmuster.run.find import find_run, owner_lives

    view = find_run(run)
    is_forgotten = view.state is RunState.UNKNOWN and not owner_lives(view.run_dir)
    if not view.state.is_final and not is_forgotten:
        raise UsageError(
            f"the run {view.run_id} has not ended: it is {view.state.value}",
            fix=f"muster cancel {view.run_id}, then restart it",
        )
    if view.is_workflow:
        return restart_workflow(view, detach=detach)
    plan = view.plan
    if plan is None:
        raise NotFoundError("the run has no plan that can be read", where=view.run_dir.plan)
    if plan.rdzv_id is not None:
        raise UsageError(
            f"the run {view.run_id} was started by `muster torchrun`, once on each machine",
            fix="type its command again, with folder=... on a shared file system in the script",
        )
    again = replace(plan, run_id=new_run_id(plan.program.target), engine="local", job_id=None)
    run_dir = create_run_dir(again)
    link_snapshots(run_dir, view.run_dir.snapshots)
    return start(again, run_dir, visible_gpus(), detach=detach)
