"""GPUs: as many as workers, alike, healthy and free."""

from collections.abc import Iterator, Sequence

from torchmuster.diagnose.doctor.situation import (
    NodeView,
    Rule,
    Situation,
    differ,
    names_of,
    show_bytes,
)
from torchmuster.diagnose.facts.gpu import GpuFacts
from torchmuster.diagnose.finding import Finding, Level

# Source: NVIDIA's list of Xid errors: double-bit ECC, page retirement, NVLink, fallen off the bus, contained and
# uncontained ECC.
_BAD_XIDS = {48, 63, 64, 74, 79, 94, 95}
_LOST_XID = 79
_USED = 0.05
_USED_BYTES = 1 << 30


def _gpus(situation: Situation) -> list[tuple[NodeView, GpuFacts]]:
    found = [(n, n.facts.gpu) for n in situation.known if n.facts is not None]
    return [(node, gpu) for node, gpu in found if gpu is not None]


def numbers(situation: Situation) -> Iterator[Finding]:
    """Nodes without GPUs among nodes with, or fewer than workers."""
    rows = _gpus(situation)
    found = differ(
        {n.name: len(g.visible) for n, g in rows}, "", lambda k: f"{k} GPU{'s' if k != 1 else ''}"
    )
    if found is not None and any(g.visible for _, g in rows):
        without = [n.name for n, g in rows if not g.visible]
        yield Finding(
            level=Level.FAILURE if without else Level.WARNING,
            cause="no-gpu" if without else "gpus-differ",
            error=f"the nodes see different numbers of GPUs: {found.text}",
            at=names_of(without or found.odd),
            because=tuple(_why_none(n, g) for n, g in rows if not g.visible)[:4],
            hint="ask for the same number on every node (--gpus-per-node), or leave the node out",
            weight=64,
        )
    for node, gpu in rows:
        if 0 < len(gpu.visible) < node.num_workers:
            yield Finding(
                level=Level.WARNING,
                cause="gpu-ordinal",
                error=f"{node.num_workers} workers of {node.name} see {len(gpu.visible)}"
                f" GPU{'s' if len(gpu.visible) != 1 else ''}",
                at=node.name,
                because=(
                    f"CUDA_VISIBLE_DEVICES is {','.join(gpu.visible)}",
                    "torch.cuda.set_device(LOCAL_RANK) fails with `invalid device ordinal`",
                ),
                hint=f"--nproc-per-node {len(gpu.visible)}, or more GPUs (not --gpus-per-task, which hides them)",
                weight=63,
            )


def _why_none(node: NodeView, gpu: GpuFacts) -> str:
    if gpu.num_devices:
        return f"{node.name}: CUDA_VISIBLE_DEVICES hides all {gpu.num_devices}"
    return f"{node.name}: neither /proc/driver/nvidia nor /dev/nvidia* shows one"


def silent(situation: Situation) -> Iterator[Finding]:
    """GPUs that the kernel shows and nvidia-smi doesn't."""
    for node, gpu in _gpus(situation):
        if gpu.num_devices and not gpu.gpus and gpu.why_not:
            missing = "No such file" in gpu.why_not
            yield Finding(
                level=Level.NOTE if missing else Level.WARNING,
                cause="gpu-hardware",
                error=f"the GPUs of {node.name} could not be looked at",
                at=node.name,
                because=(gpu.why_not,),
                hint=None
                if missing
                else "run nvidia-smi there: a GPU that has fallen off the bus makes it hang or fail",
                weight=40,
            )
        elif gpu.gpus and len(gpu.gpus) < gpu.num_devices:
            yield Finding(
                level=Level.WARNING,
                cause="gpu-hardware",
                error=f"nvidia-smi names {len(gpu.gpus)} of {gpu.num_devices} GPUs of {node.name}",
                at=node.name,
                hint="tell the site's staff; leave the node out",
                weight=40,
            )


