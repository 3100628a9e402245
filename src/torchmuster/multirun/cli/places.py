"""The plan of a sweep from the command line, and its cells: how it starts at each place for runs."""

import ast
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torchmuster.core.cli.place import JOB_OPTIONS, say_ignored_of_a_job, warn
from torchmuster.core.model.plan import ScriptKind
from torchmuster.core.owner.create import choose_run_id
from torchmuster.core.spec.launch import RunRequest, plan_run
from torchmuster.core.spec.problems import Problems
from torchmuster.errors import UsageError
from torchmuster.multirun.sweep.plan import (
    MetricChoice,
    MetricGoal,
    SweepPlace,
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


def _places(
    site: str, hosts: Sequence[str], num_slots: int, num_gpus: int, num_workers: int
) -> "tuple[SweepPlace, ...]":
    """Return where the slots are: round-robin over the hosts, and over the GPUs of each."""
    from torchmuster.multirun.sweep.runs import gpus_of_slots

    on_one = -(-num_slots // len(hosts))
    gpus = gpus_of_slots([str(n) for n in range(num_gpus)], on_one, num_workers)
    return tuple(
        SweepPlace(site=site, host=hosts[slot % len(hosts)], gpus=gpus[slot // len(hosts)])
        for slot in range(num_slots)
    )


# The cells.


StartSweep = Callable[..., int]  # takes a plan, and its folder if it exists already


class SweepCell:
    """A sweep at a place for runs."""

    def __init__(self, place: Any) -> None:
        self.place = place

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        """Start a sweep and follow it, or show it; return the exit code.

        Args:
            given: The options of the command line.
            problems: The problems found so far.
            start: Starts, or shows, a planned sweep that a process on this machine owns; a second
                argument is its folder if it exists already.

        Raises:
            ManyErrors: All problems of the options.
        """
        raise NotImplementedError


class SweepNowhere(SweepCell):
    """A sweep at an invalid place, already noted as a problem: only find all other problems."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        return start(plan_sweep(given, sweep_request(given), [], problems, is_job=True))


class SweepHere(SweepCell):
    """A sweep on this machine."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        from torchmuster.core.node.kernel import visible_gpus

        gpus = visible_gpus()
        say_ignored_of_a_job(self.place, given)
        if given["per_gpu"] > 1 and not gpus:
            fix = "--slots is the number of members at a time"
            warn([f"ignored: --per-gpu: no GPU is visible here; {fix}"])
        return start(plan_sweep(given, sweep_request(given), gpus, problems))


class SweepInJob(SweepHere):
    """A sweep on the first node of the job around this shell."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        job, job_id = self.place.job, self.place.job_id
        if not given["dry_run"] and (code := self.place.instead()) is not None:
            return int(code)
        if len(job.nodes) > 1:
            warn([f"members run on this node alone, of {len(job.nodes)} in job {job_id}"])
        return super().start(given, problems, start)


class SweepOnHosts(SweepCell):
    """A sweep with slots on ssh hosts, by default one on each."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        if given["time_limit"] is not None:
            fix = "leave it out; `--stop` ends members early"
            raise UsageError("`--time` is for sweeps that are jobs", where="--time", fix=fix)
        from torchmuster.launcher.engines.sites import with_node_setup
        from torchmuster.launcher.spec.site import site_hosts

        site = self.place.site
        hosts = [host.name for host in site_hosts(site)]
        request = sweep_request(given)
        num_gpus = given["gpus_per_node"] or site.gpus_per_node or 0
        words = {**given, "slots": given["slots"] or len(hosts)}
        plan = plan_sweep(words, request, [], problems, is_job=True)
        run = with_node_setup(plan.run, site, python_given=request.python is not None)
        places = _places(site.name, hosts, plan.slots, num_gpus, run.num_workers(0))
        return start(replace(plan, run=run, places=places))


class SweepAsArray(SweepCell):
    """A sweep as a scheduler's job array, which needs no owner."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        from torchmuster.multirun.cli.sweep_jobs import submit_sweep

        return submit_sweep(given, self.place.site, problems)


class SweepInSession(SweepCell):
    """A sweep in a session: its members run one after the other, each on all nodes."""

    def start(self, given: dict[str, Any], problems: "Problems", start: StartSweep) -> int:
        options = {"engine": "--on", "hosts": "--hosts", "hostfile": "--hostfile", **JOB_OPTIONS}
        others = [word for option, word in options.items() if given.get(option) is not None]
        for word in [*others, *["--per-gpu"] * (given["per_gpu"] > 1)]:
            why = "the session has its nodes already"
            problems.add(f"`{word}` can't be used in a session", word, why)
        if given["slots"] not in (None, 1):
            why = "a session has one run at a time"
            fix = "--hosts a,b makes slots of its own on hosts"
            problems.add("a session is one slot", f"--slots {given['slots']}", why, fix)
        held = self.place
        is_job = not held.is_here
        request = held.sweep_request(sweep_request(given), given)
        plan = plan_sweep({**given, "slots": 1}, request, list(held.gpus), problems, is_job=is_job)
        return start(replace(plan, run=held.sweep_run(plan.run, given["python"])))
