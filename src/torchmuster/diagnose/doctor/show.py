"""The input of doctor's rules, and the form of their results: rows, a matrix, sentences."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torchmuster.diagnose.finding import MAX_NAMED, Finding, has, names_of
from torchmuster.launcher.facts.collect import CollectedFacts
from torchmuster.launcher.model.events import significant

# The input: facts of all nodes and the connections between them; helpers for rules that compare
# nodes.


V = TypeVar("V", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node as the head knows it.

    Attributes:
        facts: None when the node has not reported any; `why_not` says why.
        machine: The same for nodes that share a kernel and its network.
        interface: The one of the network that workers will use; None when none was chosen.
        clock_s: How far its clock is ahead of the head's, in seconds; None when not measured.
        clock_error_s: The uncertainty of `clock_s`.
    """

    name: str
    facts: CollectedFacts | None = None
    why_not: str = ""
    num_workers: int = 1
    machine: str = ""
    interface: str | None = None
    clock_s: float | None = None
    clock_error_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The result of a connection from one node to another; `why` is None on success.

    Attributes:
        source, target: Positions in the list of nodes.
        stalled: A connection was made, but not all bytes came through it.
    """

    source: int
    target: int
    why: str | None = None
    stalled: bool = False
    latency_s: float | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All input of the rules; the head is the first of the nodes.

    Attributes:
        is_long: Whether this is the long form (`muster doctor`), not the preflight of a run.
        pairs: In the long form only.
        bulk_bytes: How many bytes each pair had to transfer.
        no_network: The report's sentence and evidence when no network connects all nodes.
        script_is_program: Whether the examined script is the program of the run.
    """

    nodes: tuple[NodeView, ...]
    is_long: bool = False
    pairs: tuple[Pair, ...] = ()
    bulk_bytes: int = 0
    no_network: tuple[str, ...] = ()
    script_is_program: bool = True

    @property
    def known(self) -> tuple[NodeView, ...]:
        """The nodes that have reported facts."""
        return tuple(node for node in self.nodes if node.facts is not None)

    @property
    def has_machines(self) -> bool:
        """Return whether the nodes are on several machines."""
        return len({node.machine for node in self.nodes}) > 1


