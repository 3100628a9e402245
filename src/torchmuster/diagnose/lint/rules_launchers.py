"""Rules about launchers other than torchrun: accelerate, fabric, DeepSpeed, MPI, Lightning, Ray."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torchmuster.diagnose.finding import Finding
from torchmuster.diagnose.lint.job import JobScript, Scheduler, number, option_pairs
from torchmuster.diagnose.lint.rules_meeting import LOOPBACK, SPREAD, is_too_early
from torchmuster.diagnose.lint.shell import FIXED, shown
from torchmuster.diagnose.lint.starts import (
    WRAPPERS,
    Rule,
    ScriptStart,
    ScriptView,
    option,
    tasks_per_node,
    uses_part_of_nodes,
)

# How other launchers than torchrun get the numbers of nodes and workers.


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The options that tell a launcher about several nodes; each node starts it once.

    Attributes:
        nodes, rank, address, workers: Names, without dashes.
        is_total: `workers` counts those of all nodes.
        file: An option for a file that may contain all of these.
        free: An option and its value with which the nodes number themselves.
    """

    nodes: str
    rank: str
    address: str
    workers: str
    is_total: bool = False
    file: str | None = None
    free: tuple[str, str] | None = None


LAUNCHERS = {
    # huggingface/accelerate 16cb6eb, commands/launch.py and utils/launch.py: 1 machine is the
    # default; the number of processes is divided by that of machines, and without one it is the
    # number of GPUs of one node.
    "accelerate": LaunchOptions(
        nodes="num_machines",
        rank="machine_rank",
        address="main_process_ip",
        workers="num_processes",
        is_total=True,
        file="config_file",
        free=("rdzv_backend", "c10d"),
    ),
    # Lightning-AI/pytorch-lightning, fabric/cli.py: defaults 1 node, rank 0, 127.0.0.1, 1 device.
    "fabric": LaunchOptions(
        nodes="num_nodes", rank="node_rank", address="main_address", workers="devices"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenOptions:
    """The options between a launcher's name and the script; `partial` if some are unknown."""

    values: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False

    def number(self, name: str, job: JobScript, line: int) -> int | None:
        """Return an option as a number; None when it is missing or unknown."""
        return number(self.values[name], job, line) if name in self.values else None


def options_of(start: ScriptStart) -> GivenOptions:
    """Return a launcher's own options, with `_` in their names, without those of the script."""
    words = list(start.words)
    ends = (i for i, word in enumerate(words) if re.search(r"\.py$", word) or word == "-m")
    end = next(ends, None)
    own = words if end is None else words[:end]
    for index, word in enumerate(own):
        is_value = index > 0 and own[index - 1].startswith("-") and "=" not in own[index - 1]
        if word[:1] in ("$", FIXED) and not is_value:
            own, partial = own[:index], end is not None
            break
    else:
        partial = False
    values: dict[str, str] = {}
    for name, value in option_pairs(own):
        values.setdefault(name.replace("-", "_"), value)
    return GivenOptions(values=values, partial=partial)


def workers_per_node(start: ScriptStart, job: JobScript) -> int | None:
    """Return how many workers a line starts on each node; None when it does not say so."""
    if start.given is not None:
        return number(start.given.nproc_per_node, job, start.line)
    if start.kind == "python":
        return tasks_per_node(start, job)
    given = options_of(start)
    if start.kind == "deepspeed":
        return given.number("num_gpus", job, start.line)
    launcher = LAUNCHERS.get(start.kind)
    count = given.number(launcher.workers, job, start.line) if launcher is not None else None
    if launcher is None or count is None or not launcher.is_total:
        return count
    nodes = job.allocation.nodes or given.number(launcher.nodes, job, start.line) or 1
    return count // nodes


_NODE_RANK = {Scheduler.SLURM: "$SLURM_NODEID", Scheduler.PBS: "$PMI_RANK"}


def launcher_nodes(view: ScriptView) -> Iterator[Finding]:
    """Report a launcher without the number of nodes, this node's rank, or the head's address.

    Source: the table `LAUNCHERS`.
    """
    for start in view.starts:
        launcher, given = LAUNCHERS.get(start.kind), options_of(start)
        if launcher is None or given.partial or start.command.conditional:
            continue
        if uses_part_of_nodes(start, view.job) or _is_by_deepspeed(given):
            continue
        nodes = given.number(launcher.nodes, view.job, start.line)
        if view.nodes is None and (nodes or 1) > 1:
            yield from _without_address(view, start, launcher, given)
        elif (view.nodes or 1) > 1 and start.wrapper is not None:
            yield from _wrong_options(view, start, launcher, given, nodes)


def _wrong_options(
    view: ScriptView,
    start: ScriptStart,
    launcher: LaunchOptions,
    given: GivenOptions,
    nodes: int | None,
) -> Iterator[Finding]:
    in_file = launcher.file is not None and launcher.file in given.values
    if launcher.nodes not in given.values and not in_file:
        rank = _NODE_RANK.get(view.job.scheduler, "N")
        yield view.finding("launcher-nodes", start, launcher=launcher, rank=rank)
        return
    if nodes is not None and nodes != view.nodes:
        yield view.finding("launcher-nodes-differ", start, launcher=launcher, given=nodes)
        return
    yield from _without_address(view, start, launcher, given)
    is_free = launcher.free is not None and given.values.get(launcher.free[0]) == launcher.free[1]
    if start.wrapper in SPREAD and not is_free:
        yield from _same_rank(view, start, launcher, given)
    yield from _without_workers(view, start, launcher, given)


def _same_rank(
    view: ScriptView, start: ScriptStart, launcher: LaunchOptions, given: GivenOptions
) -> Iterator[Finding]:
    text = given.values.get(launcher.rank)
    early = text is not None and is_too_early(view, start, text)
    if text is not None and not early and number(text, view.job, start.line) is None:
        return
    rank = _NODE_RANK.get(view.job.scheduler, "N")
    if text is None:
        yield view.finding("launcher-rank-missing", start, launcher=launcher, rank=rank)
    else:
        name = "launcher-rank-early" if early else "launcher-rank-equal"
        yield view.finding(name, start, launcher=launcher, rank=rank, text=shown(text))


def _without_address(
    view: ScriptView, start: ScriptStart, launcher: LaunchOptions, given: GivenOptions
) -> Iterator[Finding]:
    if launcher.file is not None and launcher.file in given.values:
        return
    text = given.values.get(launcher.address)
    if text is None:
        yield view.finding("launcher-address-missing", start, launcher=launcher)
    elif LOOPBACK.fullmatch(shown(text)):
        yield view.finding("launcher-loopback", start, launcher=launcher)


def _without_workers(
    view: ScriptView, start: ScriptStart, launcher: LaunchOptions, given: GivenOptions
) -> Iterator[Finding]:
    """Report accelerate without a number of processes: it uses one node's GPUs for all nodes."""
    gpus = view.job.allocation.gpus_per_node
    in_file = launcher.file is not None and launcher.file in given.values
    if launcher.is_total and not in_file and launcher.workers not in given.values and gpus:
        total = gpus * (view.nodes or 1)
        yield view.finding("workers-of-one-node", start, launcher=launcher, gpus=gpus, total=total)


def _is_by_deepspeed(given: GivenOptions) -> bool:
    """Return whether accelerate leaves several nodes to DeepSpeed's own launcher."""
    launcher = given.values.get("deepspeed_multinode_launcher")
    return "use_deepspeed" in given.values and launcher not in ("standard", "nossh")


def deepspeed_hosts(view: ScriptView) -> Iterator[Finding]:
    """Report DeepSpeed's launcher in a job of several nodes with a wrong host file or options.

    It starts the nodes of a host file by ssh; without one it starts this node only. Under srun,
    where every node runs it, it needs --no_ssh and a rank.

    Source: deepspeedai/DeepSpeed, deepspeed/launcher/runner.py: --hostfile is /job/hostfile; a line
    of it is `host slots=N`; --launcher is pdsh.
    """
    for start in view.starts:
        given = options_of(start)
        nodes = given.number("num_nodes", view.job, start.line)
        is_wide = (view.nodes or nodes or 1) > 1 and view.job.scheduler is not Scheduler.NONE
        if start.kind != "deepspeed" or given.partial or start.command.conditional or not is_wide:
            continue
        found = _of_deepspeed(view, start, given, nodes)
        if found is not None:
            yield found


def _of_deepspeed(
    view: ScriptView, start: ScriptStart, given: GivenOptions, nodes: int | None
) -> Finding | None:
    hosts = given.values.get("hostfile")
    slots = view.job.allocation.gpus_per_node or "N"
    if hosts is None and "/job/hostfile" not in view.job.text:
        alone = "each node trains alone" if start.wrapper else "only the first node trains"
        words = {"number": view.nodes or nodes, "slots": slots, "alone": alone}
        return view.finding("deepspeed-hosts", start, **words)
    if hosts is not None and "PBS_NODEFILE" in view.job.shell.expand(hosts, start.line):
        return view.finding("deepspeed-node-file", start, slots=slots)
    if nodes is not None and view.nodes is not None and nodes > view.nodes:
        return view.finding("deepspeed-too-many", start, given=nodes)
    if (
        start.wrapper in SPREAD
        and "no_ssh" not in given.values
        and not uses_part_of_nodes(start, view.job)
    ):
        return view.finding("deepspeed-on-every-node", start)
    if start.wrapper is None and "launcher" not in given.values and "no_ssh" not in given.values:
        by_slurm = "--launcher slurm, or " if view.job.scheduler is Scheduler.SLURM else ""
        return view.finding("deepspeed-ssh", start, by_scheduler=by_slurm)
    return None


_LIGHTNING = re.compile(r"lightning|\bpl_|litgpt|\btrainer\.", re.IGNORECASE)
_DEVICES = re.compile(r"(?:--)?(?:[\w.]*trainer\.)?(devices|num_nodes)")


def lightning(view: ScriptView) -> Iterator[Finding]:
    """Report Lightning under srun unless `devices` is --ntasks-per-node and `num_nodes` is --nodes.

    It refuses to begin otherwise.

    Source: Lightning-AI/pytorch-lightning, fabric/plugins/environments/slurm.py: validate_settings
    and _validate_srun_variables.
    """
    given = {o.name: o for o in view.job.options if not o.late}
    for start in view.starts:
        if start.kind != "python" or start.wrapper != "srun":
            continue
        if not _LIGHTNING.search(" ".join([*start.words, view.job.text])) or start.options:
            continue
        of_trainer = _lightning_numbers(view, start)
        tasks, nodes = view.job.allocation.tasks_per_node, view.nodes
        if "ntasks-per-node" not in given and (view.job.allocation.ntasks or 1) > 1:
            yield view.finding("lightning-ntasks", start, tasks=tasks or "N")
        elif (
            "devices" in of_trainer
            and "ntasks-per-node" in given
            and of_trainer["devices"] != tasks
        ):
            devices = of_trainer["devices"]
            yield view.finding("lightning-devices", start, devices=devices, tasks=tasks)
        elif "num_nodes" in of_trainer and nodes is not None and of_trainer["num_nodes"] != nodes:
            yield view.finding("lightning-nodes", start, given=of_trainer["num_nodes"])


def _lightning_numbers(view: ScriptView, start: ScriptStart) -> dict[str, int]:
    """Return the numbers for Lightning's Trainer among the script's arguments."""
    found: dict[str, int] = {}
    for index, word in enumerate(start.words):
        name, equals, value = word.partition("=")
        match = _DEVICES.fullmatch(name)
        if match is None or not (equals or name.startswith("--")):
            continue
        following = start.words[index + 1] if index + 1 < len(start.words) else ""
        count = number(value if equals else following, view.job, start.line)
        if count is not None:
            found[match[1]] = count
    return found


def mpi_ranks(view: ScriptView) -> Iterator[Finding]:
    """Report `mpirun -np` with fewer ranks than the job has GPUs: the other GPUs idle.

    One rank, or one for each node, is fine: it may start workers itself.

    Source: mpirun(1) of Open MPI: -np is the number of processes on all nodes.
    """
    nodes, gpus = view.nodes, view.job.allocation.gpus_per_node
    for start in view.starts:
        if start.kind != "python" or start.wrapper not in ("mpirun", "mpiexec"):
            continue
        text = option(start, "np", "n")
        ranks = number(text, view.job, start.line) if text is not None else None
        if ranks is None or not nodes or not gpus or uses_part_of_nodes(start, view.job):
            continue
        if ranks not in (1, nodes) and ranks < nodes * gpus:
            words = {"ranks": ranks, "gpus": gpus, "total": nodes * gpus}
            yield view.finding("mpi-ranks", start, **words)


def ray_nodes(view: ScriptView) -> Iterator[Finding]:
    """Report Ray in a job of several nodes without one head that all others join.

    Under srun, `ray start` has to stay (--block): a step ends with its command, and Slurm ends the
    processes that it left.

    Source: docs.ray.io, "Deploying on Slurm".
    """
    starts = [(s, options_of(s).values) for s in view.starts if s.kind == "ray"]
    wide = (view.nodes or 1) > 1
    heads = [s for s, given in starts if "head" in given]
    joins = [s for s, given in starts if "address" in given]
    for start, given in starts:
        if "head" in given and wide and _reaches_all(view, start):
            yield view.finding("ray-heads", start)
        elif start.wrapper == "srun" and "block" not in given:
            yield view.finding("ray-without-block", start)
        elif "address" in given and wide and LOOPBACK.fullmatch(shown(given["address"])):
            yield view.finding("ray-loopback", start)
    if wide and heads and not joins and not any(_reaches_all(view, s) for s in heads):
        yield view.finding("ray-nodes", heads[0], number=(view.nodes or 1) - 1)


def _reaches_all(view: ScriptView, start: ScriptStart) -> bool:
    return (
        start.wrapper in SPREAD
        and not uses_part_of_nodes(start, view.job)
        and option(start, "n", "ntasks") != "1"
    )


def idle_nodes(view: ScriptView) -> Iterator[Finding]:
    """Report `python train.py` in a job of several nodes if nothing starts it on the others.

    Source: sbatch(1): the script runs on the first node of the allocation only.
    """
    names = {command.name for command in view.job.shell.commands}
    text = view.job.text
    if (view.nodes or 1) < 2 or view.starts or names & WRAPPERS or "srun" in text or "mpi" in text:
        return
    for command in view.job.shell.commands:
        by_python = re.fullmatch(r"python[\d.]*", command.name) and not command.conditional
        if by_python and any(re.search(r"\.py$", word) for word in command.texts):
            yield view.finding("idle-nodes", command)
            return


RULES: tuple[Rule, ...] = (
    launcher_nodes,
    deepspeed_hosts,
    lightning,
    mpi_ranks,
    ray_nodes,
    idle_nodes,
)
