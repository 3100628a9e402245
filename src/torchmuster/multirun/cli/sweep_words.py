"""The plan of a sweep from the command line, for all its cells."""

import ast
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchmuster.core.model.plan import ScriptKind
from torchmuster.core.owner.create import choose_run_id
from torchmuster.core.spec.launch import RunRequest, plan_run
from torchmuster.core.spec.problems import Problems
from torchmuster.errors import UsageError
from torchmuster.multirun.sweep.plan import (
    MetricChoice,
    MetricGoal,
    SweepPlan,
    ValueStyle,
)
from torchmuster.multirun.sweep.space import check_members, plan_members

# Options that mean for a member what they mean for a run.
_OF_MEMBER = (
    *("script", "args", "module", "python", "set_env", "preload", "start", "grace", "time_limit"),
    *("queue", "account", "cpus_per_node", "gpus_per_node", "mem"),
)


def sweep_request(given: dict[str, Any], *, in_pods: bool = False) -> "RunRequest":
    """Return the request for a member of a sweep, as for `muster run`.

    Raises:
        UsageError: It has several nodes and no pods; only a session can do that.
    """
    if given["nodes"] > 1 and not in_pods:
        raise UsageError(
            "members of several nodes are for clusters whose nodes are pods",
            where="--nodes",
            fix="`muster session start --nodes N`, then `muster sweep --session NAME`, runs each member on all nodes",
        )
    return RunRequest(
        call=given.get("call"),
        nproc_per_node=given["nproc_per_node"] or "1",
        nodes=str(given["nodes"]) if in_pods else None,
        tee="none",
        **{name: given[name] for name in _OF_MEMBER},
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


# A script that imports the standard library only: the exit of a process with torch costs 0.25 s of
# CPU time, that of a small one 0.01 s.


_MOST_FILES = 200


def needs_only_the_standard_library(script: str) -> bool:
    """Return whether a script and its neighbouring modules import the standard library only.

    Return False if that can't be determined.
    """
    folder = os.path.dirname(os.path.abspath(script))
    waiting, seen = [script], set[str]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        names = _imported(path)
        if names is None or len(seen) > _MOST_FILES:
            return False
        for name in names:
            neighbour = os.path.join(folder, f"{name}.py")
            if os.path.isfile(neighbour):
                waiting.append(neighbour)
            elif name not in sys.stdlib_module_names:
                return False
    return True


def _imported(path: str) -> set[str] | None:
    """Return the top-level names that a file imports; None if they can't be determined."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level or not node.module:
                return None
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Name) and node.id in ("__import__", "exec", "eval"):
            return None
    return None if names & {"importlib", "runpy"} else names
