"""Rules about where a job script starts training, and how often; `RULES` lists them."""

from collections.abc import Iterator

from torchmuster.diagnose.finding import Finding
from torchmuster.diagnose.lint.job import Scheduler, counts_slots, number
from torchmuster.diagnose.lint.rules_launchers import workers_per_node
from torchmuster.diagnose.lint.shell import shown
from torchmuster.diagnose.lint.starts import (
    Rule,
    ScriptStart,
    ScriptView,
    option,
    tasks,
    tasks_per_node,
    uses_part_of_nodes,
)


def head_only(view: ScriptView) -> Iterator[Finding]:
    """Report torchrun without srun, mpiexec, pbsdsh or ssh in a job of several nodes.

    A job script runs on its first node only, so torchrun waits 10 to 15 minutes for the others.
    `muster torchrun` starts them itself.

    Source: failures R02, P01; sbatch(1); seen in OpenPBS 23.06.
    """
    if (view.nodes or 1) < 2 or any(start.wrapper for start in view.starts):
        return
    for start in view.starts:
        alone = start.given is not None and start.given.standalone
        spreads = start.muster and "--no-spread" not in start.words
        if _is_of_one_node(start) and not start.command.conditional and not alone and not spreads:
            caller = "qsub" if view.job.scheduler is Scheduler.PBS else "sbatch"
            name = "no-spread" if start.muster else "head-only"
            yield view.finding(name, start, caller=caller)


def _is_of_one_node(start: ScriptStart) -> bool:
    """Return whether a launcher starts workers on its own node only; DeepSpeed's may not."""
    by_deepspeed = any("deepspeed" in word for word in start.words)
    return (
        start.by_torchrun
        or start.kind == "fabric"
        or (start.kind == "accelerate" and not by_deepspeed)
    )


def standalone(view: ScriptView) -> Iterator[Finding]:
    """Report `--standalone` in a job of several nodes: every node is a separate world.

    Source: torch/distributed/run.py: standalone replaces --nnodes and the endpoint by localhost.
    """
    for start in view.starts:
        if start.given is None or not start.given.standalone or start.command.conditional:
            continue
        if view.is_wide(start):
            name = "standalone-of-muster" if start.muster else "standalone"
            yield view.finding(name, start, number=view.nodes or "several")


def nnodes(view: ScriptView) -> Iterator[Finding]:
    """Report an `--nnodes` that is not the job's number of nodes.

    Too many: torchrun waits for nodes that don't exist. Too few: the other nodes are idle or train
    alone.

    Source: failures R03, P02.
    """
    for start in view.starts:
        if start.given is None or start.given.standalone or start.partial or view.nodes is None:
            continue
        if start.wrapper is None and view.nodes > 1:
            continue  # `head_only` reports it
        text = start.given.nnodes
        if counts_slots(text, view.job, start.line):
            if view.job.allocation.tasks_per_node not in (None, 1):
                yield view.finding("nnodes-of-slots", start)
            continue
        low, colon, high = text.partition(":")
        least = number(low, view.job, start.line)
        most = number(high, view.job, start.line) if colon else least
        if least is None or most is None or least <= view.nodes <= most or _is_part(start, view):
            continue
        line = view.job.allocation.nodes_line
        is_literal = least != most or shown(text) == str(least)
        yield view.finding(
            "nnodes",
            start,
            given=shown(text),
            s="s" * (view.nodes > 1),
            where=f" (line {line})" if line and is_literal else "",
            number="$SLURM_NNODES" if view.job.scheduler is Scheduler.SLURM else view.nodes,
        )


def _is_part(start: ScriptStart, view: ScriptView) -> bool:
    """Return whether a step uses a part of the nodes on purpose."""
    text = option(start, "nodes", "N", "w", "nodelist")
    return text is not None and number(text, view.job, start.line) != view.nodes


def several_per_node(view: ScriptView) -> Iterator[Finding]:
    """Report a wrapper that starts a launcher several times on a node: each starts all workers.

    Two agents of one node fill `--nnodes=2` and the other node idles.

    Source: failures S01, S02; OpenPBS 23.06: pbsdsh runs a command for every line of the node file.
    """
    for start in view.starts:
        count = tasks_per_node(start, view.job) if start.starts_workers else 1
        if count is None or count < 2:
            continue
        by_wrapper = {"srun": "several-tasks-of-srun", "pbsdsh": "several-slots"}
        name = by_wrapper.get(start.wrapper or "", "several-per-node")
        yield view.finding(name, start, count=count, number=view.nodes or 2)


