"""What nvidia-smi, PCI and the driver's library say of GPUs and of how they are joined: no GPU is needed.

The texts are as the tool prints them. The library is asked by its own calling convention; what it does not say is not known.
"""

import ctypes
import struct
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core import proc
from torchmuster.core.model import codec
from torchmuster.errors import MusterError
from torchmuster.launcher.facts import gpu

SWITCH = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tPIX\tSYS\t0-47,96-143\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNODE\tSYS\t0-47,96-143\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tSYS\tPIX\t48-95,144-191\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\t X \tSYS
NIC1\tSYS\tSYS\tPIX\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
PCIE = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tPXB\tSYS\tSYS\t0-15\t0
GPU1\tPXB\t X \tSYS\tSYS\t0-15\t0
GPU2\tSYS\tSYS\t X \tNV4\t16-31\t1
GPU3\tSYS\tSYS\tNV4\t X \t16-31\t1
"""
ONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-23\t0\n"
P2P = """\
 \tGPU0\tGPU1\tGPU2\t
 GPU0\tX\tOK\tCNS\t
 GPU1\tOK\tX\tTNS\t
 GPU2\tCNS\tTNS\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""
NVLINK = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-8f2a0000-0000-0000-0000-000000000000)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-8f2b0000-0000-0000-0000-000000000000)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""


@pytest.mark.parametrize(
    ("text", "kinds", "is_all_nvlink"),
    [
        pytest.param(SWITCH, ("NV18",), True, id="a switch joins all, whatever network cards do"),
        pytest.param(PCIE, ("NV4", "PXB", "SYS"), False, id="ways over PCIe are told apart"),
        pytest.param(ONE, (), False, id="one GPU has no ways"),
    ],
)
def test_kinds_of_ways_between_gpus_are_read(text, kinds, is_all_nvlink):
    assert gpu.read_topology(text) == kinds
    assert gpu.GpuLinks(kinds=kinds).is_all_nvlink is is_all_nvlink


def test_pairs_that_cannot_copy_are_named_once():
    assert gpu.read_p2p(P2P) == ("0-2 CNS", "1-2 TNS")


def test_links_that_are_down_are_counted():
    assert gpu.read_nvlinks(NVLINK) == ((2, 2), (1, 2))


@pytest.mark.parametrize("text", ["", "Failed to initialize NVML\n", "GPU0\n", "GPU 0:\n Link\n"])
def test_other_texts_say_nothing(text):
    assert (gpu.read_topology(text), gpu.read_p2p(text)) == ((), ())
    assert sum(number for pair in gpu.read_nvlinks(text) for number in pair) == 0


@given(st.text(alphabet="GPU01 \t\nXNVSYOK:<>", max_size=300))
def test_no_text_is_too_strange(text):
    gpu.read_topology(text), gpu.read_p2p(text), gpu.read_nvlinks(text)


def test_links_survive_the_wire():
    links = gpu.GpuLinks(
        kinds=("NV18",), nvlinks=((18, 18),), no_p2p=("0-1 CNS",), num_redirecting=0
    )
    assert codec.from_plain(gpu.GpuLinks, codec.to_plain(links)) == links


def space(*capabilities):
    """Return a configuration space with these extended capabilities: (id, control)."""
    made = bytearray(4096)
    at = 0x100
    for number, (capability, control) in enumerate(capabilities):
        following = at + 0x40 if number + 1 < len(capabilities) else 0
        struct.pack_into("<IHH", made, at, capability | 1 << 16 | following << 20, 0, control)
        at = following
    return bytes(made)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (space((0x01, 0), (0x0D, 0x1D)), True),
        (space((0x0D, 0x01)), False),  # it checks who sends, and redirects nothing
        (space((0x01, 0)), False),
        (bytes(64), None),  # what a user may read
        (struct.pack("<I", 0x01 | 0x100 << 20).rjust(0x104, b"\0") + bytes(64), False),  # a ring
    ],
)
def test_bridges_that_redirect_are_seen(config, said):
    assert gpu.redirects(config) is said


def test_only_bridges_are_counted(tmp_path):
    for name, kind, control in (
        ("00:01.0", "0x060400", 0x1D),
        ("00:02.0", "0x030200", 0x1D),
        ("00:03.0", "0x060400", 0),
    ):
        device = f"sys/bus/pci/devices/{name}"
        write(tmp_path, f"{device}/class", f"{kind}\n")
        (tmp_path / device / "config").write_bytes(space((0x0D, control)))
    assert gpu.count_redirecting(str(tmp_path)) == 1


def test_a_machine_without_pci_says_nothing(tmp_path):
    assert gpu.count_redirecting(str(tmp_path)) is None


OK, NOT_SUPPORTED, NOT_FOUND = 0, 3, 6


def library(**changed):
    """Return what answers like NVML on a machine with two GPUs; the second is called by its UUID, too."""

    def find(handle, number):
        if number not in (0, 1):
            return NOT_FOUND
        handle._obj.value = 100 + number
        return OK

    def utilization(handle, use):
        use._obj.gpu, use._obj.memory = handle.value - 20, 1
        return OK

    def memory(handle, use):
        use._obj.total, use._obj.free, use._obj.used = 80 << 30, 79 << 30, 1 << 30
        return OK

    every = {
        "nvmlInit_v2": lambda: OK,
        "nvmlDeviceGetHandleByIndex_v2": lambda index, handle: find(handle, index.value),
        "nvmlDeviceGetHandleByUUID": lambda uuid, handle: find(handle, {b"GPU-2b": 1}.get(uuid)),
        "nvmlDeviceGetUtilizationRates": utilization,
        "nvmlDeviceGetMemoryInfo": memory,
        **changed,
    }
    return SimpleNamespace(**{name: call for name, call in every.items() if call is not None})


