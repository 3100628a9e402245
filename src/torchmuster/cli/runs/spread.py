"""Which hosts of a job a `muster torchrun` line is for, and whether its head has to start the others."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchmuster.cli.runs.job import find_allocation, own_node
from torchmuster.engines.ways import choose_way
from torchmuster.errors import MusterError, UsageError
from torchmuster.model.display.text import few_of
from torchmuster.owner.jobs.spread import SpreadHosts, is_one_of_many

if TYPE_CHECKING:
    from torchmuster.model.job import AllocatedNode
    from torchmuster.spec.torchrun import TorchrunLine


def find_party(line: "TorchrunLine", environment: Mapping[str, str]) -> SpreadHosts | None:
    """Return the hosts, this one first; None where the job has one only or this host is none of them.

    Raises:
        UsageError: The line is for more hosts than the job has, and nobody else starts agents.
    """
    try:
        found = find_allocation()
    except MusterError:
        return None  # another host of a PBS job, which has no node file
    if found is None:
        return None
    dialect, allocation = found
    own = own_node(allocation)
    if own is None or len(allocation.nodes) < 2:
        return None
    nodes = tuple(sorted(allocation.nodes, key=lambda node: node.name != own))
    is_first = own == allocation.nodes[0].name
    job = f"job {allocation.job_id} of {dialect.name}"
    if is_one_of_many(environment):
        return SpreadHosts(dialect=dialect, nodes=_named(line, nodes), spreads=False)
    if line.no_spread:
        hint = (
            f"torchrun was started on {own} only? Without --no-spread it starts the others itself"
        )
        return SpreadHosts(dialect=dialect, nodes=_named(line, nodes), spreads=False, hint=hint)
    return SpreadHosts(
        dialect=dialect,
        nodes=nodes[: line.max_nodes],
        # At `localhost` every host is a head; only the first may then be one for the others.
        spreads=is_first or line.meeting.host not in ("localhost", "127.0.0.1", "::1"),
        is_first=is_first,
        way=choose_way(dialect, (), environment),
        notes=_compare(line, nodes, job),
    )


def _named(line: "TorchrunLine", nodes: "tuple[AllocatedNode, ...]") -> "tuple[AllocatedNode, ...]":
    """Return the hosts if it is certain that the run is on them: on all of them."""
    return nodes if len(nodes) == line.max_nodes else ()


def _compare(line: "TorchrunLine", nodes: "tuple[AllocatedNode, ...]", job: str) -> tuple[str, ...]:
    """Return a sentence where `--nnodes` and the job differ."""
    names = few_of((node.name for node in nodes), 8)
    if line.min_nodes > len(nodes):
        raise UsageError(
            f"--nnodes asks for {line.min_nodes} nodes, the job has {len(nodes)}",
            where=job,
            why=f"its hosts are {names}",
            fix=f"--nnodes {len(nodes)}, or --no-spread if you start the others yourself",
        )
    if line.max_nodes > len(nodes):
        return (f"--nnodes allows {line.max_nodes} nodes, {job} has {len(nodes)}: {names}",)
    if line.max_nodes < len(nodes):
        rest = few_of((node.name for node in nodes[line.max_nodes :]), 8)
        return (f"--nnodes is {line.max_nodes}, {job} has {len(nodes)} hosts: unused: {rest}",)
    return ()
