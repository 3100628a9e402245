"""Checks of connections between nodes, and of GPUs: equal in number, alike, healthy and free."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from torchmuster.diagnose.doctor.checks import LONG, Check, Equal, NodePart, look
from torchmuster.diagnose.doctor.show import (
    NodeView,
    Pair,
    Rule,
    Situation,
    differ,
    names_of,
    show_bytes,
)
from torchmuster.diagnose.finding import Finding, Level
from torchmuster.launcher.facts.gpu import GpuFacts

# Connections between nodes: a bad row of the matrix is a node's outgoing connections, a bad column
# its incoming ones.


_SLOW = 0.5
_MIN_BULK_BYTES = 1 << 20
_MANY = 4


def no_network(situation: Situation) -> Iterator[Finding]:
    """Report that the network survey has found no network that connects all nodes."""
    if situation.no_network and not any(pair.why for pair in situation.pairs):
        what, *tried = situation.no_network
        yield Finding(
            level=Level.FAILURE,
            cause="network-unreachable",
            error=what,
            because=tuple(tried[:8]),
            hint="open all TCP ports between the nodes, or choose nodes of one network",
            is_certain=True,
            weight=100,
        )


def unreachable(situation: Situation) -> Iterator[Finding]:
    """Report connections that were refused or not answered."""
    bad = [pair for pair in _between(situation) if pair.why is not None and not pair.stalled]
    for group, words in _groups(situation, bad):
        whys = list(dict.fromkeys(pair.why for pair in group if pair.why))
        yield Finding(
            level=Level.FAILURE,
            cause=cause_of_call(whys),
            error=f"{words} fail on a random port: {whys[0]}",
            at=_where(situation, group),
            because=(_mechanism(whys[0]), *whys[1:4]),
            hint="open all TCP ports between the nodes (torch picks random ones): `nft list ruleset` or `iptables -S`"
            " on both, the cloud's security group, or choose another network",
            is_certain=True,
            weight=100,
        )


def black_holes(situation: Situation) -> Iterator[Finding]:
    """Report connections that pass small packets and drop large ones."""
    bad = [pair for pair in _between(situation) if pair.stalled]
    for group, words in _groups(situation, bad):
        yield Finding(
            level=Level.FAILURE,
            cause="mtu-black-hole",
            error=f"{words} are established, but large packets do not arrive",
            at=_where(situation, group),
            because=(
                group[0].why or "the transfer stalled",
                "a hop on the path drops packets as large as the nodes send them (MTU), without an error",
                *_mtus(situation, group),
            ),
            hint="set one MTU along the whole path: `ip link set IFACE mtu 1500` on the nodes,"
            " or jumbo frames on every switch port",
            is_certain=True,
            weight=99,
        )


def busy(situation: Situation) -> Iterator[Finding]:
    """Note connections between simulated nodes that timed out: the machine lacks processors."""
    beyond = _between(situation)
    late = [pair for pair in situation.pairs if pair.why is not None and pair not in beyond]
    if late:
        yield Finding(
            level=Level.NOTE,
            cause="machine-busy",
            error=f"{len(late)} of {len(situation.pairs)} connections between nodes of one machine were not answered in time",
            because=tuple(dict.fromkeys(pair.why for pair in late if pair.why))[:3],
            hint="the machine is overloaded: use fewer simulated nodes",
        )


def _between(situation: Situation) -> list[Pair]:
    """Return the pairs on different machines."""
    nodes = situation.nodes
    return [p for p in situation.pairs if nodes[p.source].machine != nodes[p.target].machine]


def slow_pairs(situation: Situation) -> Iterator[Finding]:
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
        yield Finding(
            level=Level.WARNING,
            cause="slow-path",
            error=f"{words} are slow: {worst / 1e6:.0f} MB/s, the median of all pairs is {median / 1e6:.0f} MB/s",
            at=_where(situation, group),
            because=("a collective is as slow as its slowest pair",),
            hint="look for a link that fell back to a lower speed (`ethtool IFACE`), errors (`ip -s link`), other jobs",
            weight=30,
        )


def _groups(situation: Situation, bad: Sequence[Pair]) -> Iterator[tuple[list[Pair], str]]:
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


def _where(situation: Situation, group: Sequence[Pair]) -> str:
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


def _mtus(situation: Situation, group: Sequence[Pair]) -> list[str]:
    ends = sorted({end for pair in group for end in (pair.source, pair.target)})
    found = []
    for node in (situation.nodes[end] for end in ends):
        network = node.facts.network if node.facts else None
        if network is not None and node.interface in network.mtu:
            found.append(
                f"{node.name}: {node.interface} has MTU {network.mtu[node.interface or '']}"
            )
    return found[:4]


MATRIX_RULES: Sequence[Rule] = (no_network, unreachable, black_holes, busy, slow_pairs)


# Source: NVIDIA's list of Xid errors: double-bit ECC, page retirement, NVLink, fallen off the bus,
# contained and uncontained ECC.
_BAD_XIDS = {48, 63, 64, 74, 79, 94, 95}
_LOST_XID = 79
_USED = 0.05
_USED_BYTES = 1 << 30


def numbers(situation: Situation) -> Iterator[Finding]:
    """Report nodes that see different numbers of GPUs, or none while others see some."""
    rows = look(situation, "gpu")
    values = {s.node.name: len(s.facts.visible) for s in rows}
    found = differ(values, "", lambda k: f"{k} GPU{'s' if k != 1 else ''}")
    if found is not None:
        without = [name for name, number in values.items() if not number]
        yield Finding(
            level=Level.FAILURE if without else Level.WARNING,
            cause="no-gpu" if without else "gpus-differ",
            error=f"the nodes see different numbers of GPUs: {found.text}",
            at=names_of(without or found.odd),
            because=tuple(_why_none(s.node, s.facts) for s in rows if not s.facts.visible)[:4],
            hint="ask for the same number on every node (--gpus-per-node), or leave the node out",
            weight=64,
        )


def _why_none(node: NodeView, gpu: GpuFacts) -> str:
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


def health(situation: Situation) -> Iterator[Finding]:
    """Report uncorrected memory errors, and GPUs that are prohibited or throttled."""
    for seen in look(situation, "gpu"):
        node, facts = seen.node, seen.facts
        for gpu in facts.gpus:
            where = f"GPU {gpu.index} ({gpu.name}) of {node.name}"
            if gpu.num_ecc_errors:
                yield Finding(
                    level=Level.FAILURE,
                    cause="gpu-hardware",
                    error=f"{where} has {gpu.num_ecc_errors} uncorrected memory errors",
                    at=node.name,
                    because=("counted since the driver was loaded",),
                    hint="leave the node out and report it to the site's staff: the GPU needs a reset or is broken",
                    weight=62,
                )
            if gpu.compute_mode == "Prohibited":
                yield Finding(
                    level=Level.FAILURE,
                    cause="gpu-hardware",
                    error=f"{where} accepts no work: its compute mode is Prohibited",
                    at=node.name,
                    hint="nvidia-smi -c DEFAULT, by root",
                )
            if gpu.throttled:
                yield Finding(
                    level=Level.WARNING,
                    cause="gpu-throttled",
                    error=f"{where} is slowed down by its hardware: {', '.join(gpu.throttled)}",
                    at=node.name,
                    because=("the slowest GPU decides for all",),
                    hint="report it to the site's staff: cooling or power; leave the node out",
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


def in_use(situation: Situation) -> Iterator[Finding]:
    """Report memory of the job's GPUs that another process uses: the training will lack it."""
    for seen in look(situation, "gpu"):
        node, facts = seen.node, seen.facts
        chosen = set(facts.visible)
        for gpu in facts.gpus:
            is_ours = str(gpu.index) in chosen or gpu.uuid in chosen
            is_used = gpu.used_bytes > max(_USED_BYTES, _USED * gpu.memory_bytes)
            if is_ours and is_used:
                yield Finding(
                    level=Level.WARNING,
                    cause="gpu-in-use",
                    error=f"GPU {gpu.index} of {node.name} is used by another process:"
                    f" {show_bytes(gpu.used_bytes)} of {show_bytes(gpu.memory_bytes)}",
                    at=node.name,
                    because=("it belongs to another job, or a dead job left it behind",),
                    hint="nvidia-smi names the processes; end yours, or choose another node",
                    weight=33,
                )


