"""A job script: its directives, the resources that they request, and its texts as numbers, such as `$SLURM_NNODES`.

Sources of the directives, `#SBATCH`, and `#PBS` of OpenPBS: https://slurm.schedmd.com/sbatch.html; PBS Professional Reference
Guide, qsub and "Resources".
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torchmuster.diagnose.lint.shell import ShellScript, ShellToken, read_shell, shown

_SHORT = {
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus-per-task",
    "G": "gpus",
    "t": "time",
    "a": "array",
    "p": "partition",
    "J": "job-name",
    "s": "oversubscribe",
}
_PBS_FLAGS = frozenset("VzfhIX")
MAX_NODES = 65536


class Scheduler(StrEnum):
    """The scheduler of a script's directives."""

    SLURM = "slurm"
    PBS = "pbs"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of a directive; the scheduler ignores a `late` one, after the first command."""

    name: str
    value: str
    line: int
    late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedResources:
    """The resources of a job according to its directives; None: not given.

    Attributes:
        nodes: The minimum number.
        tasks_per_node: Slots for processes on each node (`mpiprocs`, or `ppn` of older PBS).
        gpus_per_node: GPUs of each node.
        gpus_line: The line with that number.
        nodes_line: The line with the number of nodes.
        counts_cpus: The number of CPUs per node is given.
        is_shared: The line that allows other jobs on the same nodes, or makes this job an array.
    """

    scheduler: Scheduler = Scheduler.NONE
    nodes: int | None = None
    nodes_line: int = 0
    ntasks: int | None = None
    tasks_per_node: int | None = None
    gpus_per_node: int | None = None
    gpus_line: int = 0
    cpus_per_task: int | None = None
    has_time_limit: bool = False
    counts_cpus: bool = False
    is_shared: int | None = None


def read_options(line: str, number: int, *, late: bool) -> tuple[Scheduler, list[Option]] | None:
    """Return the options of one directive; None for another line."""
    match = re.match(r"#(SBATCH|PBS)(?:[ \t]+(.*))?$", line.rstrip("\r\n"))
    if match is None:
        return None
    slurm = match[1] == "SBATCH"
    words = _words(match[2] or "")
    pairs = option_pairs(words) if slurm else _pbs_pairs(words)
    long = _SHORT if slurm else {}
    found = [Option(name=long.get(n, n), value=v, line=number, late=late) for n, v in pairs]
    return Scheduler.SLURM if slurm else Scheduler.PBS, found


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def option_pairs(
    words: Sequence[str], *, long_by_one_dash: bool = False
) -> Iterable[tuple[str, str]]:
    """Yield names and values of `--nodes=2`, `--nodes 2`, `-N2` and `-N 2`; no value is empty."""
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else ""
        following = "" if following.startswith("-") else following
        if word.startswith("--") or (long_by_one_dash and re.match(r"-[a-z]{2}", word)):
            name, equals, value = word.lstrip("-").partition("=")
            yield name, value if equals else following
        elif re.match(r"-[A-Za-z]", word):
            yield word[1], word[2:].lstrip("=") or following


def _pbs_pairs(words: Sequence[str]) -> Iterable[tuple[str, str]]:
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not re.match(r"-[A-Za-z]", word):
            continue
        value = word[2:]
        if not value and word[1] not in _PBS_FLAGS and index < len(words):
            value = words[index]
            index += 1
        yield word[1], value


def read_allocation(scheduler: Scheduler, options: Sequence[Option]) -> RequestedResources:
    """Return the resources that the options request."""
    options = [option for option in options if not option.late]
    if scheduler is Scheduler.SLURM:
        return _slurm(options)
    if scheduler is Scheduler.PBS:
        return _pbs(options)
    return RequestedResources()


def whole(text: str | None) -> int | None:
    """Return a number of nodes, tasks or GPUs; None for an invalid or unreasonable one."""
    if text is None or not re.fullmatch(r"[0-9]{1,6}", text.strip()):
        return None
    return int(text)


def count_gres(text: str) -> int | None:
    """Return the GPUs of `gpu:4`, `gpu:a100:4(S:0)` or `gpu`; None without any."""
    total: int | None = None
    for part in text.split(","):
        match = re.fullmatch(
            r"(?:gres[/:])?gpu(?::[A-Za-z_][\w.-]*)?(?::([0-9]{1,6}))?(?:\(.*\))?", part
        )
        if match is not None:
            total = (total or 0) + int(match[1] or 1)
    return total


def count_typed(text: str) -> int | None:
    """Return the GPUs of `4` or `a100:4`, the forms of --gpus-per-node."""
    counts = [whole(part.rpartition(":")[2]) for part in text.split(",")]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _slurm(options: Sequence[Option]) -> RequestedResources:
    given = {option.name: option for option in options}
    if "hetjob" in given or "packjob" in given:
        return RequestedResources(scheduler=Scheduler.SLURM, has_time_limit="time" in given)

    def value(name: str) -> str | None:
        return given[name].value if name in given else None

    nodes = whole((value("nodes") or "").partition("-")[0])
    ntasks, per_node = whole(value("ntasks")), whole(value("ntasks-per-node"))
    if nodes is None and "nodes" not in given and per_node:
        nodes = -(-ntasks // per_node) if ntasks else 1
    if nodes is None and "nodes" not in given and ntasks == 1:
        nodes = 1
    if per_node is None and ntasks and nodes:
        per_node = -(-ntasks // nodes)
    if per_node is not None and ntasks is None and nodes:
        ntasks = per_node * nodes
    gpus, gpus_line = _slurm_gpus(given, nodes, per_node)
    shared = [given[n].line for n in ("array", "oversubscribe") if n in given]
    exclusive = "exclusive" in given
    return RequestedResources(
        scheduler=Scheduler.SLURM,
        nodes=nodes,
        nodes_line=given["nodes"].line if "nodes" in given else 0,
        ntasks=ntasks,
        tasks_per_node=per_node,
        gpus_per_node=gpus,
        gpus_line=gpus_line,
        cpus_per_task=whole(value("cpus-per-task")),
        has_time_limit="time" in given,
        is_shared=shared[0] if shared and not exclusive else None,
    )


def _slurm_gpus(
    given: dict[str, Option], nodes: int | None, per_node: int | None
) -> tuple[int | None, int]:
    """Return the GPUs of a node and the line with that number."""
    for name, factor in (("gpus-per-node", 1), ("gres", 1), ("gpus-per-task", per_node)):
        if name in given and factor:
            option = given[name]
            count = count_gres(option.value) if name == "gres" else count_typed(option.value)
            if count is not None:
                return count * factor, option.line
    if "gpus" in given and nodes:
        count = count_typed(given["gpus"].value)
        if count is not None and count % nodes == 0:
            return count // nodes, given["gpus"].line
    return None, 0


def _pbs(options: Sequence[Option]) -> RequestedResources:
    resources = dict(_pbs_resources(options))
    shared = [o.line for o in options if o.name in ("J", "t")]
    place = resources.get("place", ("", 0))
    if "shared" in place[0].split(":"):
        shared.append(place[1])
    base = {
        "scheduler": Scheduler.PBS,
        "has_time_limit": "walltime" in resources,
        "is_shared": shared[0] if shared and "excl" not in place[0] else None,
    }
    for name in ("select", "nodes"):
        if name in resources:
            text, line = resources[name]
            return _from_chunks(text, line, base)
    return RequestedResources(**base)  # type: ignore[arg-type]


def _pbs_resources(options: Sequence[Option]) -> Iterable[tuple[str, tuple[str, int]]]:
    """Yield every `key=value` of `-l`, separated by commas."""
    for option in options:
        if option.name == "l":
            for part in option.value.split(","):
                key, _, value = part.partition("=")
                yield key.strip(), (value.strip(), option.line)


def _from_chunks(text: str, line: int, base: dict[str, object]) -> RequestedResources:
    """Return the allocation of `2:ncpus=8:ngpus=4+1:ncpus=8`; keep only what all chunks share."""
    chunks = [_chunk(part) for part in text.split("+")]
    nodes = sum(count for count, _ in chunks)
    gpu_counts = {_gpus_of(keys) for _, keys in chunks}
    slots = {whole(keys.get("mpiprocs", keys.get("ppn", "1"))) for _, keys in chunks}
    cpus = any("ncpus" in keys or "ppn" in keys for _, keys in chunks)
    gpus = gpu_counts.pop() if len(gpu_counts) == 1 else None
    return RequestedResources(
        **base,  # type: ignore[arg-type]
        nodes=nodes if 0 < nodes <= MAX_NODES else None,
        nodes_line=line,
        tasks_per_node=slots.pop() if len(slots) == 1 else None,
        gpus_per_node=gpus,
        gpus_line=line if gpus is not None else 0,
        counts_cpus=cpus
        and not any("gpu" in k.lower() or "accel" in k for _, ks in chunks for k in ks),
    )


def _chunk(text: str) -> tuple[int, dict[str, str]]:
    words = text.split(":")
    count = whole(words[0])
    if count is None and words[0].isdecimal():
        count = MAX_NODES + 1  # more than any job has
    keys = {word.partition("=")[0]: word.partition("=")[2] for word in words[count is not None :]}
    return (1 if count is None else count), keys


def _gpus_of(keys: dict[str, str]) -> int | None:
    return whole(keys.get("ngpus", keys.get("gpus")))


# A job script: the directives for a scheduler, and the shell script after them.


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScript:
    """A parsed job script; nothing in it was run.

    Attributes:
        options: Those of all directives, in their order.
        allocation: The resources that the directives request.
        shell: Commands and assignments.
        lines: The text, line by line.
    """

    name: str
    text: str
    lines: tuple[str, ...]
    scheduler: Scheduler
    options: tuple[Option, ...]
    allocation: RequestedResources
    shell: ShellScript


def parse(text: str, name: str) -> JobScript:
    """Parse a script; skip what is not understood; never fail.

    Args:
        text: The script: with `#SBATCH` or `#PBS` lines, or only commands.
        name: The file's name, for messages.
    """
    lines = text.split("\n")
    shell = read_shell(text)
    scheduler, options = _read_directives(_without(shell.here, lines))
    for here in shell.here if not options else ():
        scheduler, options = _read_directives(enumerate(here.raw.split("\n"), here.line))
        if options:  # the here-document of `sbatch <<EOT` is the job script
            shell = shell.read_inner(here.text, here.line)
            break
    return JobScript(
        name=name,
        text=text,
        lines=tuple(lines),
        scheduler=scheduler,
        options=tuple(options),
        allocation=read_allocation(scheduler, options),
        shell=shell,
    )


def _without(here: Iterable[ShellToken], lines: Sequence[str]) -> Iterable[tuple[int, str]]:
    """Return the lines outside the here-documents, with their numbers."""
    inside = {n for each in here for n in range(each.line, each.line + each.raw.count("\n") + 1)}
    return [(n, line) for n, line in enumerate(lines, 1) if n not in inside]


def _read_directives(lines: Iterable[tuple[int, str]]) -> tuple[Scheduler, list[Option]]:
    """Return the scheduler and the options of the directives; mark those after a command."""
    scheduler, options, late = Scheduler.NONE, list[Option](), False
    for number, line in lines:
        late = late or bool(line.strip() and not line.lstrip().startswith("#"))
        found = read_options(line, number, late=late)
        if found is None or (scheduler is not Scheduler.NONE and found[0] is not scheduler):
            continue
        scheduler = found[0]
        options += found[1]
    return scheduler, options


_NAME = re.compile(r"\$\{?(\w+)(?::?-\d+)?\}?")
_PRODUCT = re.compile(r"\$\(\(([\w\s${}]+(?:\*[\w\s${}]+)+)\)\)")
_NODE_NAMES = frozenset({"SLURM_NNODES", "SLURM_JOB_NUM_NODES"})
_NODE_FILE = re.compile(r"PBS_NODEFILE")
_COUNTS = re.compile(r"\bwc\b|\bgrep -c\b")
_UNIQUE = re.compile(r"\buniq\b|sort\s+-u|awk '!")


def is_node_count(text: str, job: "JobScript", line: int | None = None) -> bool:
    """Return whether a text is the scheduler's own variable for the number of nodes."""
    text = shown(job.shell.expand(text, line)).strip()
    name = _NAME.fullmatch(text)
    if name is not None:
        return name[1] in _NODE_NAMES
    if _NODE_FILE.search(text) and _COUNTS.search(text):
        return bool(_UNIQUE.search(text))
    return "scontrol show hostname" in text and bool(_COUNTS.search(text))


