"""Which nodes hold what: each node's part is on other nodes too, away from its machine and its switch where that is known."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchmuster import proc


@dataclass(frozen=True, slots=True)
class NodeStand:
    """Where a node stands.

    Attributes:
        machine: The same for two nodes that are lost together.
        switch: Of its network; empty where that isn't known.
    """

    machine: str
    switch: str = ""


def own_stand(environ: Mapping[str, str] = os.environ) -> NodeStand:
    """Return where this node stands.

    Slurm names the switches above a node, from the top: `core.rack3.n17` (sbatch(1), SLURM_TOPOLOGY_ADDR).
    """
    switches = environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]
    return NodeStand(machine=f"{proc.boot_id()}/{os.uname().nodename}", switch=switches)


def choose_shifts(nodes: Sequence[NodeStand], copies: int) -> list[int]:
    """Return the distances at which the other holders stand: node i's part is also on node i + shift, around the ring.

    The same distance for all nodes, so that each holds as much as any other. Those come first that part the fewest pairs
    which share a machine, then a switch.
    """
    count = len(nodes)

    def rank_of(shift: int) -> tuple[int, int, int]:
        pairs = [(nodes[i], nodes[(i + shift) % count]) for i in range(count)]
        same_machine = sum(a.machine == b.machine for a, b in pairs)
        same_switch = sum(bool(a.switch) and a.switch == b.switch for a, b in pairs)
        return same_machine, same_switch, shift

    return sorted(range(1, count), key=rank_of)[:copies]


def risk_in_words(nodes: Sequence[NodeStand], shifts: Sequence[int]) -> str | None:
    """Return what a user has to know of the chosen places; None when each part is on another machine."""
    count = len(nodes)
    if count == 1:
        return "there is one node: snapshots in memory survive its workers, not its own loss"
    machines = {stand.machine for stand in nodes}
    if len(machines) == count:
        return None
    alone = [
        i
        for i, stand in enumerate(nodes)
        if all(nodes[(i + s) % count].machine == stand.machine for s in shifts)
    ]
    if not alone:
        return None
    return (
        f"{count} nodes are on {len(machines)} machine{'s' if len(machines) > 1 else ''}: what memory holds of node"
        f" {alone[0]} is lost with its machine"
    )
