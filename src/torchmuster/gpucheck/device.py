"""The GPUs of this machine, real (by nvidia-smi) or pretended (by a folder), and their use."""

import os
from dataclasses import dataclass

from torchmuster.core import proc
from torchmuster.core.node.kernel import count_devices, visible_gpus
from torchmuster.launcher.facts.gpu import Gpu, ask_gpus

PRETENDED = "pretended"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMachine:
    """The GPUs and driver of this machine.

    Attributes:
        gpus: The GPUs that CUDA_VISIBLE_DEVICES leaves visible.
        why_none: Why there is no GPU, as a phrase.
        pretended: Folder that records the use of pretended devices; empty if they are real.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    why_none: str = ""
    pretended: str = ""

    @property
    def patience(self) -> float:
        """Factor for time limits: a pretending processor is shared, and slower."""
        return 10.0 if self.pretended else 1.0

    @property
    def names(self) -> list[str]:
        """Names of the visible GPUs for CUDA_VISIBLE_DEVICES."""
        return [str(gpu.index) for gpu in self.gpus]


def look() -> GpuMachine:
    """Return the GPUs of this machine."""
    folder = os.environ.get("GPUCHECK_PRETEND", "")
    if folder:
        count = int(os.environ.get("GPUCHECK_PRETEND_GPUS", "1"))
        return GpuMachine(
            gpus=tuple(_pretended(n) for n in range(count)), driver=PRETENDED, pretended=folder
        )
    if not count_devices():
        return GpuMachine(why_none="the kernel shows no NVIDIA device")
    gpus, driver, why = ask_gpus(proc.ask_spared, 10.0)
    chosen = visible_gpus()
    seen = [gpu for gpu in gpus if {str(gpu.index), gpu.uuid} & set(chosen)]
    return GpuMachine(gpus=tuple(seen), driver=driver, why_none=why or "none is visible")


def _pretended(number: int) -> Gpu:
    name = "a pretended GPU (the processor)"
    return Gpu(
        index=number, uuid=f"GPU-pretended-{number}", name=name, memory_bytes=0, used_bytes=0
    )


def in_use(machine: GpuMachine) -> list[int]:
    """Return the bytes in use on each visible GPU; for a pretended one, the number of its users."""
    if machine.pretended:
        held = [name.partition("-") for name in os.listdir(machine.pretended)]
        alive = [number for number, _, pid in held if proc.is_running(int(pid))]
        return [alive.count(str(gpu.index)) for gpu in machine.gpus]
    return [gpu.used_bytes for gpu in look().gpus]


def forget(machine: GpuMachine) -> None:
    """Remove the marks of ended processes from pretended devices."""
    if machine.pretended:
        for name in os.listdir(machine.pretended):
            if not proc.is_running(int(name.partition("-")[2])):
                os.unlink(os.path.join(machine.pretended, name))