def health(situation: Situation) -> Iterator[Finding]:
    """Uncorrected memory errors, and what the kernel said of GPUs."""
    for node, facts in _gpus(situation):
        for gpu in facts.gpus:
            where = f"GPU {gpu.index} ({gpu.name}) of {node.name}"
            if gpu.num_ecc_errors:
                yield Finding(
                    level=Level.FAILURE,
                    cause="gpu-hardware",
                    error=f"{where} has {gpu.num_ecc_errors} uncorrected memory errors",
                    at=node.name,
                    because=("counted since the driver was loaded",),
                    hint="leave the node out and tell the site's staff: the GPU needs a reset or is broken",
                    weight=62,
                )
            if gpu.compute_mode == "Prohibited":
                yield Finding(
                    level=Level.FAILURE,
                    cause="gpu-hardware",
                    error=f"{where} takes no work: its compute mode is Prohibited",
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
                    hint="tell the site's staff: cooling or power; leave the node out",
                )
        yield from _xids(node, facts)


def _xids(node: NodeView, facts: GpuFacts) -> Iterator[Finding]:
    bad = [xid for xid in facts.xids if int(xid.split()[-1]) in _BAD_XIDS]
    if bad:
        lost = any(int(xid.split()[-1]) == _LOST_XID for xid in bad)
        yield Finding(
            level=Level.FAILURE if lost else Level.WARNING,
            cause="gpu-hardware",
            error=f"the kernel of {node.name} has reported errors of GPUs:"
            f" Xid {', '.join(x.split()[-1] for x in bad[:6])}",
            at=node.name,
            because=tuple(f"device {xid.split()[0]}: Xid {xid.split()[1]}" for xid in bad[:6]),
            hint="dmesg | grep -i xid; leave the node out when it is of today",
            weight=61,
        )


def in_use(situation: Situation) -> Iterator[Finding]:
    """Memory that somebody else holds is missing in the middle of the training."""
    for node, facts in _gpus(situation):
        chosen = set(facts.visible)
        for gpu in facts.gpus:
            is_ours = str(gpu.index) in chosen or gpu.uuid in chosen
            is_used = gpu.used_bytes > max(_USED_BYTES, _USED * gpu.memory_bytes)
            if is_ours and is_used:
                yield Finding(
                    level=Level.WARNING,
                    cause="gpu-in-use",
                    error=f"GPU {gpu.index} of {node.name} is used by somebody else:"
                    f" {show_bytes(gpu.used_bytes)} of {show_bytes(gpu.memory_bytes)}",
                    at=node.name,
                    because=("a process of another job, or one that a dead job left",),
                    hint="nvidia-smi names the processes; end yours, or choose another node",
                    weight=33,
                )


def models(situation: Situation) -> Iterator[Finding]:
    """Different GPUs: the slowest decides, and the smallest memory."""
    values = {
        n.name: ", ".join(sorted({gpu.name for gpu in g.gpus}))
        for n, g in _gpus(situation)
        if g.gpus
    }
    found = differ(values, "")
    if found is not None:
        yield Finding(
            level=Level.WARNING,
            cause="gpus-differ",
            error=f"the nodes have different GPUs: {found.text}",
            at=names_of(found.odd),
            because=("all wait for the slowest, and the batch must fit into the smallest",),
            hint="choose nodes of one kind (sbatch --constraint or --gres=gpu:TYPE:N)",
        )


def reset_needed(situation: Situation) -> Iterator[Finding]:
    """Bad rows of a GPU's memory are replaced by a reset only."""
    for node, facts in _gpus(situation):
        numbers = [str(gpu.index) for gpu in facts.gpus if gpu.must_be_reset]
        if numbers:
            yield Finding(
                level=Level.WARNING,
                cause="gpu-hardware",
                error=f"bad rows of memory wait to be replaced on GPU {', '.join(numbers)} of {node.name}",
                at=node.name,
                because=(
                    "errors were found there, and only a reset of the GPU puts spare rows in",
                ),
                hint="nvidia-smi -q -d ROW_REMAPPER; tell the site's staff; leave the node out",
                weight=38,
            )


