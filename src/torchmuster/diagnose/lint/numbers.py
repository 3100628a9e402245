"""Parses a job script, and evaluates its texts as numbers, such as `$SLURM_NNODES`."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchmuster.diagnose.lint.allocation import (
    Option,
    RequestedResources,
    Scheduler,
    read_allocation,
    read_options,
    whole,
)
from torchmuster.diagnose.lint.shell_lex import ShellToken, shown
from torchmuster.diagnose.lint.shell_script import ShellScript, read_shell

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