def test_a_gpu_is_found_by_its_index_or_its_uuid():
    reader = gpu.GpuUseReader(library)
    assert reader.read("0") == gpu.GpuUse(percent=80, mib=1024)
    assert reader.read("GPU-2b") == gpu.GpuUse(percent=81, mib=1024)
    assert reader.read("7") == reader.read("GPU-none") == gpu.GpuUse()


def test_what_a_device_does_not_say_is_not_known():
    use = {"nvmlDeviceGetUtilizationRates": lambda handle, use: NOT_SUPPORTED}
    assert gpu.GpuUseReader(lambda: library(**use)).read("0") == gpu.GpuUse(percent=None, mib=1024)


def test_a_library_of_another_version_is_no_error():
    assert gpu.GpuUseReader(lambda: library(nvmlInit_v2=None)).read("0") == gpu.GpuUse()
    assert gpu.GpuUseReader(lambda: library(nvmlInit_v2=lambda: 9)).read("0") == gpu.GpuUse()
    assert gpu.GpuUseReader(lambda: library(nvmlDeviceGetMemoryInfo=None)).read("0").mib is None


def test_a_machine_without_the_library_is_asked_once():
    asked = []

    def load():
        asked.append(1)
        return ctypes.CDLL("libtorchmuster-none.so.1")

    reader = gpu.GpuUseReader(load)
    assert [reader.read("0"), reader.read("1")] == [gpu.GpuUse(), gpu.GpuUse()]
    assert asked == [1]


ROW = "0, GPU-1, NVIDIA H200, 560.35.03, 143771, 1024, Default"


def answer(text, status=0):
    return proc.CommandOutput(status=status, stdout=text.encode(), stderr=b"")


def test_a_probe_that_hangs_or_breaks_costs_only_itself():
    held = threading.Event()

    def broken():
        raise ValueError("no such thing")

    parts = {"good": lambda: 1, "hangs": held.wait, "broken": broken}
    try:
        found, unknown = gpu.run_probes(parts, 0.2)
    finally:
        held.set()
    assert found == {"good": 1}
    assert unknown["hangs"] == "no answer within 0.2 s"
    assert unknown["broken"] == "ValueError: no such thing"


def test_without_a_gpu_nothing_is_asked(tmp_path):
    def ask(argv, limit_s):
        raise AssertionError(argv)

    assert gpu.collect_gpus({}, ask, 3.0, is_long=True, root=str(tmp_path)).num_devices == 0


def test_gpus_are_read_with_their_health(tmp_path):
    write(tmp_path, "proc/driver/nvidia/gpus/0000:01:00.0/information")
    answers = {
        "--query-gpu=index,uuid": answer(ROW),
        "--query-gpu=index,ecc": answer("0, 3, Active, Not Active, 8, 16"),
        "--query-remapped-rows": answer("GPU-1, Yes, No"),
        "nvidia-smi": answer("CUDA Version: 12.6 "),
    }

    def ask(argv, limit_s):
        words = (argv[-1], *argv[1:2])
        known = [answers[word] for at in words for word in answers if at.startswith(word)]
        return known[0] if known else answer("no such option", 2)

    found = gpu.collect_gpus({}, ask, 3.0, is_long=True, root=str(tmp_path))
    (one,) = found.gpus
    assert (one.name, one.used_bytes, one.num_ecc_errors) == ("NVIDIA H200", 1 << 30, 3)
    assert one.throttled == ("thermal slowdown",)
    assert one.must_be_reset
    assert (found.cuda, found.driver, found.visible) == ("12.6", "560.35.03", ("0",))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (proc.CommandOutput(status=None, stdout=b"", stderr=b""), "did not answer within 3 s"),
        (answer("Failed to initialize NVML: Driver/library version mismatch", 18), "mismatch"),
        (MusterError("x", why="No such file or directory"), "No such file"),
    ],
)
def test_an_nvidia_smi_that_fails_is_said(tmp_path, said, why):
    write(tmp_path, "dev/nvidia0")

    def ask(argv, limit_s):
        if isinstance(said, MusterError):
            raise said
        return said

    found = gpu.collect_gpus({}, ask, 3.0, root=str(tmp_path))
    assert (found.num_devices, found.gpus) == (1, ())
    assert why in found.why_not


def test_rows_that_make_no_sense_are_left_out():
    assert gpu.read_gpus("No devices were found\n,,,\n")[0] == ()
    gpus, _ = gpu.read_gpus(f"{ROW}\n1, GPU-2, X, 1, [N/A], [N/A], Default\n")
    assert [one.memory_bytes for one in gpus] == [143771 << 20, 0]
    assert gpu.add_health(gpus, "[Not Supported]")[0].num_ecc_errors is None


def test_xids_are_found_in_the_kernels_log():
    log = b"4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
    assert gpu.read_xids(log * 2) == ("0000:3b:00 79",)


def write(folder, path, text=""):
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
