"""Rules about where training is started, and how often: each function is one of them."""

from collections.abc import Iterator

from torchmuster.diagnose.lint.allocation import Scheduler
from torchmuster.diagnose.lint.finding import LintFinding, Rule, ScriptView, error, note, warning
from torchmuster.diagnose.lint.numbers import counts_slots, number
from torchmuster.diagnose.lint.shell_lex import shown
from torchmuster.diagnose.lint.starts import ScriptStart, option, tasks_per_node

# On PBS no other line works everywhere: OpenPBS's own mpiexec needs another MPI, and pbsdsh a full path behind `--`.
_ONE_WORD = "write `muster torchrun ...`: it starts the other nodes too"
_NO_SPREAD = "--no-spread"


def head_only(view: ScriptView) -> Iterator[LintFinding]:
    """Torchrun stands there without srun, mpiexec, pbsdsh or ssh, and the job has several nodes.

    Because a job script runs on its first node only: torchrun waits 10 to 15 minutes for the others. `muster torchrun`
    starts them itself.

    Source: failures R02, P01; sbatch(1); seen in OpenPBS 23.06.
    """
    if (view.nodes or 1) < 2 or any(start.wrapper for start in view.starts):
        return
    for start in view.starts:
        alone = start.given is not None and start.given.standalone
        spreads = start.muster and _NO_SPREAD not in start.words
        if start.by_torchrun and not start.command.conditional and not alone and not spreads:
            what = f"torchrun starts on the first of {view.nodes} nodes only"
            caller = "qsub" if view.job.scheduler is Scheduler.PBS else "sbatch"
            why = f"{caller} runs the script once, on the first node; the others never hear of it"
            fix = f"leave {_NO_SPREAD} out" if start.muster else _ONE_WORD
            yield error("head-only", start.line, what, why, fix)


def standalone(view: ScriptView) -> Iterator[LintFinding]:
    """`--standalone` in a job of several nodes: every node is a world of its own.

    Source: torch/distributed/run.py: standalone replaces --nnodes and the endpoint by localhost.
    """
    for start in view.starts:
        if start.given is None or not start.given.standalone or start.command.conditional:
            continue
        if view.is_wide(start):
            what = f"--standalone is for one node, and the job has {view.nodes or 'several'}"
            why = "it overrides --nnodes and the endpoint: each node trains alone, or only the first one does"
            fix = "leave it out" if start.muster else f"leave it out, and {_ONE_WORD}"
            yield error("standalone", start.line, what, why, fix)


def nnodes(view: ScriptView) -> Iterator[LintFinding]:
    """`--nnodes` is not the number of nodes that the job has.

    Too many: torchrun waits for nodes that don't exist. Too few: the rest idles, or trains alone.

    Source: failures R03, P02.
    """
    for start in view.starts:
        if start.given is None or start.given.standalone or start.partial or view.nodes is None:
            continue
        if start.wrapper is None and view.nodes > 1:
            continue  # `head_only` speaks of it
        text = start.given.nnodes
        if counts_slots(text, view.job, start.line):
            if view.job.allocation.tasks_per_node not in (None, 1):
                yield _counts_slots(start)
            continue
        low, colon, high = text.partition(":")
        least = number(low, view.job, start.line)
        most = number(high, view.job, start.line) if colon else least
        if least is None or most is None or least <= view.nodes <= most or _is_part(start, view):
            continue
        what = (
            f"--nnodes is {shown(text)}, and the job has {view.nodes} node{'s' * (view.nodes > 1)}"
        )
        why = "torchrun waits for nodes that never come, or leaves some out"
        if least != most or shown(text) == str(least):
            what += (
                f" (line {view.job.allocation.nodes_line})"
                if view.job.allocation.nodes_line
                else ""
            )
        fix = (
            "--nnodes=$SLURM_NNODES"
            if view.job.scheduler is Scheduler.SLURM
            else f"--nnodes={view.nodes}"
        )
        yield error("nnodes", start.line, what, why, fix)


def _is_part(start: ScriptStart, view: ScriptView) -> bool:
    """Say whether a step takes a part of the nodes on purpose."""
    text = option(start, "nodes", "N", "w", "nodelist")
    return text is not None and number(text, view.job, start.line) != view.nodes


