"""Checks of connections between nodes, and of GPUs: equal in number, alike, healthy and free."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torchmuster.diagnose.doctor import show
from torchmuster.diagnose.doctor.checks import LONG, TEXTS, Check, Equal, NodePart, look
from torchmuster.diagnose.finding import Finding, Level, names_of
from torchmuster.launcher.facts.gpu import GpuFacts

# Connections between nodes: a bad row of the matrix is a node's outgoing connections, a bad column
# its incoming ones.


_SLOW = 0.5
_MIN_BULK_BYTES = 1 << 20
_MANY = 4


def no_network(situation: show.Situation) -> Iterator[Finding]:
    """Report that the network survey has found no network that connects all nodes."""
    if situation.no_network and not any(pair.why for pair in situation.pairs):
        what, *tried = situation.no_network
        yield TEXTS["no-network"].finding([], what=what, tried=tried[:8])


def unreachable(situation: show.Situation) -> Iterator[Finding]:
    """Report connections that were refused or not answered."""
    bad = [pair for pair in _between(situation) if pair.why is not None and not pair.stalled]
    for group, words in _groups(situation, bad):
        whys = list(dict.fromkeys(pair.why for pair in group if pair.why))
        yield replace(
            TEXTS["unreachable"].finding(
                [],
                at=_where(situation, group),
                what=words,
                why=whys[0],
                mechanism=_mechanism(whys[0]),
                others=whys[1:4],
            ),
            cause=cause_of_call(whys),
        )


def black_holes(situation: show.Situation) -> Iterator[Finding]:
    """Report connections that pass small packets and drop large ones."""
    bad = [pair for pair in _between(situation) if pair.stalled]
    for group, words in _groups(situation, bad):
        yield TEXTS["mtu-black-hole"].finding(
            [],
            at=_where(situation, group),
            what=words,
            why=group[0].why or "the transfer stalled",
            mtus=_mtus(situation, group),
        )


def busy(situation: show.Situation) -> Iterator[Finding]:
    """Note connections between simulated nodes that timed out: the machine lacks processors."""
    beyond = _between(situation)
    late = [pair for pair in situation.pairs if pair.why is not None and pair not in beyond]
    if late:
        yield TEXTS["machine-busy"].finding(
            [],
            late=len(late),
            pairs=len(situation.pairs),
            whys=list(dict.fromkeys(pair.why for pair in late if pair.why))[:3],
        )


def _between(situation: show.Situation) -> list[show.Pair]:
    """Return the pairs on different machines."""
    nodes = situation.nodes
    return [p for p in situation.pairs if nodes[p.source].machine != nodes[p.target].machine]


def slow_pairs(situation: show.Situation) -> Iterator[Finding]:
    """Report pairs that are slower than half the median: a slow pair slows down every step."""
    if situation.bulk_bytes < _MIN_BULK_BYTES or not situation.has_machines:
        return
    rates = [pair.bytes_per_s for pair in situation.pairs if pair.bytes_per_s]
    if len(rates) < _MANY:
        return
    median = statistics.median(rates)
    slow = [p for p in situation.pairs if p.bytes_per_s and p.bytes_per_s < _SLOW * median]
    for group, words in _groups(situation, slow):
        worst = min(pair.bytes_per_s or 0.0 for pair in group)
        yield TEXTS["slow-pairs"].finding(
            [], at=_where(situation, group), what=words, worst=worst / 1e6, median=median / 1e6
        )


def _groups(
    situation: show.Situation, bad: Sequence[show.Pair]
) -> Iterator[tuple[list[show.Pair], str]]:
    """Yield groups of pairs with a common end, each with a name for the subject of a sentence."""
    names = [node.name for node in situation.nodes]
    left = list(bad)
    num_others = len(names) - 1
    if len(left) == len(names) * num_others and len(names) > 2:
        yield left, f"connections between all {len(names)} nodes"
        return
    if len(names) > 2:
        for node, name in enumerate(names):
            into = [p for p in left if p.target == node]
            if len(into) == num_others:
                yield (
                    into,
                    f"connections to {name} from all other nodes",
                )
                left = [p for p in left if p not in into]
            out = [p for p in left if p.source == node]
            if len(out) >= num_others - 1 and len(out) > 1:
                targets = names_of([names[p.target] for p in out])
                yield out, f"connections from {name} to {targets}"
                left = [p for p in left if p not in out]
    both = [p for p in left if any(q.source == p.target and q.target == p.source for q in left)]
    if both and len(both) == len(left) and len(both) == 2:
        yield both, f"connections between {names[both[0].source]} and {names[both[0].target]}"
        return
    if len(left) > _MANY:
        yield left, f"connections of {len(left)} of {len(names) * num_others} pairs of nodes"
        return
    for pair in left:
        yield [pair], f"connections from {names[pair.source]} to {names[pair.target]}"


def _where(situation: show.Situation, group: Sequence[show.Pair]) -> str:
    names = [node.name for node in situation.nodes]
    shown = [f"{names[pair.source]} to {names[pair.target]}" for pair in group[:6]]
    interfaces = {node.interface for node in situation.nodes if node.interface}
    over = f", on {min(interfaces)}" if len(interfaces) == 1 else ""
    more = f" and {len(group) - 6} more" if len(group) > 6 else ""
    return f"{', '.join(shown)}{more}{over}"


def cause_of_call(whys: Sequence[str]) -> str:
    """Return the cause word for connections that failed for these reasons."""
    return (
        "port-blocked"
        if any("answer" in w or "refused" in w for w in whys)
        else "network-unreachable"
    )


def _mechanism(why: str) -> str:
    if "answer" in why:
        return "no answer at all: a firewall drops the packets, or no host has that address"
    if "refused" in why:
        return "the port was open: a firewall rejects the packets"
    if "no route" in why or "unreachable" in why:
        return "there is no route: another network, or a link that is down"
    return "the connection ended during the handshake"


def _mtus(situation: show.Situation, group: Sequence[show.Pair]) -> list[str]:
    ends = sorted({end for pair in group for end in (pair.source, pair.target)})
    found = []
    for node in (situation.nodes[end] for end in ends):
        network = node.facts.network if node.facts else None
        if network is not None and node.interface in network.mtu:
            found.append(
                f"{node.name}: {node.interface} has MTU {network.mtu[node.interface or '']}"
            )
    return found[:4]


MATRIX_RULES: Sequence[show.Rule] = (no_network, unreachable, black_holes, busy, slow_pairs)


# Source: NVIDIA's list of Xid errors: double-bit ECC, page retirement, NVLink, fallen off the bus,
# contained and uncontained ECC.
_BAD_XIDS = {48, 63, 64, 74, 79, 94, 95}
_LOST_XID = 79
_USED = 0.05
_USED_BYTES = 1 << 30


def numbers(situation: show.Situation) -> Iterator[Finding]:
    """Report nodes that see different numbers of GPUs, or none while others see some."""
    rows = look(situation, "gpu")
    values = {s.node.name: len(s.facts.visible) for s in rows}
    found = show.differ(values, "", lambda k: f"{k} GPU{'s' if k != 1 else ''}")
    if found is not None:
        without = [name for name, number in values.items() if not number]
        yield replace(
            TEXTS["gpu-numbers-differ"].finding(
                without or found.odd,
                level=Level.FAILURE if without else Level.WARNING,
                text=found.text,
                whys=[_why_none(s.node, s.facts) for s in rows if not s.facts.visible][:4],
            ),
            cause="no-gpu" if without else "gpus-differ",
        )


def _why_none(node: show.NodeView, gpu: GpuFacts) -> str:
    if gpu.num_devices:
        return f"{node.name}: CUDA_VISIBLE_DEVICES hides all {gpu.num_devices}"
    return f"{node.name}: neither /proc/driver/nvidia nor /dev/nvidia* shows one"


def _is_silent(seen: NodePart) -> Level | None:
    """Return the level for GPUs that the kernel shows and nvidia-smi doesn't; None if fine."""
    if not seen.facts.num_devices or seen.facts.gpus or not seen.facts.why_not:
        return None
    return Level.NOTE if _lacks_smi(seen) else Level.WARNING


