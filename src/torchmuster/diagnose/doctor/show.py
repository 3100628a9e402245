"""Shows the results of the checks: a row for each node, a matrix, a sentence for each finding."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchmuster.diagnose.doctor.situation import NodeView, show_bytes
from torchmuster.diagnose.facts.collect import CollectedFacts
from torchmuster.model.network import significant

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
    """Return what nodes run on, for the record of a run: one row for each kind of node, with the names of the first."""
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
    """Return one cell of the matrix: `0.12 ms, 940 MB/s`, or why not."""
    if why is not None:
        return why if len(why) <= _MAX_WHY else f"{why[: _MAX_WHY - 3]}..."
    latency = f"{significant(latency_us / 1000)} ms" if latency_us is not None else "reached"
    return f"{latency}, {significant(mb_per_s)} MB/s" if mb_per_s is not None else latency


def matrix_rows(
    names: Sequence[str], pairs: Sequence[Sequence[Any]]
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the matrix: from the row's node to the column's; large ones only by node."""
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
