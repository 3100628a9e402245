"""The job of a scheduler that this process is in: its nodes, and how a command comes to each."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from torchmuster.engines.base import Dialect
from torchmuster.engines.launchers import (
    LaunchCommand,
    choose_launcher,
    find_commands,
    parse_launchers,
)
from torchmuster.engines.registry import find_job, load_dialect
from torchmuster.engines.schedulers import is_in_torque, set_by_schedulers
from torchmuster.errors import UsageError
from torchmuster.model.job import AllocatedNode, Allocation
from torchmuster.model.scheduler import refuse_removed_engine
from torchmuster.node.environment import leave_environment


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnJob:
    """The job around us, or the nodes of it that are ours.

    Attributes:
        launcher: The command that starts others on the other nodes.
    """

    dialect: Dialect
    allocation: Allocation
    launcher: LaunchCommand = field(default_factory=LaunchCommand)

    @property
    def nodes(self) -> tuple[AllocatedNode, ...]:
        """Return its nodes."""
        return self.allocation.nodes

    @property
    def node_names(self) -> tuple[str, ...]:
        """Return the names of its nodes, in their order."""
        return tuple(node.name for node in self.nodes)

    def from_here(self) -> "OwnJob | None":
        """Return it with this node first; None when this is none of its nodes: `salloc` gives a shell on the login node."""
        own = self._own_node()
        if own is None:
            return None
        return self.with_nodes(sorted(self.nodes, key=lambda node: node.name != own))

    def _own_node(self) -> str | None:
        names = self.node_names
        if self.allocation.own_node in names:
            return self.allocation.own_node
        here = {os.uname().nodename, self.allocation.own_node or ""}
        short = {name.partition(".")[0] for name in here if name}
        return next((name for name in names if name.partition(".")[0] in short), None)

    def with_nodes(self, nodes: Iterable[AllocatedNode]) -> "OwnJob":
        """Return it with these nodes only, in this order."""
        return replace(self, allocation=replace(self.allocation, nodes=tuple(nodes)))

    @property
    def can_start_others(self) -> bool:
        """Say whether muster can start something on the other nodes: not in a job of Torque."""
        return not is_in_torque(os.environ)

    def with_launcher(self, words: str | None = None) -> "OwnJob":
        """Return it with the launcher for its other nodes, of those that `words` name; one node needs none.

        Raises:
            EngineError: None of the launchers is installed.
            UsageError: The job is one of Torque.
        """
        wanted = parse_launchers(words)
        if len(self.nodes) < 2:
            return self
        if not self.can_start_others:
            refuse_removed_engine("torque", f"job {self.allocation.job_id}")
        return replace(self, launcher=choose_launcher(self.dialect, wanted, os.environ))

    def leave_environment(self, path: str) -> None:
        """Leave our variables in a file for the job's other nodes, but for what is true of this node only."""
        leave_environment(path, set_by_schedulers(self.dialect))

    def argv(self, node: AllocatedNode, command: Sequence[str]) -> list[str]:
        """Return the command that starts another one on a node."""
        return self.launcher.argv(self.dialect, node, command)


def find_own_job(engine: str | None = None) -> OwnJob | None:
    """Return the job that this process is in, of any scheduler or of the one that is named; None outside of one."""
    if engine is None:
        found = find_job(os.environ, _read)
        return OwnJob(dialect=found[0], allocation=found[1]) if found is not None else None
    dialect = load_dialect(engine)
    allocation = dialect.allocation(os.environ, _read)
    return OwnJob(dialect=dialect, allocation=allocation) if allocation is not None else None


def own_job(engine: str, where: str) -> OwnJob:
    """Return the job of this scheduler that this process is in.

    Raises:
        UsageError: It is in none.
    """
    job = find_own_job(engine)
    if job is None:
        fix = f"muster run or submit --on {engine}"
        raise UsageError(f"this is not a job of {engine}", where=where, fix=fix)
    find_commands(job.dialect, os.environ)
    return job


def _read(path: str) -> str:
    """Return a small file's text: the node file of PBS."""
    with open(path) as file:
        return file.read(1 << 20)
