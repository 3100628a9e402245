"""The options of launchers other than torchrun: how many nodes and workers a line of theirs means."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchmuster.diagnose.lint.allocation import option_pairs
from torchmuster.diagnose.lint.jobscript import JobScript
from torchmuster.diagnose.lint.numbers import number
from torchmuster.diagnose.lint.shell_lex import FIXED
from torchmuster.diagnose.lint.starts import ScriptStart, tasks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The options by which a launcher is told of several nodes; each is started once on each node.

    Attributes:
        nodes, rank, address, workers: Names, without dashes.
        is_total: `workers` counts those of all nodes.
        file: An option that names a file in which all that may stand.
        free: An option with which the nodes number themselves.
    """

    nodes: str
    rank: str
    address: str
    workers: str
    is_total: bool = False
    file: str | None = None
    free: tuple[str, str] | None = None


LAUNCHERS = {
    # huggingface/accelerate 16cb6eb, commands/launch.py and utils/launch.py: 1 machine is the default; the number of
    # processes is divided by that of machines, and without one it is the number of GPUs of one node.
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
    """What stands between a launcher's name and the script; `partial` when some of it is in unknown variables."""

    values: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False

    def number(self, name: str, job: JobScript, line: int) -> int | None:
        """Return an option as a number; None when it is not there or can't be told."""
        return number(self.values[name], job, line) if name in self.values else None


def options_of(start: ScriptStart) -> GivenOptions:
    """Return a launcher's own options, with `_` in their names; those of the script behind it are left out."""
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
    """Return how many workers a line starts on each node, as far as it says so itself."""
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