def _counts_slots(start: ScriptStart) -> LintFinding:
    what = "--nnodes counts the lines of $PBS_NODEFILE"
    why = "it has a line for each slot (mpiprocs), not for each node"
    fix = "--nnodes=$(sort -u $PBS_NODEFILE | wc -l)"
    return error("nnodes", start.line, what, why, fix)


def several_per_node(view: ScriptView) -> Iterator[LintFinding]:
    """The wrapper starts torchrun several times on each node, and each one starts all workers.

    Two agents of one node fill `--nnodes=2` and the other node idles.

    Source: failures S01, S02; OpenPBS 23.06: pbsdsh runs a command for every line of the node file.
    """
    for start in view.starts:
        count = tasks_per_node(start, view.job) if start.by_torchrun else 1
        if count is None or count < 2:
            continue
        what = f"{start.wrapper} starts torchrun {count} times on each node"
        why = (
            "each torchrun starts all workers of its node: the GPUs are shared, and ranks are wrong"
        )
        fix = {
            "srun": "srun --ntasks-per-node=1 muster torchrun ...",
            "pbsdsh": "ask for mpiprocs=1: pbsdsh runs its command once for each of them",
        }.get(
            start.wrapper or "", f"{start.wrapper} -n {view.nodes or 2} --ppn 1 muster torchrun ..."
        )
        yield error("several-per-node", start.line, what, why, fix)


def workers_and_gpus(view: ScriptView) -> Iterator[LintFinding]:
    """There are more workers on a node than GPUs: `invalid device ordinal`, `Duplicate GPU detected`.

    Source: failures N22, S03.
    """
    gpus = view.job.allocation.gpus_per_node
    if not gpus:
        return
    for start in view.starts:
        if start.given is not None:
            workers = number(start.given.nproc_per_node, view.job, start.line)
        else:
            workers = tasks_per_node(start, view.job) if start.kind == "python" else None
        if workers is None or workers <= gpus or (start.kind == "python" and not _uses_gpus(view)):
            continue
        what = f"{workers} workers on each node, and {gpus} GPU{'s' * (gpus > 1)} (line {view.job.allocation.gpus_line})"
        why = "a worker without a GPU of its own ends with `invalid device ordinal` or shares another's"
        name = "ngpus" if view.job.scheduler is Scheduler.PBS else "--gpus-per-node"
        fix = f"{name}={workers}, or {gpus} worker{'s' * (gpus > 1)}"
        yield error("workers-without-gpu", start.line, what, why, fix)


def _uses_gpus(view: ScriptView) -> bool:
    text = view.job.text.lower()
    return any(word in text for word in ("cuda", "nccl", "gpu", "nvidia"))


def idle_gpus(view: ScriptView) -> Iterator[LintFinding]:
    """Torchrun starts one worker (its default) on nodes with several GPUs.

    Source: torch/distributed/run.py: --nproc-per-node defaults to 1.
    """
    gpus = view.job.allocation.gpus_per_node or 0
    for start in view.starts:
        if start.given is None or start.partial or gpus < 2 or start.kind != "torchrun":
            continue
        if not any("nproc" in word for word in start.words):
            what = f"torchrun starts 1 worker on each node, and the job has {gpus} GPUs there"
            why = "1 is the default of --nproc-per-node: the other GPUs idle"
            yield warning("idle-gpus", start.line, what, why, f"--nproc-per-node={gpus}")


def no_gpus_requested(view: ScriptView) -> Iterator[LintFinding]:
    """A PBS job counts its CPUs but no GPUs, and uses CUDA.

    Some sites give whole nodes, so this is a warning. Nodes that are not described by CPUs are left alone.

    Source: failures X13; OpenPBS hides GPUs that were not asked for where its cgroup hook is on.
    """
    allocation = view.job.allocation
    if view.job.scheduler is not Scheduler.PBS or not allocation.counts_cpus or not view.starts:
        return
    if allocation.gpus_per_node is None and _uses_gpus(view):
        what = "no GPUs are asked for, and the script uses them"
        why = "unless the site gives whole nodes, torch sees no GPU, or those of another job"
        name = "gpus" if allocation.torque else "ngpus"
        workers = [s.given.nproc_per_node for s in view.starts if s.given is not None]
        count = workers[0] if workers and workers[0].isdecimal() else "4"
        yield warning(
            "no-gpus-requested",
            allocation.nodes_line,
            what,
            why,
            f"add `:{name}={count}` to the nodes",
        )