def counts_slots(text: str, job: "JobScript", line: int | None = None) -> bool:
    """Return whether a text counts the lines of PBS's node file: slots, not nodes."""
    text = shown(job.shell.expand(text, line))
    return bool(_NODE_FILE.search(text) and _COUNTS.search(text) and not _UNIQUE.search(text))


def number(text: str, job: "JobScript", line: int | None = None) -> int | None:
    """Return the number that a text evaluates to in the requested job; None when it is unknown."""
    filled = shown(job.shell.expand(text, line)).strip()
    found = whole(filled)
    if found is not None:
        return found
    if is_node_count(filled, job):
        return job.allocation.nodes
    if counts_slots(filled, job):
        nodes, slots = job.allocation.nodes, job.allocation.tasks_per_node
        return nodes * slots if nodes and slots else None
    product = _PRODUCT.fullmatch(filled)
    if product is not None:
        return _product(product[1].split("*"), job, line)
    name = _NAME.fullmatch(filled)
    return _known(name[1], job) if name is not None else None


def _product(factors: list[str], job: "JobScript", line: int | None) -> int | None:
    """Return the product of `NNODES * 4`: in $((...)) a name needs no `$`."""
    total = 1
    for factor in factors:
        text = factor.strip()
        found = number(f"${text}" if re.fullmatch(r"[A-Za-z_]\w*", text) else text, job, line)
        if found is None:
            return None
        total *= found
    return total


def _known(name: str, job: "JobScript") -> int | None:
    allocation = job.allocation
    asked = {option.name for option in job.options if not option.late}
    return {
        "SLURM_NTASKS": allocation.ntasks,
        "SLURM_NPROCS": allocation.ntasks,
        "SLURM_NTASKS_PER_NODE": allocation.tasks_per_node if "ntasks-per-node" in asked else None,
        "SLURM_GPUS_PER_NODE": allocation.gpus_per_node if "gpus-per-node" in asked else None,
        "SLURM_GPUS_ON_NODE": allocation.gpus_per_node,
        "SLURM_CPUS_PER_TASK": allocation.cpus_per_task,
    }.get(name)
