"""The driver's library is asked by its own calling convention; what it does not say is not known."""

import ctypes
from types import SimpleNamespace

from torchmuster.launcher.facts.gpu import GpuUse, GpuUseReader

OK, NOT_SUPPORTED, NOT_FOUND = 0, 3, 6


def library(**changed):
    """Return what answers like NVML on a machine with two GPUs; the second is called by its UUID, too."""

    def by_index(index, handle):
        if index.value > 1:
            return NOT_FOUND
        handle._obj.value = 100 + index.value
        return OK

    def by_uuid(uuid, handle):
        if uuid != b"GPU-2b":
            return NOT_FOUND
        handle._obj.value = 101
        return OK

    def utilization(handle, use):
        use._obj.gpu, use._obj.memory = handle.value - 20, 1
        return OK

    def memory(handle, use):
        use._obj.total, use._obj.free, use._obj.used = 80 << 30, 79 << 30, 1 << 30
        return OK

    every = {
        "nvmlInit_v2": lambda: OK,
        "nvmlDeviceGetHandleByIndex_v2": by_index,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetUtilizationRates": utilization,
        "nvmlDeviceGetMemoryInfo": memory,
        **changed,
    }
    return SimpleNamespace(**{name: call for name, call in every.items() if call is not None})


def test_a_gpu_is_found_by_its_index_or_its_uuid():
    reader = GpuUseReader(library)
    assert reader.read("0") == GpuUse(percent=80, mib=1024)
    assert reader.read("GPU-2b") == GpuUse(percent=81, mib=1024)
    assert reader.read("7") == reader.read("GPU-none") == GpuUse()


def test_what_a_device_does_not_say_is_not_known():
    mig = GpuUseReader(
        lambda: library(nvmlDeviceGetUtilizationRates=lambda handle, use: NOT_SUPPORTED)
    )
    assert mig.read("0") == GpuUse(percent=None, mib=1024)


def test_a_library_of_another_version_is_no_error():
    assert GpuUseReader(lambda: library(nvmlInit_v2=None)).read("0") == GpuUse()
    assert GpuUseReader(lambda: library(nvmlInit_v2=lambda: 9)).read("0") == GpuUse()
    assert GpuUseReader(lambda: library(nvmlDeviceGetMemoryInfo=None)).read("0").mib is None


def test_a_machine_without_the_library_is_asked_once():
    asked = []

    def load():
        asked.append(1)
        return ctypes.CDLL("libtorchmuster-none.so.1")

    reader = GpuUseReader(load)
    assert [reader.read("0"), reader.read("1")] == [GpuUse(), GpuUse()]
    assert asked == [1]
