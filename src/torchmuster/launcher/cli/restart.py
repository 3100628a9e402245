"""`muster restart` and `muster replay`: a run, or one of its steps, again."""

import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from torchmuster.core.cli import ending, options
from torchmuster.core.cli.ending import AnswerCommand, answers, shown_here
from torchmuster.core.cli.here import Here
from torchmuster.core.cli.options import complete_runs
from torchmuster.core.cli.place import begin, start_and_follow, warn
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.model import contract
from torchmuster.core.model.contract import replay_order
from torchmuster.core.model.plan import Program, RunPlan, Tee
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import few_of, in_one_line
from torchmuster.core.owner.create import create_run_dir, name_of, new_run_id
from torchmuster.core.owner.record import read_result
from torchmuster.core.spec.problems import Problems
from torchmuster.errors import NotFoundError, UsageError
from torchmuster.launcher.cli.places import find_restart_place
from torchmuster.launcher.cli.record import commands_of, restart_of
from torchmuster.launcher.engines.schedulers import guard
from torchmuster.launcher.files.code_copy import moved, root_of
from torchmuster.launcher.views.find import find_run, owner_lives, view_run
from torchmuster.launcher.views.replay import StepOfRun, changed_code, commit_that_ran, find_step

if TYPE_CHECKING:
    from torchmuster.launcher.views.run_view import RunView


@click.command(cls=AnswerCommand)
@click.argument("run", shell_complete=complete_runs)
@options.detach
@ending.option
@answers
@options.add_start_options
def restart(run: str, *, detach: bool) -> int:
    """Start RUN again with its options in the same place: a new run on the same snapshots.

    A run that was a job is submitted again; a run on ssh hosts is started on them.

    Of a workflow, the groups that have completed are not run again. A sweep goes on in its own
    folder, with the members that have not succeeded.
    """
    view = find_run(run)
    if (whole := view.whole) is not None:
        part, view = short_id(view.run_id), view_run(whole)
        click.echo(f"muster: {part} is a part of {short_id(view.run_id)}, which goes on", err=True)
    is_forgotten = view.state is RunState.UNKNOWN and not owner_lives(view.run_dir)
    if not view.state.is_final and not is_forgotten:
        what = f"the run {view.run_id} has not ended: it is {view.state.value}"
        raise UsageError(what, fix=f"muster cancel {short_id(view.run_id)}, then restart it")
    ending.continued = view.run_dir
    return restart_of(view)(view, detach=detach)


def restart_run(view: "RunView", *, detach: bool) -> int:
    """Restart a run: start a new one on the same snapshots."""
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
        what = f"the run {view.run_id} was started by `muster torchrun`, once on each machine"
        fix = "type its command again, with folder=... on a shared file system in the script"
        raise UsageError(what, fix=fix)
    if plan.rdzv_id is not None:  # a single command of `muster torchrun`: restart it here
        plan = replace(plan, rdzv_id=None, engine="local", tee=Tee.ALL, restart_hint=False)
    place, snapshots = find_restart_place(plan, view)
    problems = Problems()
    if detach:
        place.check_detach(f"muster restart {short_id(view.run_id)}", problems)
    run_id = new_run_id(plan.program.target, name_of(view.run_id))
    again = replace(plan, run_id=run_id, job_id=None, session=None, every_line=())
    return begin(place, problems.checked(again), detach=detach, snapshots=snapshots)


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.option(
    "--step", type=click.IntRange(min=1), metavar="N", help="Default: the one that failed."
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    metavar="R",
    help="Which rank to look into; default the one that failed, else 0.",
)
@click.option(
    "--no-debugger", is_flag=True, help="Print what pdb would show; so without a terminal."
)
@click.option(
    "--code",
    type=click.Path(exists=True, file_okay=False),
    metavar="FOLDER",
    help="Run the code in FOLDER, e.g. a work tree of the run's commit.",
)
@click.option("--changed-code", is_flag=True, help="Go on though the code is not that of the run.")
@options.here
def replay(
    run: str,
    *,
    step: int | None,
    rank: int | None,
    no_debugger: bool,
    code: str | None,
    changed_code: bool,
    here: bool,
) -> int:
    """Make one step of RUN again on this machine, from the newest snapshot before it, and look into it.

    All ranks of the step are started here, with the same samples, random numbers and sums. pdb
    opens in one of them at the first NaN, or at the exception. The run itself and its snapshots
    stay as they are.
    """
    view = find_run(run)
    name = short_id(view.run_id)
    commands_of(view).check_replay(view)
    plan = view.plan
    if plan is None:
        raise NotFoundError("the run has no plan that can be read", where=view.run_dir.plan)
    if plan.is_replay:
        what = f"{name} is a replay itself"
        raise UsageError(what, fix="name the run whose step it made again: `muster ps` lists them")
    if not here and os.environ.get("MUSTER_ON") != "local":
        _check_machine(name)
    found = find_step(view, step)
    if rank is not None and rank >= found.world_size:
        raise UsageError(
            f"there is no rank {rank}: {found.world_size} have made step {found.number}, rank 0 to {found.world_size - 1}",
            where=f"--rank {rank}",
            fix=f"--rank {found.rank}",
        )
    if code is not None:
        here_now = os.path.abspath(code)
        plan = replace(plan, program=moved(plan.program, root_of(plan.program.cwd), here_now))
    _check_code(view, plan.program, go_on=changed_code)
    found = found if rank is None else replace(found, rank=rank)
    debugger = not no_debugger and os.isatty(0) and os.isatty(1)
    place = Here()
    shares = 0 < len(place.gpus) < found.world_size
    plan = _plan(plan, view.run_id, found, debugger=debugger, shares=shares)
    warn([_what(view.run_id, found)])
    plan = shown_here(plan)
    run_dir = create_run_dir(plan)
    status = start_and_follow(place, plan, run_dir, detach=False)
    _compare(run_dir, found)
    return status


