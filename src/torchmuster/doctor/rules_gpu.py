"""GPUs: as many as workers, alike, healthy and free."""

from collections.abc import Iterator, Sequence

from torchmuster.doctor.facts_gpu import GpuFacts
from torchmuster.doctor.finding import (
    Finding,
    Level,
    NodeView,
    Rule,
    Situation,
    differ,
    names_of,
    show_bytes,
)

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


def translation(situation: Situation) -> Iterator[Finding]:
    """An IOMMU that translates makes direct copies between GPUs hang or crawl."""
    rows = [n.name for n, g in _gpus(situation) if g.has_iommu and len(g.visible) > 1]
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


RULES: Sequence[Rule] = (numbers, silent, health, in_use, models, translation)