Rule = Callable[[Situation], Iterator[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Values that should be equal on all nodes and are not.

    Attributes:
        text: `n3 has torch 2.6.0, the 7 others 2.13.0`.
        odd: The nodes outside the majority; all nodes if there is none.
    """

    text: str
    odd: tuple[str, ...]
    values: tuple[str, ...] = field(default=())


def differ(values: Mapping[str, V], what: str, show: Callable[[V], str] = str) -> Difference | None:
    """Return the difference between nodes; None when all are equal.

    Args:
        values: By the node's name, in the order of the nodes.
        what: The name of the values, as `torch`; may be empty.
        show: Converts a value to text.
    """
    counted = Counter(values.values())
    if len(counted) < 2:
        return None
    (common, number), (_, second) = counted.most_common(2)
    word = f"{what} " if what else ""
    groups: dict[V, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(value, []).append(name)
    shown = tuple(show(value) for value in groups)
    if number == second:  # no majority: list all values
        parts = [f"{names_of(names)} {has(names)} {word}{show(v)}" for v, names in groups.items()]
        return Difference(text=", ".join(parts[:MAX_NAMED]), odd=tuple(values), values=shown)
    odd = {v: names for v, names in groups.items() if v != common}
    parts = [f"{names_of(names)} {has(names)} {word}{show(v)}" for v, names in odd.items()]
    others = f"the {number} others" if number > 1 else "the other"
    text = f"{', '.join(parts[:MAX_NAMED])}, {others} {show(common)}"
    return Difference(
        text=text, odd=tuple(n for names in odd.values() for n in names), values=shown
    )


def show_bytes(number: float) -> str:
    """Return a size as `64 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"


COLUMNS = (
    "node",
    "host",
    "address",
    "python",
    "torch",
    "gpus",
    "cpus",
    "memory",
    "shm",
    "free",
    "clock",
)
_MATRIX_UP_TO = 16
_MAX_WHY = 40


def node_row(node: NodeView) -> dict[str, Any]:
    """Return a node's row of the table as plain values; the keys are part of `--json`."""
    facts = node.facts or CollectedFacts()
    system, network, gpu = facts.system, facts.network, facts.gpu
    run = [f for f in facts.files.folders if f.role in ("run", "temp")] if facts.files else []
    address = (
        next((i.address for i in network.interfaces if i.name == node.interface), None)
        if network
        else None
    )
    if network and address is None:
        address = next((i.address for i in network.interfaces if i.is_up), None)
    return {
        "node": node.name,
        "host": system.host if system else None,
        "address": address,
        "interface": node.interface,
        "mtu": network.mtu.get(node.interface or "") if network else None,
        "python": facts.torch.python if facts.torch and facts.torch.is_known else None,
        "torch": facts.torch.torch if facts.torch and facts.torch.is_known else None,
        "cuda": facts.torch.cuda if facts.torch else None,
        "nccl": facts.torch.nccl if facts.torch else None,
        "machine": system.machine if system else None,
        "kernel": system.kernel if system else None,
        "num_gpus": len(gpu.visible) if gpu else None,
        "gpu": gpu.gpus[0].name if gpu and gpu.gpus else None,
        "gpu_links": ", ".join(gpu.links.kinds) or None if gpu else None,
        "driver": gpu.driver or None if gpu else None,
        "num_cpus": system.num_usable_cpus if system else None,
        "memory_bytes": system.memory_bytes if system else None,
        "memory_limit_bytes": system.memory_limit_bytes if system else None,
        "shm_bytes": system.shm_bytes if system else None,
        "free_bytes": run[0].free_bytes if run and run[0].is_there else None,
        "clock_s": round(node.clock_s, 3) if node.clock_s is not None else None,
        "unknown": {**facts.unknown, **({"all": node.why_not} if node.facts is None else {})},
    }


_SOFTWARE = (
    *("python", "torch", "cuda", "nccl", "driver", "num_gpus", "gpu"),
    *("machine", "kernel", "num_cpus", "memory_bytes"),
)
_MAX_KINDS, _MAX_NODES = 8, 16


def software_rows(nodes: Iterable[NodeView]) -> list[dict[str, Any]]:
    """Return a row for each kind of node (software and hardware), for the record of a run.

    A row has the names of its first nodes.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for node in nodes:
        if node.facts is None:
            continue
        row = node_row(node)
        values = {name: row[name] for name in _SOFTWARE if row[name] is not None}
        kind = found.setdefault(tuple(values.items()), {"nodes": [], "num_nodes": 0, **values})
        kind["num_nodes"] += 1
        if len(kind["nodes"]) < _MAX_NODES:
            kind["nodes"].append(node.name)
    return list(found.values())[:_MAX_KINDS]


def table_row(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a node's row, in the order of `COLUMNS`."""

    def size(name: str) -> str:
        return show_bytes(row[name]) if row.get(name) is not None else "?"

    def text(name: str) -> str:
        return str(row[name]) if row.get(name) is not None else "?"

    gpus = text("num_gpus")
    if row.get("gpu"):
        gpus = f"{gpus} {row['gpu']}"
    clock = row.get("clock_s")
    return [
        text("node"),
        text("host"),
        text("address"),
        text("python"),
        text("torch") if row.get("torch") or row.get("python") is None else "none",
        gpus,
        text("num_cpus"),
        size("memory_bytes"),
        size("shm_bytes"),
        size("free_bytes"),
        f"{clock:+.2f} s" if clock is not None else "?",
    ]


def pair_cell(why: str | None, latency_us: float | None, mb_per_s: float | None) -> str:
    """Return one cell of the matrix: `0.12 ms, 940 MB/s`, or why the connection failed."""
    if why is not None:
        return why if len(why) <= _MAX_WHY else f"{why[: _MAX_WHY - 3]}..."
    latency = f"{significant(latency_us / 1000)} ms" if latency_us is not None else "reached"
    return f"{latency}, {significant(mb_per_s)} MB/s" if mb_per_s is not None else latency


def matrix_rows(
    names: Sequence[str], pairs: Sequence[Sequence[Any]]
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the matrix: from the row's node to the column's.

    A large matrix is summarized by node.
    """
    if len(names) > _MATRIX_UP_TO:
        return _by_node(names, pairs)
    cells = {(source, target): pair_cell(why, us, rate) for source, target, why, us, rate in pairs}
    header = ["from \\ to", *names]
    rows = [
        [name, *("-" if s == t else cells.get((s, t), "?") for t in range(len(names)))]
        for s, name in enumerate(names)
    ]
    return header, rows


def _by_node(
    names: Sequence[str], pairs: Sequence[Sequence[Any]]
) -> tuple[list[str], list[list[str]]]:
    header = ["node", "reaches", "is reached by", "slowest", "longest"]
    rows = []
    for node, name in enumerate(names):
        out = [p for p in pairs if p[0] == node]
        into = [p for p in pairs if p[1] == node]
        rates = [p[4] for p in out if p[4] is not None]
        delays = [p[3] for p in out if p[3] is not None]
        rows.append(
            [
                name,
                f"{sum(p[2] is None for p in out)} of {len(out)}",
                f"{sum(p[2] is None for p in into)} of {len(into)}",
                f"{significant(min(rates))} MB/s" if rates else "?",
                f"{significant(max(delays) / 1000)} ms" if delays else "?",
            ]
        )
    return header, rows