def run_by_wrapper(view: ScriptView) -> Iterator[Finding]:
    """Report a wrapper that starts `muster run` several times: each starts a run on all nodes.

    Seen on Slurm 22.05: four whole trainings of one script on the same GPUs, each of them a
    success.
    """
    for start in view.starts:
        count = tasks(start, view.job) if start.kind == "run" and start.wrapper != "ssh" else 1
        if start.wrapper is None or count is None or count < 2:
            continue
        yield view.finding("run-by-wrapper", start, count=count)


def workers_and_gpus(view: ScriptView) -> Iterator[Finding]:
    """Report more workers than GPUs: `invalid device ordinal`, `Duplicate GPU detected`.

    Source: failures N22, S03.
    """
    gpus = view.job.allocation.gpus_per_node
    if not gpus:
        return
    for start in view.starts:
        workers = workers_per_node(start, view.job)
        if workers is None or workers <= gpus or (start.kind == "python" and not _uses_gpus(view)):
            continue
        asked = "ngpus" if view.job.scheduler is Scheduler.PBS else "--gpus-per-node"
        words = {"workers": workers, "gpus": gpus, "s": "s" * (gpus > 1)}
        yield view.finding("workers-without-gpu", start, option=asked, **words)


def _uses_gpus(view: ScriptView) -> bool:
    text = view.job.text.lower()
    return any(word in text for word in ("cuda", "nccl", "gpu", "nvidia"))


def idle_gpus(view: ScriptView) -> Iterator[Finding]:
    """Report a launcher that starts fewer workers on a node than the node has GPUs.

    Source: torch/distributed/run.py: --nproc-per-node defaults to 1; for the others see
    `LAUNCHERS`.
    """
    gpus = view.job.allocation.gpus_per_node or 0
    for start in view.starts:
        workers = workers_per_node(start, view.job) if not start.partial else None
        if workers is None or workers >= gpus or _shares_a_node(view, start):
            continue
        if start.kind == "python" and (workers == 1 or start.wrapper != "srun"):
            continue  # a script may use several GPUs itself; `mpi_ranks` handles MPI
        by_default = start.kind == "torchrun" and not any("nproc" in word for word in start.words)
        if by_default:
            name = "idle-gpus-by-default"
        elif start.kind == "accelerate":
            name = "idle-gpus-of-accelerate"
        else:
            name = "idle-gpus-of-torchrun" if start.by_torchrun else "idle-gpus"
        words = {"workers": workers, "gpus": gpus, "s": "s" * (workers != 1)}
        yield view.finding(name, start, total=gpus * (view.nodes or 1), **words)


def _shares_a_node(view: ScriptView, start: ScriptStart) -> bool:
    """Return whether other lines may use the other GPUs, or the line was given only some."""
    given = {a.name for a in start.command.environment} | view.job.shell.exports
    together = start.command.background or start.command.conditional
    return together or "CUDA_VISIBLE_DEVICES" in given or uses_part_of_nodes(start, view.job)


def no_gpus_requested(view: ScriptView) -> Iterator[Finding]:
    """Report a job that requests no GPUs and uses CUDA: on PBS if it counts CPUs, on Slurm always.

    Some sites allocate whole nodes, so this is a warning. PBS nodes without a number of CPUs are
    left alone.

    Source: failures X13; OpenPBS hides GPUs that were not requested where its cgroup hook is on;
    gres.conf(5).
    """
    allocation = view.job.allocation
    if allocation.gpus_per_node is not None or not view.starts:
        return
    if view.job.scheduler is Scheduler.PBS and allocation.counts_cpus and _uses_gpus(view):
        name, line = "no-gpus-in-chunks", allocation.nodes_line
    elif view.job.scheduler is Scheduler.SLURM and _shows_gpus(view) and not _asks_otherwise(view):
        name, line = "no-gpus-requested", view.starts[0].line
    else:
        return
    yield view.finding(name, line, gpus=_likely_gpus(view))


