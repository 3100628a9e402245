"""GPUs: as many as workers, alike, healthy and free."""

from collections.abc import Iterator, Sequence
from typing import Any

from torchmuster.diagnose.doctor.checks import LONG, Check, Equal, NodePart, look
from torchmuster.diagnose.doctor.show import NodeView, Rule, Situation, differ, names_of, show_bytes
from torchmuster.diagnose.facts.gpu import GpuFacts
from torchmuster.diagnose.finding import Finding, Level

# Source: NVIDIA's list of Xid errors: double-bit ECC, page retirement, NVLink, fallen off the bus, contained and
# uncontained ECC.
_BAD_XIDS = {48, 63, 64, 74, 79, 94, 95}
_LOST_XID = 79
_USED = 0.05
_USED_BYTES = 1 << 30


def numbers(situation: Situation) -> Iterator[Finding]:
    """Nodes without GPUs among nodes with, or fewer than workers."""
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
    """GPUs that the kernel shows and nvidia-smi doesn't."""
    if not seen.facts.num_devices or seen.facts.gpus or not seen.facts.why_not:
        return None
    return Level.NOTE if _lacks_smi(seen) else Level.WARNING


def _lacks_smi(seen: NodePart) -> bool:
    return "No such file" in seen.facts.why_not


def health(situation: Situation) -> Iterator[Finding]:
    """Uncorrected memory errors, and the kernel's messages about GPUs."""
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
    """GPU memory used by another process, which is missing later in the training."""
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
    """A GPU with fewer links than the others: the slowest link decides."""
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
        # Bridges join some GPUs of a node and leave others out on purpose: then it is not the odd one out.
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
    """A GPU that uses fewer PCIe lanes than it has, while others use all of theirs."""
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
    # Bad rows of a GPU's memory are replaced by a reset only.
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
    # The slowest GPU decides, and the smallest memory.
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