def nvlinks(situation: Situation) -> Iterator[Finding]:
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
        yield Finding(
            level=Level.WARNING if broken else Level.NOTE,
            cause="gpu-links",
            error=f"GPU {odd[0][1]} of {odd[0][0]} has {odd[0][3]} of {odd[0][4]} NVLinks up, others {most}",
            at=names_of(names),
            because=tuple(f"{n}: GPU {i}: {up} of {all_}" for n, i, _, up, all_ in odd[:6]),
            hint="nvidia-smi nvlink -s; dmesg | grep -i xid (74 is NVLink); report it to the site's staff",
            weight=36,
        )


def narrow(situation: Situation) -> Iterator[Finding]:
    """Note GPUs that use fewer PCIe lanes than they have while most others use all of theirs."""
    seen = look(situation, "gpu")
    rows = [(s.node.name, gpu) for s in seen for gpu in s.facts.gpus if gpu.pcie_max_width]
    odd = [(name, gpu) for name, gpu in rows if (gpu.pcie_width or 0) < (gpu.pcie_max_width or 0)]
    if odd and len(odd) * 2 < len(rows):  # at rest some drivers narrow all of them
        name, gpu = odd[0]
        yield Finding(
            level=Level.NOTE,
            cause="gpu-links",
            error=f"GPU {gpu.index} of {name} uses {gpu.pcie_width} of {gpu.pcie_max_width} PCIe lanes",
            at=names_of(list(dict.fromkeys(name for name, _ in odd))),
            because=("the others use all of theirs",),
            hint="check again under load: nvidia-smi --query-gpu=pcie.link.width.current --format=csv",
        )


