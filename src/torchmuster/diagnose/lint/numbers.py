"""Evaluates a text of a job script as a number: `$SLURM_NNODES`, `$(sort -u $PBS_NODEFILE | wc -l)`."""

import re
from typing import TYPE_CHECKING

from torchmuster.diagnose.lint.allocation import whole
from torchmuster.diagnose.lint.shell_lex import shown

if TYPE_CHECKING:
    from torchmuster.diagnose.lint.jobscript import JobScript

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
    """Return whether a text counts the lines of PBS's node file: one for each slot, not for each node."""
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
    """Return what `NNODES * 4` comes to: in $((...)) a name needs no `$`."""
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
