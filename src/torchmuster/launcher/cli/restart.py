"""`muster restart`."""

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from torchmuster.core.cli import ending, options
from torchmuster.core.cli.answer import AnswerCommand, answers
from torchmuster.core.cli.options import complete_runs
from torchmuster.core.files.layout import short_id
from torchmuster.errors import UsageError

if TYPE_CHECKING:
    from torchmuster.launcher.views.run_view import RunView


@click.command(cls=AnswerCommand)
@click.argument("run", shell_complete=complete_runs)
@options.detach
@ending.option
@answers
@options.starts
def restart(run: str, *, detach: bool) -> int:
    """Start RUN again with its options in the same place: a new run on the same snapshots.

    A run that was a job is submitted again; a run on ssh hosts is started on them.

    Of a workflow, the groups that have completed are not run again. A sweep goes on in its own
    folder, with the members that have not succeeded.
    """
    from torchmuster.core.model.states import RunState
    from torchmuster.launcher.cli.kinds.table import restart_of
    from torchmuster.launcher.views.find import find_run, owner_lives, view_run

    view = find_run(run)
    if (whole := view.whole) is not None:
        part, view = short_id(view.run_id), view_run(whole)
        click.echo(f"muster: {part} is a part of {short_id(view.run_id)}, which goes on", err=True)
    is_forgotten = view.state is RunState.UNKNOWN and not owner_lives(view.run_dir)
    if not view.state.is_final and not is_forgotten:
        raise UsageError(
            f"the run {view.run_id} has not ended: it is {view.state.value}",
            fix=f"muster cancel {short_id(view.run_id)}, then restart it",
        )
    ending.continued = view.run_dir
    return restart_of(view)(view, detach=detach)


def restart_run(view: "RunView", *, detach: bool) -> int:
    """Restart a run: start a new one on the same snapshots."""
    from torchmuster.core.cli.place import begin
    from torchmuster.core.model.contract import replay_order
    from torchmuster.core.model.plan import Tee
    from torchmuster.core.owner.create import name_of, new_run_id
    from torchmuster.core.spec.problems import Problems
    from torchmuster.errors import NotFoundError
    from torchmuster.launcher.cli.places.find import find_restart_place

    plan = view.plan
    if plan is None:
        raise NotFoundError("the run has no plan that can be read", where=view.run_dir.plan)
    name = short_id(view.run_id)
    if plan.is_session:
        what = f"{name} is a session: it holds nodes for runs, and has no training to go on with"
        raise UsageError(what, fix="muster session start")
    if plan.is_replay:
        order = replay_order(dict(plan.node_setup.environment))
        what = f"{name} is a replay: it made a step of another run again"
        raise UsageError(what, fix=f"muster restart {short_id(order.run_id)}" if order else None)
    if plan.is_of_many_commands:
        raise UsageError(
            f"the run {view.run_id} was started by `muster torchrun`, once on each machine",
            fix="type its command again, with folder=... on a shared file system in the script",
        )
    if plan.rdzv_id is not None:  # a single command of `muster torchrun`: restart it here
        plan = replace(plan, rdzv_id=None, engine="local", tee=Tee.ALL, restart_hint=False)
    place, snapshots = find_restart_place(plan, view)
    problems = Problems()
    if detach:
        place.check_detach(f"muster restart {short_id(view.run_id)}", problems)
    run_id = new_run_id(plan.program.target, name_of(view.run_id))
    again = replace(plan, run_id=run_id, job_id=None, session=None, every_line=())
    return begin(place, problems.checked(again), detach=detach, snapshots=snapshots)