def _likely_gpus(view: ScriptView) -> str:
    workers = [s.given.nproc_per_node for s in view.starts if s.given is not None]
    return workers[0] if workers and workers[0].isdecimal() else "4"


def _shows_gpus(view: ScriptView) -> bool:
    """Return whether a command needs GPUs: names of partitions and modules prove nothing."""
    by_gpu = any(s.given is not None and s.given.nproc_per_node == "gpu" for s in view.starts)
    return by_gpu or any(c.name in ("nvidia-smi", "rocm-smi") for c in view.job.shell.commands)


def _asks_otherwise(view: ScriptView) -> bool:
    """Return whether an option may bring GPUs: in an unknown form, or with the whole node."""
    names = [option.name for option in view.job.options]
    return any(
        n.startswith(("gpu", "gres", "tres", "exclusive", "hetjob", "packjob")) for n in names
    )


def cpus_not_inherited(view: ScriptView) -> Iterator[Finding]:
    """Report srun without `--cpus-per-task`: since Slurm 22.05 it does not inherit sbatch's.

    Every task then runs on one CPU, with its data loader's workers.

    Source: sbatch(1), --cpus-per-task; failures S04.
    """
    cpus = view.job.allocation.cpus_per_task
    if not cpus or cpus < 2 or "SRUN_CPUS_PER_TASK" in view.job.shell.exports:
        return
    for start in view.starts:
        inherits = any(a.name == "SRUN_CPUS_PER_TASK" for a in start.command.environment)
        if start.wrapper != "srun" or inherits or option(start, "cpus-per-task", "c") is not None:
            continue
        yield view.finding("cpus-not-inherited", start, cpus=cpus)


def gres_and_gpus(view: ScriptView) -> Iterator[Finding]:
    """Report `--gres=gpu:N` together with `--gpus-per-node=N`: both request the same.

    Source: sbatch(1): --gpus-per-node and --gres name the same resource.
    """
    given = {o.name: o for o in view.job.options if not o.late}
    gres = given.get("gres")
    if view.job.scheduler is not Scheduler.SLURM or gres is None or "gpus-per-node" not in given:
        return
    if "gpu" in gres.value:
        yield view.finding("gres-beside-gpus", gres)


def no_time_limit(view: ScriptView) -> Iterator[Finding]:
    """Note a job without a time limit: the site's default applies.

    Source: sbatch(1), --time; failures P04.
    """
    allocation = view.job.allocation
    if view.job.scheduler is Scheduler.NONE or allocation.has_time_limit or not view.starts:
        return
    directive = "#PBS -l walltime" if view.job.scheduler is Scheduler.PBS else "#SBATCH --time"
    yield view.finding("no-time-limit", view.starts[0], directive=directive)


def late_directive(view: ScriptView) -> Iterator[Finding]:
    """Report a directive after the first command: no scheduler reads it.

    Source: sbatch(1): "... once it reaches the first non-comment non-whitespace line".
    """
    for line in sorted({o.line for o in view.job.options if o.late}):
        yield view.finding("late-directive", line)


def deprecated_launch(view: ScriptView) -> Iterator[Finding]:
    """Report `python -m torch.distributed.launch`, which is deprecated.

    It gives the script `--local-rank` as an argument where torchrun sets LOCAL_RANK.

    Source: torch/distributed/launch.py.
    """
    for start in view.starts:
        if start.kind == "launch":
            yield view.finding("deprecated-launch", start)


def refused_line(view: ScriptView) -> Iterator[Finding]:
    """Report a line that torchrun's own parser refuses.

    Source: torch/distributed/run.py (2.13). `lost_continuation` handles a line that is cut in two.
    """
    cut = any(command.words[0].raw.startswith("--") for command in view.job.shell.commands)
    for start in view.starts:
        if start.refused is not None and not cut and not view.job.shell.slips.glued:
            fix = shown(start.refused.fix or "torchrun --help")
            yield view.finding("refused-line", start, what=shown(start.refused.what), fix=fix)


RULES: tuple[Rule, ...] = (
    head_only,
    standalone,
    nnodes,
    several_per_node,
    run_by_wrapper,
    workers_and_gpus,
    idle_gpus,
    no_gpus_requested,
    cpus_not_inherited,
    gres_and_gpus,
    no_time_limit,
    late_directive,
    deprecated_launch,
    refused_line,
)