def cpus_not_inherited(view: ScriptView) -> Iterator[LintFinding]:
    """`--cpus-per-task` of sbatch does not reach srun since Slurm 22.05.

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
        what = f"srun does not inherit --cpus-per-task={cpus}"
        why = "since Slurm 22.05 it has to be said again: without it each task may get one CPU"
        yield warning(
            "cpus-not-inherited",
            start.line,
            what,
            why,
            "srun --cpus-per-task=$SLURM_CPUS_PER_TASK ...",
        )


def gres_beside_gpus(view: ScriptView) -> Iterator[LintFinding]:
    """`--gres=gpu:N` and `--gpus-per-node=N` ask for the same thing twice.

    Source: sbatch(1): --gpus-per-node and --gres name the same resource.
    """
    given = {o.name: o for o in view.job.options if not o.late}
    gres = given.get("gres")
    if view.job.scheduler is not Scheduler.SLURM or gres is None or "gpus-per-node" not in given:
        return
    if "gpu" in gres.value:
        what = "--gres=gpu stands beside --gpus-per-node"
        why = "both ask for the GPUs of a node: Slurm may refuse the job, or take either of them"
        fix = "keep --gpus-per-node, and leave --gres out"
        yield warning("gres-beside-gpus", gres.line, what, why, fix)


def no_time_limit(view: ScriptView) -> Iterator[LintFinding]:
    """Nothing says how long the job may take: the site's default ends it.

    Source: sbatch(1), --time; failures P04.
    """
    allocation = view.job.allocation
    if view.job.scheduler is Scheduler.NONE or allocation.has_time_limit or not view.starts:
        return
    flag = "#SBATCH --time=02:00:00"
    if view.job.scheduler is Scheduler.PBS:
        flag = "#PBS -l walltime=02:00:00"
    what = "the job has no time limit of its own"
    why = "the queue's default ends it, and a long default makes it wait longer"
    yield note("no-time-limit", view.starts[0].line, what, why, flag)


def late_directive(view: ScriptView) -> Iterator[LintFinding]:
    """A directive stands below the first command, where no scheduler reads it.

    Source: sbatch(1): "... once it reaches the first non-comment non-whitespace line".
    """
    for line in sorted({o.line for o in view.job.options if o.late}):
        what = "this directive is ignored"
        why = "the scheduler stops reading them at the first command"
        yield error("late-directive", line, what, why, "move it to the top of the script")


def deprecated_launch(view: ScriptView) -> Iterator[LintFinding]:
    """`python -m torch.distributed.launch` is deprecated.

    It gives the script `--local-rank` as an argument where torchrun sets LOCAL_RANK.

    Source: torch/distributed/launch.py.
    """
    for start in view.starts:
        if start.kind == "launch":
            what = "torch.distributed.launch is deprecated"
            why = "it will be removed; the script gets --local-rank unless --use-env stands there"
            fix = (
                "torchrun ... (or `muster torchrun ...`), and read LOCAL_RANK from the environment"
            )
            yield warning("deprecated-launch", start.line, what, why, fix)


def refused_line(view: ScriptView) -> Iterator[LintFinding]:
    """The line is one that torchrun's own parser refuses.

    Source: torch/distributed/run.py (2.13). A line that is cut in two is left to `lost_continuation`.
    """
    cut = any(command.words[0].raw.startswith("--") for command in view.job.shell.commands)
    for start in view.starts:
        if start.refused is not None and not cut and not view.job.shell.slips.glued:
            what = f"torchrun will refuse this line: {shown(start.refused.what)}"
            fix = shown(start.refused.fix or "torchrun --help")
            yield error(
                "refused-line", start.line, what, "seen with the options of torch 2.13", fix
            )


RULES: tuple[Rule, ...] = (
    head_only,
    standalone,
    nnodes,
    several_per_node,
    workers_and_gpus,
    idle_gpus,
    no_gpus_requested,
    cpus_not_inherited,
    gres_beside_gpus,
    no_time_limit,
    late_directive,
    deprecated_launch,
    refused_line,
)
