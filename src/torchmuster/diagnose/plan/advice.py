"""Which change of a training job would help most, with numbers; and known networks by name.

Pure; standard library only.
"""

import re
from dataclasses import dataclass, replace

from torchmuster.diagnose.plan.scaling import (
    Arrival,
    Cluster,
    NetworkLink,
    Prediction,
    Work,
    predict,
)

# Networks by name, with their expected latency and bandwidth. The bandwidths are those that large
# transfers reach, not the nominal ones: 88 % of the line for RDMA and for TCP up to 25 Gbit/s; NCCL
# over TCP sockets reaches about half of 100 Gbit/s. Latencies are NCCL's for a hop between nodes
# (NVIDIA/nccl, src/graph/tuning.cc: 14 us for RDMA, simple protocol; 1.9 to 3.4 us for NVLink) and
# those of TCP in a data centre. They are for a first answer: `muster plan --on NAME` measures.


US = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLink:
    """A link with a name.

    Attributes:
        about: Its description.
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
    """Return the link of `25Gbit/s,50us` or `3GB/s,20us`; None when the text is invalid.

    The rate counts as the one that transfers reach.
    """
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
    """Return names and link of the slowest network that is at least twice as fast, or None."""
    faster = [
        known.link for known in BETWEEN.values() if known.link.bytes_per_s >= 2 * link.bytes_per_s
    ]
    if not faster:
        return None
    chosen = min(faster, key=lambda one: (one.bytes_per_s, one.latency_s))
    names = [name for name, known in BETWEEN.items() if known.link == chosen]
    return " or ".join(names), chosen


MORE_MICRO_STEPS = 4
MIN_GAIN = 1.02  # a smaller gain is within the error of any model
_BF16_HOOK = "register_comm_hook(None, default_hooks.bf16_compress_hook); sums are rounded to bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChange:
    """A change and its effect.

    Attributes:
        what: The change in words.
        gain: The factor of work per time, e.g. 1.5; gains that a single worker would have too
            (fewer updates) do not count.
        step_s: The step time after the change.
        note: How to do it or what it costs; may be empty.
    """

    what: str
    gain: float
    step_s: float
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The same workers on another number of nodes."""

    num_nodes: int
    per_node: int
    prediction: Prediction


def layouts(work: Work, cluster: Cluster, num_workers: int) -> list[Layout]:
    """Return the layouts of so many workers, up to `per_node` on a node, the fewest nodes first."""
    fitting = [n for n in range(cluster.per_node, 0, -1) if num_workers % n == 0]
    return [
        Layout(
            num_nodes=num_workers // each,
            per_node=each,
            prediction=predict(work, _placed(cluster, each), num_workers // each),
        )
        for each in fitting
    ]


def _placed(cluster: Cluster, per_node: int) -> Cluster:
    """Return the same nodes with another number of workers on each."""
    return replace(cluster, per_node=per_node)


def suggest(work: Work, cluster: Cluster, num_nodes: int, gradient_size: int) -> list[JobChange]:
    """Return the changes that are worth it, the best first.

    Args:
        work: One worker's step.
        cluster: The nodes.
        num_nodes: How many of them.
        gradient_size: Bytes of one gradient.
    """
    before = predict(work, cluster, num_nodes)
    found = []
    for option in _options(work, cluster, num_nodes, gradient_size):
        after = predict(option.work, option.cluster, option.num_nodes)
        gain = after.efficiency / before.efficiency
        if gain >= MIN_GAIN:
            change = JobChange(what=option.what, gain=gain, step_s=after.step_s, note=option.note)
            found.append(change)
    return sorted(found, key=lambda change: -change.gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """A possible change, before its gain is known."""

    what: str
    work: Work
    cluster: Cluster
    num_nodes: int
    note: str = ""


def _options(work: Work, cluster: Cluster, num_nodes: int, gradient_size: int) -> list[_Option]:
    here = _Option(what="", work=work, cluster=cluster, num_nodes=num_nodes)
    found = [_sharded_or_more_micro_steps(here)]
    if gradient_size == 4:
        half = with_gradients_of(work, 0.5)
        found.append(replace(here, what="gradients in bf16", work=half, note=_BF16_HOOK))
    if cluster.inside is not None and num_nodes % 2 == 0:
        denser = _placed(cluster, cluster.per_node * 2)
        what = f"the same workers on half the nodes, {denser.per_node} on each"
        found.append(replace(here, what=what, cluster=denser, num_nodes=num_nodes // 2))
    if (faster := next_faster(cluster.between)) is not None:
        name, link = faster
        there = replace(cluster, between=link)
        found.append(replace(here, what=f"a faster network: {name}", cluster=there))
    return found


def _sharded_or_more_micro_steps(here: _Option) -> _Option:
    """Return DDP for FSDP, whose transfers accumulation does not save; else more micro-steps."""
    if here.work.is_sharded:
        plain = replace(here.work, is_sharded=False)
        note = "when the model fits on one GPU"
        return replace(here, what="DDP instead of FSDP", work=plain, note=note)
    times = here.work.accumulation * MORE_MICRO_STEPS
    note = f"with no_sync(); the global batch grows {MORE_MICRO_STEPS} times"
    more = replace(here.work, accumulation=times)
    return replace(here, what=f"{times} micro-steps to an update", work=more, note=note)


def with_gradients_of(work: Work, part: float) -> Work:
    """Return the work with gradients of another size, e.g. half of it: 0.5."""
    smaller = tuple(
        Arrival(size_bytes=one.size_bytes * part, ready_s=one.ready_s) for one in work.arrivals
    )
    return replace(work, gradient_bytes=work.gradient_bytes * part, arrivals=smaller)
