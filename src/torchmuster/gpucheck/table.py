"""All checks: what matters most comes first."""

from collections.abc import Callable
from dataclasses import dataclass

from torchmuster.gpucheck import bench, collectives, devices, faults, forks, tools, training
from torchmuster.gpucheck.kit import Kit

CORRECTNESS, BENCH = "correctness", "bench"


@dataclass(frozen=True, slots=True)
class GpuCheck:
    """One check.

    Attributes:
        run: Raises `FailedError` or `ImpossibleError`.
        limit_s: After which it is ended; several times what it needs on one GPU.
        num_gpus: Without so many it is not possible.
        says: What holds where it passes; empty: the first line of the docstring of `run`.
    """

    name: str
    run: Callable[[Kit], None]
    limit_s: float = 60.0
    part: str = CORRECTNESS
    num_gpus: int = 1
    says: str = ""

    @property
    def promise(self) -> str:
        """What holds where it passes."""
        return self.says or (self.run.__doc__ or "").strip().splitlines()[0]


def _exact(kind: str, what: str) -> GpuCheck:
    says = f"{what}: killed twice, resumed, the weights of the undisturbed run."
    return GpuCheck(f"train.{kind}", training.exact_resume(kind), 120.0, says=says)


def _starts(num: int) -> GpuCheck:
    says = f"Start of {num} rank{'s' if num > 1 else ''} on one GPU, beside torchrun."
    return GpuCheck(f"bench.start-{num}", bench.starts(num), 120.0, BENCH, says=says)


CHECKS = (
    GpuCheck("fork.child", forks.child_uses_device),
    GpuCheck("nccl.alone", collectives.nccl_alone),
    _exact("plain", "float32"),
    GpuCheck("faults.kill", faults.killed),
    GpuCheck("devices.by-rank", devices.by_rank),
    GpuCheck("fork.early", forks.early_initialisation),
    _exact("bf16", "bf16"),
    _exact("fp16", "fp16 with a gradient scaler"),
    _exact("dropout", "Dropout from the device's generator"),
    _exact("fsdp", "FSDP2 on one rank"),
    GpuCheck("snapshots.device", training.on_device),
    GpuCheck("snapshots.costs", training.costs),
    GpuCheck("snapshots.memory", training.in_memory, 120.0),
    GpuCheck("faults.memory", faults.out_of_memory),
    GpuCheck("faults.assert", faults.device_assert),
    GpuCheck("faults.address", faults.illegal_address),
    GpuCheck("hang.collective", faults.hang_in_collective, 75.0),
    GpuCheck("hang.kernel", faults.hang_in_kernel, 75.0),
    GpuCheck("nccl.refuses", collectives.nccl_refuses),
    GpuCheck("gloo.shares", collectives.gloo_shares),
    GpuCheck("devices.uuid", devices.by_uuid),
    GpuCheck("devices.lists", devices.schedulers_lists),
    GpuCheck("devices.too-many", devices.too_many_ranks),
    GpuCheck("devices.shared", devices.shared_device),
    GpuCheck("fork.questions", forks.early_questions),
    GpuCheck("fork.pinned", forks.pinned_memory),
    GpuCheck("fork.graph", forks.graphs),
    GpuCheck("fork.compile", forks.compiled, 120.0),
    _exact("compile", "`torch.compile`"),
    GpuCheck("tools.verify", tools.verified_steps),
    GpuCheck("tools.replay", tools.replay),
    GpuCheck("tools.top", tools.top),
    GpuCheck("tools.doctor", tools.doctor),
    GpuCheck("tools.per-gpu", tools.per_gpu),
    GpuCheck("faults.xid", faults.xid, num_gpus=0),
    GpuCheck("snapshots.10-gb", training.ten_gigabytes, 180.0),
    GpuCheck("nccl.gpus", collectives.nccl_over_gpus, num_gpus=2),
    GpuCheck("nccl.nodes", collectives.nccl_over_nodes),
    GpuCheck("devices.mig", devices.parts_of_gpus),
    _starts(1),
    _starts(2),
    _starts(8),
    GpuCheck("bench.recovery", bench.recovery, 120.0, BENCH),
    GpuCheck("bench.step", bench.steps, part=BENCH),
    GpuCheck("bench.gpt", bench.language_model, 180.0, BENCH),
)