def _lacks_smi(seen: NodePart) -> bool:
    return "No such file" in seen.facts.why_not


def health(situation: show.Situation) -> Iterator[Finding]:
    """Report uncorrected memory errors, and GPUs that are prohibited or throttled."""
    for seen in look(situation, "gpu"):
        node, facts = seen.node, seen.facts
        for gpu in facts.gpus:
            if gpu.num_ecc_errors:
                yield TEXTS["ecc-errors"].finding([node.name], gpu=gpu)
            if gpu.compute_mode == "Prohibited":
                yield TEXTS["gpu-prohibited"].finding([node.name], gpu=gpu)
            if gpu.throttled:
                yield TEXTS["gpu-throttled"].finding(
                    [node.name], gpu=gpu, whys=", ".join(gpu.throttled)
                )


def _xids(seen: NodePart) -> list[str]:
    return [xid for xid in seen.facts.xids if int(xid.split()[-1]) in _BAD_XIDS]


def _xid_level(seen: NodePart) -> Level | None:
    numbers = {int(xid.split()[-1]) for xid in _xids(seen)}
    if not numbers:
        return None
    return Level.FAILURE if _LOST_XID in numbers else Level.WARNING


def _xid_words(seen: NodePart) -> dict[str, Any]:
    pairs = [xid.split() for xid in _xids(seen)[:6]]
    return {
        "numbers": ", ".join(pair[-1] for pair in pairs),
        "devices": [f"device {pair[0]}: Xid {pair[1]}" for pair in pairs],
    }


