"""Networks by name, with their expected latency and bandwidth. Standard library only.

The bandwidths are what large transfers reach, not what is printed on the box: 88 % of the line for RDMA and for TCP
up to 25 Gbit/s; NCCL over TCP sockets reaches about half of 100 Gbit/s. Latencies are NCCL's for a hop between nodes
(NVIDIA/nccl, src/graph/tuning.cc: 14 us for RDMA, simple protocol; 1.9 to 3.4 us for NVLink) and those of TCP in
a data centre. They are for a first answer: `muster plan --on NAME` measures.
"""

import re
from dataclasses import dataclass

from torchmuster.diagnose.plan.scaling import NetworkLink

US = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLink:
    """A link that has a name.

    Attributes:
        about: What it is, in words.
    """

    link: NetworkLink
    about: str


def _known(bytes_per_s: float, latency_us: float, about: str) -> KnownLink:
    link = NetworkLink(latency_s=latency_us * US, bytes_per_s=bytes_per_s)
    return KnownLink(link=link, about=about)


BETWEEN = {
    "1GbE": _known(0.117e9, 80, "Ethernet, 1 Gbit/s, TCP"),
    "10GbE": _known(1.1e9, 60, "Ethernet, 10 Gbit/s, TCP"),
    "25GbE": _known(2.75e9, 50, "Ethernet, 25 Gbit/s, TCP"),
    "100GbE": _known(6e9, 40, "Ethernet, 100 Gbit/s, TCP sockets"),
    "100GbE-RoCE": _known(11e9, 14, "Ethernet, 100 Gbit/s, RDMA"),
    "EDR100": _known(11e9, 14, "InfiniBand, 100 Gbit/s"),
    "slingshot200-tcp": _known(6e9, 40, "Slingshot, 200 Gbit/s, sockets: without NCCL's plugin"),
    "slingshot200": _known(22e9, 14, "Slingshot, 200 Gbit/s, libfabric's cxi"),
    "HDR200": _known(22e9, 14, "InfiniBand, 200 Gbit/s"),
    "NDR400": _known(44e9, 14, "InfiniBand, 400 Gbit/s"),
}
INSIDE = {
    "pcie3": _known(10e9, 5.7, "PCIe 3.0 x16"),
    "pcie4": _known(20e9, 5.7, "PCIe 4.0 x16"),
    "pcie5": _known(40e9, 5.7, "PCIe 5.0 x16"),
    "nvlink3": _known(230e9, 3.4, "NVLink of A100, 300 GB/s"),
    "nvlink4": _known(360e9, 3.4, "NVLink of H100 or GH200, 450 GB/s"),
    "nvlink5": _known(720e9, 3.4, "NVLink of B200, 900 GB/s"),
}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(bit/s|bps|B/s)", re.IGNORECASE)
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|ms|s)")
_PREFIX = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_link(text: str) -> NetworkLink | None:
    """Return the link of `25Gbit/s,50us` or `3GB/s,20us`; None when the text is invalid. The rate is taken as the one that is reached."""
    rate_text, _, latency_text = text.partition(",")
    rate = _RATE.fullmatch(rate_text.strip())
    latency = _LATENCY.fullmatch(latency_text.strip())
    if rate is None or latency is None:
        return None
    is_bytes = rate.group(3).upper() == "B/S" and rate.group(3)[0] == "B"
    bytes_per_s = float(rate.group(1)) * _PREFIX[rate.group(2).upper()] / (1 if is_bytes else 8)
    latency_s = float(latency.group(1)) * _SECONDS[latency.group(2)]
    return NetworkLink(latency_s=latency_s, bytes_per_s=bytes_per_s) if bytes_per_s > 0 else None


def next_faster(link: NetworkLink) -> tuple[str, NetworkLink] | None:
    """Return the slowest known network with at least twice the bandwidth, by all of its names; None beyond all."""
    faster = [
        known.link for known in BETWEEN.values() if known.link.bytes_per_s >= 2 * link.bytes_per_s
    ]
    if not faster:
        return None
    chosen = min(faster, key=lambda one: (one.bytes_per_s, one.latency_s))
    names = [name for name, known in BETWEEN.items() if known.link == chosen]
    return " or ".join(names), chosen