def nvlinks(situation: Situation) -> Iterator[Finding]:
    """A GPU with fewer links than its likes: the slowest way decides."""
    rows = [
        (node.name, index, gpu.name, up, number)
        for node, facts in _gpus(situation)
        for index, (gpu, (up, number)) in enumerate(
            zip(facts.gpus, facts.links.nvlinks, strict=False)
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
            hint="nvidia-smi nvlink -s; dmesg | grep -i xid (74 is NVLink); tell the site's staff",
            weight=36,
        )


def ways_between_gpus(situation: Situation) -> Iterator[Finding]:
    """Nodes whose GPUs are joined differently, and GPUs that can't copy to each other."""
    rows = [(n, g) for n, g in _gpus(situation) if g.links.kinds]
    found = differ({n.name: ", ".join(g.links.kinds) for n, g in rows}, "")
    if found is not None:
        yield Finding(
            level=Level.NOTE,
            cause="gpu-links",
            error=f"GPUs are joined differently: {found.text}",
            at=names_of(found.odd),
            because=("NV is NVLink, PIX and PXB a PCIe switch, NODE and SYS the processor",),
        )
    without = [(n, g) for n, g in rows if g.links.no_p2p]
    if without:
        node, gpu = without[0]
        yield Finding(
            level=Level.NOTE,
            cause="gpu-links",
            error=f"GPUs of {names_of([n.name for n, _ in without])} can't read each other's memory",
            at=names_of([n.name for n, _ in without]),
            because=tuple(f"{node.name}: GPUs {pair}" for pair in gpu.links.no_p2p[:4]),
            hint="NCCL copies through shared memory then, which needs room in /dev/shm and is slower",
        )


def narrow(situation: Situation) -> Iterator[Finding]:
    """A GPU with fewer PCIe lanes than it and its slot have, while others use all of theirs."""
    rows = [(n.name, gpu) for n, g in _gpus(situation) for gpu in g.gpus if gpu.pcie_max_width]
    odd = [(name, gpu) for name, gpu in rows if (gpu.pcie_width or 0) < (gpu.pcie_max_width or 0)]
    if odd and len(odd) * 2 < len(rows):  # at rest some drivers narrow all of them
        name, gpu = odd[0]
        yield Finding(
            level=Level.NOTE,
            cause="gpu-links",
            error=f"GPU {gpu.index} of {name} uses {gpu.pcie_width} of {gpu.pcie_max_width} PCIe lanes",
            at=names_of(list(dict.fromkeys(name for name, _ in odd))),
            because=("the others use all of theirs",),
            hint="look again under load: nvidia-smi --query-gpu=pcie.link.width.current --format=csv",
        )


def translation(situation: Situation) -> Iterator[Finding]:
    """An IOMMU that translates, or ACS, makes direct copies between GPUs hang or crawl."""
    several = [(n, g) for n, g in _gpus(situation) if len(g.visible) > 1]
    over_pcie = [(n, g) for n, g in several if not g.links.is_all_nvlink]
    rows = [n.name for n, g in over_pcie if g.has_iommu]
    if rows and situation.is_long:
        yield Finding(
            level=Level.NOTE,
            cause="iommu",
            error=f"an IOMMU is active on {names_of(rows)}",
            at=names_of(rows),
            because=(
                "copies between GPUs over PCIe may hang then: NCCL hangs right after `Init COMPLETE`",
            ),
            hint="only if it hangs: NCCL_P2P_DISABLE=1 to confirm, `iommu=pt` on the kernel's command line to mend",
        )
    rows = [n.name for n, g in over_pcie if g.links.num_redirecting]
    if rows and situation.is_long:
        number = next(g.links.num_redirecting for _, g in over_pcie if g.links.num_redirecting)
        yield Finding(
            level=Level.NOTE,
            cause="acs",
            error=f"PCI bridges of {names_of(rows)} send what GPUs copy to each other through the processor",
            at=names_of(rows),
            because=(f"ACS redirects on {number} bridges: copies are slow, and may hang",),
            hint="lspci -vvv | grep ACSCtl; outside of virtual machines ACS can be off (BIOS or setpci, by root)",
        )


RULES: Sequence[Rule] = (
    numbers,
    silent,
    health,
    reset_needed,
    in_use,
    models,
    nvlinks,
    ways_between_gpus,
    narrow,
    translation,
)