def in_use(situation: show.Situation) -> Iterator[Finding]:
    """Report memory of the job's GPUs that another process uses: the training will lack it."""
    for seen in look(situation, "gpu"):
        node, facts = seen.node, seen.facts
        chosen = set(facts.visible)
        for gpu in facts.gpus:
            is_ours = str(gpu.index) in chosen or gpu.uuid in chosen
            is_used = gpu.used_bytes > max(_USED_BYTES, _USED * gpu.memory_bytes)
            if is_ours and is_used:
                yield TEXTS["gpu-in-use"].finding(
                    [node.name],
                    gpu=gpu,
                    used=show.show_bytes(gpu.used_bytes),
                    total=show.show_bytes(gpu.memory_bytes),
                )


def nvlinks(situation: show.Situation) -> Iterator[Finding]:
    """Report GPUs with fewer NVLinks up than others of the model: the slowest link decides."""
    rows = [
        (seen.node.name, index, gpu.name, up, number)
        for seen in look(situation, "gpu")
        for index, (gpu, (up, number)) in enumerate(
            zip(seen.facts.gpus, seen.facts.links.nvlinks, strict=False)
        )
    ]
    for model in sorted({row[2] for row in rows}):
        alike = [row for row in rows if row[2] == model]
        most = max(row[3] for row in alike)
        odd = [row for row in alike if row[3] < most]
        if not odd:
            continue
        names = list(dict.fromkeys(row[0] for row in odd))
        # Bridges connect some GPUs of a node and leave others out on purpose: those are no fault.
        broken = any(row[3] for row in odd) or len(odd) * 4 <= len(alike)
        yield TEXTS["nvlinks-down"].finding(
            names,
            level=Level.WARNING if broken else Level.NOTE,
            odd=odd[0],
            most=most,
            all=[f"{n}: GPU {i}: {up} of {all_}" for n, i, _, up, all_ in odd[:6]],
        )


def narrow(situation: show.Situation) -> Iterator[Finding]:
    """Note GPUs that use fewer PCIe lanes than they have while most others use all of theirs."""
    seen = look(situation, "gpu")
    rows = [(s.node.name, gpu) for s in seen for gpu in s.facts.gpus if gpu.pcie_max_width]
    odd = [(name, gpu) for name, gpu in rows if (gpu.pcie_width or 0) < (gpu.pcie_max_width or 0)]
    if odd and len(odd) * 2 < len(rows):  # at rest some drivers narrow all of them
        name, gpu = odd[0]
        yield TEXTS["few-pcie-lanes"].finding(
            list(dict.fromkeys(name for name, _ in odd)), name=name, gpu=gpu
        )


def _copies_over_pcie(seen: NodePart) -> bool:
    return len(seen.facts.visible) > 1 and not seen.facts.links.is_all_nvlink


def _numbers_to_reset(seen: NodePart) -> str:
    return ", ".join(str(gpu.index) for gpu in seen.facts.gpus if gpu.must_be_reset)


RULES: Sequence[show.Rule] = (
    numbers,
    Check(
        TEXTS["gpu-ordinal"],
        bad=lambda s: 0 < len(s.facts.visible) < s.node.num_workers,
        each=True,
        words=lambda s: {
            "number": len(s.facts.visible),
            "s": "s" if len(s.facts.visible) != 1 else "",
            "visible": ",".join(s.facts.visible),
        },
    ),
    Check(TEXTS["no-nvidia-smi"], level=_is_silent, bad=_lacks_smi, each=True),
    Check(TEXTS["nvidia-smi-fails"], level=_is_silent, bad=lambda s: not _lacks_smi(s), each=True),
    Check(
        TEXTS["gpus-not-named"],
        bad=lambda s: 0 < len(s.facts.gpus) < s.facts.num_devices,
        each=True,
        words=lambda s: {"number": len(s.facts.gpus)},
    ),
    health,
    Check(TEXTS["xids"], level=_xid_level, each=True, words=_xid_words),
    # Only a reset replaces bad rows of a GPU's memory.
    Check(
        TEXTS["rows-wait-for-reset"],
        bad=lambda s: bool(_numbers_to_reset(s)),
        each=True,
        words=lambda s: {"numbers": _numbers_to_reset(s)},
    ),
    in_use,
    # The slowest GPU sets the pace, and the smallest memory the limit.
    Equal(
        TEXTS["gpu-models-differ"],
        value=lambda s: ", ".join(sorted({gpu.name for gpu in s.facts.gpus})) or None,
    ),
    nvlinks,
    Equal(TEXTS["gpu-links-differ"], value=lambda s: ", ".join(s.facts.links.kinds) or None),
    Check(
        TEXTS["no-peer-access"],
        bad=lambda s: bool(s.facts.links.kinds and s.facts.links.no_p2p),
        words=lambda s: {
            "pairs": [f"{s.node.name}: GPUs {pair}" for pair in s.facts.links.no_p2p[:4]]
        },
    ),
    narrow,
    # An IOMMU that translates, or ACS, makes direct copies between GPUs hang or crawl.
    Check(TEXTS["iommu"], when=LONG, bad=lambda s: _copies_over_pcie(s) and s.facts.has_iommu),
    Check(
        TEXTS["acs"],
        when=LONG,
        bad=lambda s: _copies_over_pcie(s) and bool(s.facts.links.num_redirecting),
    ),
)
