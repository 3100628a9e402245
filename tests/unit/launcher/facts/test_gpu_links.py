"""What nvidia-smi and PCI say of how GPUs are joined. The texts are as the tool prints them; no GPU is needed."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.model import codec
from torchmuster.launcher.facts.gpu import (
    GpuLinks,
    count_redirecting,
    read_nvlinks,
    read_p2p,
    read_topology,
    redirects,
)

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


def test_a_switch_of_nvlink_joins_all_gpus_whatever_the_network_cards_do():
    kinds = read_topology(SWITCH)
    assert kinds == ("NV18",)
    assert GpuLinks(kinds=kinds).is_all_nvlink


def test_ways_over_pcie_are_told_apart():
    kinds = read_topology(PCIE)
    assert kinds == ("NV4", "PXB", "SYS")
    assert not GpuLinks(kinds=kinds).is_all_nvlink


def test_one_gpu_has_no_ways():
    assert read_topology(ONE) == ()
    assert not GpuLinks().is_all_nvlink


def test_pairs_that_cannot_copy_are_named_once():
    assert read_p2p(P2P) == ("0-2 CNS", "1-2 TNS")


def test_links_that_are_down_are_counted():
    assert read_nvlinks(NVLINK) == ((2, 2), (1, 2))


@pytest.mark.parametrize("text", ["", "Failed to initialize NVML\n", "GPU0\n", "GPU 0:\n Link\n"])
def test_other_texts_say_nothing(text):
    assert (read_topology(text), read_p2p(text)) == ((), ())
    assert sum(number for pair in read_nvlinks(text) for number in pair) == 0


@given(st.text(alphabet="GPU01 \t\nXNVSYOK:<>", max_size=300))
def test_no_text_is_too_strange(text):
    read_topology(text), read_p2p(text), read_nvlinks(text)


def test_links_survive_the_wire():
    links = GpuLinks(kinds=("NV18",), nvlinks=((18, 18),), no_p2p=("0-1 CNS",), num_redirecting=0)
    assert codec.from_plain(GpuLinks, codec.to_plain(links)) == links


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
    assert redirects(config) is said


def test_only_bridges_are_counted(tmp_path):
    devices = {"00:01.0": "0x060400", "00:02.0": "0x030200", "00:03.0": "0x060400"}
    for name, kind in devices.items():
        folder = tmp_path / "sys/bus/pci/devices" / name
        folder.mkdir(parents=True)
        (folder / "class").write_text(f"{kind}\n")
        redirecting = name != "00:03.0"
        (folder / "config").write_bytes(space((0x0D, 0x1D if redirecting else 0)))
    assert count_redirecting(str(tmp_path)) == 1


def test_a_machine_without_pci_says_nothing(tmp_path):
    assert count_redirecting(str(tmp_path)) is None
