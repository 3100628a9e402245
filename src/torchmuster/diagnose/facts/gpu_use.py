"""How busy a GPU is and how much of its memory is in use, by the driver's own library.

NVML is loaded by ctypes: nodes have the standard library only, and every machine with NVIDIA's driver has
libnvidia-ml.so.1. Opening it makes no CUDA context. It is looked up once; without it nobody knows, which is no error.
"""

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_MIB = 1 << 20


# Source: nvml.h. Both have kept their shape since the first version of the library.
class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """One GPU at one moment; None where the driver doesn't say, as of the utilization of a MIG device."""

    percent: int | None = None
    mib: int | None = None


class GpuUseReader:
    """Asks the driver; to be used in one thread.

    Args:
        load: Returns the library.

    Raises nothing: what can't be read is None.
    """

    def __init__(self, load: Callable[[], Any] = lambda: ctypes.CDLL(_LIBRARY)) -> None:
        self._load = load
        self._nvml: Any = None
        self._is_loaded = False
        self._handles: dict[str, ctypes.c_void_p | None] = {}

    def read(self, gpu_id: str) -> GpuUse:
        """Return the use of a GPU, named by an index or a UUID as in `CUDA_VISIBLE_DEVICES`."""
        if not self._is_loaded:
            self._is_loaded = True
            with contextlib.suppress(OSError, AttributeError):
                nvml = self._load()
                self._nvml = nvml if nvml.nvmlInit_v2() == 0 else None
        if self._nvml is None:
            return GpuUse()
        if gpu_id not in self._handles:
            self._handles[gpu_id] = self._find(gpu_id)
        handle = self._handles[gpu_id]
        if handle is None:
            return GpuUse()
        use, memory = _Utilization(), _Memory()
        knows_use = self._call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(use))
        knows_memory = self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return GpuUse(
            percent=int(use.gpu) if knows_use else None,
            mib=int(memory.used) // _MIB if knows_memory else None,
        )

    def _find(self, gpu_id: str) -> ctypes.c_void_p | None:
        handle = ctypes.c_void_p()
        if gpu_id.isdecimal():
            found = self._call(
                "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(gpu_id)), ctypes.byref(handle)
            )
        else:
            found = self._call("nvmlDeviceGetHandleByUUID", gpu_id.encode(), ctypes.byref(handle))
        return handle if found else None

    def _call(self, name: str, *arguments: Any) -> bool:
        try:
            return bool(getattr(self._nvml, name)(*arguments) == 0)
        except AttributeError:  # a library that lacks it
            return False
