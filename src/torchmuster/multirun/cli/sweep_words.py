"""Shared by all cells of `muster sweep`: the plan from the command line, and the final report."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.model.text import span
from torchmuster.errors import UsageError

if TYPE_CHECKING:
    from torchmuster.core.files.terminal import TerminalVoice
    from torchmuster.core.model.verdict import Result
    from torchmuster.core.spec.launch import RunRequest
    from torchmuster.core.spec.problems import Problems
    from torchmuster.multirun.sweep.plan import SweepPlan
    from torchmuster.multirun.views.sweep_view import SweepView


def sweep_request(given: dict[str, Any], *, in_pods: bool = False) -> "RunRequest":
    """Return the request for a member of a sweep, as for `muster run`.

    Raises:
        UsageError: It has several nodes and no pods; only a session can do that.
    """
    from torchmuster.core.spec.launch import RunRequest

    if given["nodes"] > 1 and not in_pods:
        raise UsageError(
            "members of several nodes are for clusters whose nodes are pods",
            where="--nodes",
            fix="`muster session start --nodes N`, then `muster sweep --session NAME`, runs each member on all nodes",
        )
    return RunRequest(
        script=given["script"],
        args=given["args"],
        call=given.get("call"),
        module=given["module"],
        nproc_per_node=given["nproc_per_node"] or "1",
        nodes=str(given["nodes"]) if in_pods else None,
        python=given["python"],
        set_env=given["set_env"],
        preload=given["preload"],
        start=given["start"],
        grace=given["grace"],
        tee="none",
        time_limit=given["time_limit"],
        queue=given["queue"],
        account=given["account"],
        cpus_per_node=given["cpus_per_node"],
        gpus_per_node=given["gpus_per_node"],
        mem=given["mem"],
    )


def plan_sweep(
    given: dict[str, Any],
    request: "RunRequest",
    gpus: "Sequence[str]",
    problems: "Problems",
    *,
    is_job: bool = False,
) -> "SweepPlan":
    """Return the plan of a sweep.

    Args:
        given: The options of the command line.
        request: The request for a member.
        gpus: The GPUs of this machine, or of a node of the job.
        problems: The problems found so far.
        is_job: Whether members run elsewhere, so this machine does not limit the slots.

    Raises:
        ManyErrors: All problems of the command line.
    """
    from torchmuster.core.model.plan import ScriptKind
    from torchmuster.core.owner.create import choose_run_id
    from torchmuster.core.spec.launch import plan_run
    from torchmuster.multirun.sweep.imports import needs_only_the_standard_library
    from torchmuster.multirun.sweep.plan import MetricChoice, MetricGoal, SweepPlan, ValueStyle
    from torchmuster.multirun.sweep.space import check_members, plan_members

    run_id = ""
    try:
        run_id = choose_run_id(given["script"], given["run_id"], given["name"])
    except UsageError as error:
        problems.found.append(error)
    if (order := given.get("order")) is not None:
        names, members = check_members(order.names, order.members, problems)
    else:
        names, members = plan_members(given["grid"], given["zipped"], problems)
    if given["stop"] is not None and given["metric"] is None:
        fix = "--metric loss, or another that the script records or prints"
        problems.add("`--stop` compares members by a metric", "--stop", fix=fix)
    run = problems.checked(plan_run(request, run_id, gpus, problems, simulated=not is_job))
    script: str | None = os.path.join(run.program.cwd, run.program.target)
    if run.program.kind is not ScriptKind.FILE:
        script = run.program.call.module_file if run.program.call is not None else None
    is_alone = script is not None and run.num_workers(0) == 1 and not is_job
    if is_alone and needs_only_the_standard_library(str(script)):
        run = replace(run, program=replace(run.program, has_torch=False))
    metric = None
    if given["metric"] is not None:
        metric = MetricChoice(name=given["metric"], goal=MetricGoal(given["goal"]))
    room = len(gpus) * given["per_gpu"] if gpus else len(os.sched_getaffinity(0))
    slots = given["slots"] or (len(members) if is_job else max(1, room // run.num_workers(0)))
    return SweepPlan(
        run=run,
        names=names,
        members=members,
        style=ValueStyle(given["style"]),
        slots=min(slots, len(members)),
        per_gpu=given["per_gpu"],
        metric=metric,
        stop=given["stop"],
    )


def say_end(
    sweep: "SweepView | None", result: "Result", voice: "TerminalVoice", run_dir: RunDir
) -> None:
    """Report how a sweep has ended: the table, the failure, the best."""
    from torchmuster.core.cli.messages import paint_report, uses_colour
    from torchmuster.core.model.states import RunState
    from torchmuster.multirun.cli.sweep_record import (
        counted,
        describe_best,
        describe_missing_metric,
        members_table,
    )

    if sweep is not None:
        voice.print(members_table(sweep))
    if result.report is not None:
        voice.print(paint_report(result.report, colour=uses_colour()))
    if sweep is not None:
        best = describe_best(sweep)
        more = f"; best {best}" if best is not None else ""
        voice.say(f"{counted(sweep)}, in {span(result.elapsed_s)}{more}")
        if (missing := describe_missing_metric(sweep, run_dir)) is not None:
            voice.say(missing)
    if result.state is not RunState.SUCCEEDED and result.report is None:
        voice.say(f"muster restart {short_id(result.run_id)} goes on with what has not succeeded")