def _compare(run_dir: "RunDir", found: "StepOfRun") -> None:
    """Print whether the replay's exception equals that of the run, word for word."""
    if found.words is None:
        return
    result = read_result(run_dir)
    error = result.cause.error if result is not None and result.cause is not None else None
    same = error is not None and (error.type_name, error.message) == (found.failed, found.words)
    what = "the exception is that of the run, word for word"
    if not same:
        said = f"{found.failed}: {in_one_line(found.words)}"
        what = f"in the run the step ended otherwise, with {said}"
    warn([what])


def _check_machine(name: str) -> None:
    """Refuse to start all ranks of a run on a login node."""
    if (refusal := guard(os.environ, shutil.which)) is not None:
        fix = f"muster replay {name} in the shell of a job; --here replays on this machine anyway"
        raise UsageError(refusal.what, where=refusal.where, why=refusal.why, fix=fix)


def _check_code(view: "RunView", program: "Program", *, go_on: bool) -> None:
    """Refuse code that differs from what ran, unless the user allows it."""
    changed = changed_code(view, program.cwd)
    if changed is None:
        warn(["the record does not tell which code ran: it may have changed"])
    elif changed and go_on:
        warn([f"not as they ran: {few_of(changed, 5)}"])
    if not changed or go_on:
        return
    commit = commit_that_ran(view)
    before = f"`git worktree add FOLDER {commit[:12]}` and --code FOLDER; " if commit else ""
    raise UsageError(
        f"the code has changed since the run: {few_of(changed, 5)}",
        where=program.cwd,
        why="their SHA-256 are not those in the run's record",
        fix=f"{before}--changed-code replays with the files of now",
    )


def _what(run_id: str, found: "StepOfRun") -> str:

    number = found.snapshot
    since = "its newest snapshot before it" if number is None else f"the snapshot of step {number}"
    failed = f" ({found.failed})" if found.failed else ""
    return (
        f"step {found.number} of {short_id(run_id)}{failed}: from {since}, {found.world_size}"
        f" rank{'s' if found.world_size > 1 else ''}, looking into rank {found.rank}"
    )


def _plan(
    plan: "RunPlan", run_id: str, found: "StepOfRun", *, debugger: bool, shares: bool
) -> "RunPlan":
    """Return the plan of the replay: the same program and layout, on this machine, one attempt."""
    order = contract.ReplayOrder(
        step=found.number,
        rank=found.rank,
        run_id=run_id,
        snapshots=found.folder,
        debugger=debugger,
        gradients=found.gradients,
        shares_gpus=shares,
    )
    kept = (pair for pair in plan.node_setup.environment if pair[0] != contract.DEBUGGER_VARIABLE)
    said = [(contract.REPLAY_VARIABLE, order.text())]
    if debugger:
        said.append((contract.DEBUGGER_VARIABLE, f"{contract.PDB} {found.rank}"))
    setup = replace(plan.node_setup, environment=(*kept, *said), shipped=None, scratch=None)
    workers = (found.world_size,) if shares else found.workers
    return replace(
        plan,
        run_id=new_run_id(plan.program.target, "replay"),
        min_nodes=len(workers),
        max_nodes=len(workers),
        workers_per_node=workers,
        node_names=tuple(f"n{place + 1}" for place in range(len(workers))),
        limits=replace(plan.limits, max_restarts=0),
        node_setup=setup,
        tee=Tee.RANK_0 if found.rank == 0 else Tee.ALL,
        grow=False,
        stdin_rank=None,
        rdzv_id=None,
        restart_hint=False,
        preflight="off",
        engine="local",
        job_id=None,
        metrics_port=None,
        nodes_return=False,
        session=None,
        spares=0,
    )