def _copies_over_pcie(seen: NodePart) -> bool:
    return len(seen.facts.visible) > 1 and not seen.facts.links.is_all_nvlink


def _numbers_to_reset(seen: NodePart) -> str:
    return ", ".join(str(gpu.index) for gpu in seen.facts.gpus if gpu.must_be_reset)


RULES: Sequence[Rule] = (
    numbers,
    Check(
        of="gpu",
        cause="gpu-ordinal",
        level=Level.WARNING,
        bad=lambda s: 0 < len(s.facts.visible) < s.node.num_workers,
        each=True,
        error="{node.num_workers} workers of {nodes} see {number} GPU{s}",
        words=lambda s: {
            "number": len(s.facts.visible),
            "s": "s" if len(s.facts.visible) != 1 else "",
            "visible": ",".join(s.facts.visible),
        },
        because=(
            "CUDA_VISIBLE_DEVICES is {visible}",
            "torch.cuda.set_device(LOCAL_RANK) fails with `invalid device ordinal`",
        ),
        hint="--nproc-per-node {number}, or more GPUs (not --gpus-per-task, which hides them)",
        weight=63,
    ),
    Check(
        of="gpu",
        cause="gpu-hardware",
        level=_is_silent,
        bad=_lacks_smi,
        each=True,
        error="the GPUs of {nodes} could not be checked",
        because=("{facts.why_not}",),
        weight=40,
    ),
    Check(
        of="gpu",
        cause="gpu-hardware",
        level=_is_silent,
        bad=lambda s: not _lacks_smi(s),
        each=True,
        error="the GPUs of {nodes} could not be checked",
        because=("{facts.why_not}",),
        hint="run nvidia-smi there: a GPU that has fallen off the bus makes it hang or fail",
        weight=40,
    ),
    Check(
        of="gpu",
        cause="gpu-hardware",
        level=Level.WARNING,
        bad=lambda s: 0 < len(s.facts.gpus) < s.facts.num_devices,
        each=True,
        error="nvidia-smi names {number} of {facts.num_devices} GPUs of {nodes}",
        words=lambda s: {"number": len(s.facts.gpus)},
        hint="report it to the site's staff; leave the node out",
        weight=40,
    ),
    health,
    Check(
        of="gpu",
        cause="gpu-hardware",
        level=_xid_level,
        each=True,
        error="the kernel of {nodes} has reported errors of GPUs: Xid {numbers}",
        words=_xid_words,
        because=("{devices}",),
        hint="dmesg | grep -i xid; leave the node out if the message is from today",
        weight=61,
    ),
    # Only a reset replaces bad rows of a GPU's memory.
    Check(
        of="gpu",
        cause="gpu-hardware",
        level=Level.WARNING,
        bad=lambda s: bool(_numbers_to_reset(s)),
        each=True,
        error="faulty memory rows wait to be replaced on GPU {numbers} of {nodes}",
        words=lambda s: {"numbers": _numbers_to_reset(s)},
        because=("errors were found there, and only a reset of the GPU activates spare rows",),
        hint="nvidia-smi -q -d ROW_REMAPPER; report it to the site's staff; leave the node out",
        weight=38,
    ),
    in_use,
    # The slowest GPU sets the pace, and the smallest memory the limit.
    Equal(
        of="gpu",
        cause="gpus-differ",
        level=Level.WARNING,
        value=lambda s: ", ".join(sorted({gpu.name for gpu in s.facts.gpus})) or None,
        error="the nodes have different GPUs: {text}",
        because=("all wait for the slowest, and the batch must fit into the smallest",),
        hint="choose nodes of one kind (sbatch --constraint or --gres=gpu:TYPE:N)",
    ),
    nvlinks,
    Equal(
        of="gpu",
        cause="gpu-links",
        level=Level.NOTE,
        value=lambda s: ", ".join(s.facts.links.kinds) or None,
        error="GPUs are connected differently: {text}",
        because=("NV is NVLink, PIX and PXB a PCIe switch, NODE and SYS the processor",),
    ),
    Check(
        of="gpu",
        cause="gpu-links",
        level=Level.NOTE,
        bad=lambda s: bool(s.facts.links.kinds and s.facts.links.no_p2p),
        error="GPUs of {nodes} can't read each other's memory",
        words=lambda s: {
            "pairs": [f"{s.node.name}: GPUs {pair}" for pair in s.facts.links.no_p2p[:4]]
        },
        because=("{pairs}",),
        hint="NCCL copies through shared memory then, which needs room in /dev/shm and is slower",
    ),
    narrow,
    # An IOMMU that translates, or ACS, makes direct copies between GPUs hang or crawl.
    Check(
        of="gpu",
        cause="iommu",
        level=Level.NOTE,
        when=LONG,
        bad=lambda s: _copies_over_pcie(s) and s.facts.has_iommu,
        error="an IOMMU is active on {nodes}",
        because=(
            "copies between GPUs over PCIe may hang then: NCCL hangs right after `Init COMPLETE`",
        ),
        hint="only if it hangs: NCCL_P2P_DISABLE=1 to confirm, `iommu=pt` on the kernel's command line to fix it",
    ),
    Check(
        of="gpu",
        cause="acs",
        level=Level.NOTE,
        when=LONG,
        bad=lambda s: _copies_over_pcie(s) and bool(s.facts.links.num_redirecting),
        error="PCI bridges of {nodes} route copies between GPUs through the processor",
        because=(
            "ACS redirects on {facts.links.num_redirecting} bridges: copies are slow, and may hang",
        ),
        hint="lspci -vvv | grep ACSCtl; outside of virtual machines ACS can be off (BIOS or setpci, by root)",
    ),
)
