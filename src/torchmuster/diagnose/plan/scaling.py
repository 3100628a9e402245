"""Predicts the time of a training step on more nodes, by the known models of collectives; and which change would help most.

Pure; standard library only.

Sizes are bytes, times seconds, bandwidths bytes/s of one direction. Models and their sources:

- Ring: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH"
  (2005), and nccl-tests, doc/PERFORMANCE.md for the factors of the bus bandwidth.
- Two levels: reduce-scatter inside the node, all-reduce between the nodes, all-gather inside, as
  NCCL's rings do in effect (NVIDIA/nccl, src/graph/tuning.cc).
- Overlap: PyTorch's DistributedDataParallel sums buckets in the order in which they fill during the
  backward pass, one after the other (Li et al., "PyTorch Distributed", VLDB 2020, section 4.2).
- Sharding: Rajbhandari et al., "ZeRO" (2020), section 7: 3/2 of the volume of an all-reduce.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

FIRST_BUCKET_BYTES = 1 << 20  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
BUCKET_BYTES = 25 << 20  # bucket_cap_mb of DistributedDataParallel
NUM_BLOCKS = 32  # of a sharded model: the layers of a transformer of 7 billion parameters
SizeTime = Callable[[float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLink:
    """A connection between two ranks.

    Attributes:
        latency_s: Of one hop: alpha.
        bytes_per_s: Of one direction: 1/beta.
    """

    latency_s: float
    bytes_per_s: float

    def half_ring_s(self, size_bytes: float, num_ranks: int) -> float:
        """Return the time of a reduce-scatter or an all-gather: (n-1) alpha + (n-1)/n S/B."""
        n = num_ranks
        return (n - 1) * self.latency_s + (n - 1) / n * size_bytes / self.bytes_per_s

    def ring_s(self, size_bytes: float, num_ranks: int) -> float:
        """Return the time of an all-reduce: 2(n-1) alpha + 2(n-1)/n S/B."""
        return 2 * self.half_ring_s(size_bytes, num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes, and the links between their workers.

    Attributes:
        per_node: Workers on each node.
        between: One network adapter of a node.
        adapters: How many a node has; a worker uses the nearest.
        inside: Between two workers of a node; None with one worker on each.
        is_flat: One ring over all workers, as Gloo makes it; else two levels.
        cpu_s_per_byte: The cost of a sum for a processor that also computes; 0 with GPUs.
    """

    per_node: int
    between: NetworkLink
    inside: NetworkLink | None = None
    is_flat: bool = False
    cpu_s_per_byte: float = 0.0
    adapters: int = 1

    def all_reduce_s(self, size_bytes: float, num_nodes: int) -> float:
        """Return the time of an all-reduce over all workers of `num_nodes` nodes.

        Two levels: T_RS(g, S) + T_AR(N, S) + T_AG(g, S). All workers of a node together carry S
        through its network, so the bandwidth's term between nodes is 2(N-1)/N S/B with any number
        of them.
        """
        if num_nodes == 1 or not self.is_flat:
            used = min(self.adapters, self.per_node)
            node = replace(self.between, bytes_per_s=self.between.bytes_per_s * used)
            return 2 * self._inside_s(size_bytes) + node.ring_s(size_bytes, num_nodes)
        return self.between.ring_s(size_bytes, num_nodes * self.per_node)

    def half_s(self, size_bytes: float, num_nodes: int) -> float:
        """Return the time of a reduce-scatter or an all-gather over all workers."""
        return self.all_reduce_s(size_bytes, num_nodes) / 2

    def _inside_s(self, size_bytes: float) -> float:
        if self.per_node == 1:
            return 0.0
        return (self.inside or self.between).half_ring_s(size_bytes, self.per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A parameter's gradient, or a bucket of them.

    Attributes:
        size_bytes: Of the gradients.
        ready_s: When they are there, from the start of the backward pass.
    """

    size_bytes: float
    ready_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one worker in one step, without communication.

    Attributes:
        gradient_bytes: What is summed: parameters times the size of a gradient.
        forward_s, backward_s, optimizer_s: Of one micro-step and of the update.
        arrivals: Gradients in their order, if that was measured; else they come evenly.
        accumulation: Micro-steps before the sum and the update.
        is_sharded: FSDP with full sharding, instead of DDP.
        bucket_bytes: DDP's `bucket_cap_mb`.
        spread: How much the steps of one worker differ: standard deviation / median.
    """

    gradient_bytes: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    arrivals: tuple[Arrival, ...] = ()
    accumulation: int = 1
    is_sharded: bool = False
    bucket_bytes: float = BUCKET_BYTES
    spread: float = 0.0

    @property
    def alone_s(self) -> float:
        """The time of a step without any communication."""
        return self.accumulation * (self.forward_s + self.backward_s) + self.optimizer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A step on a number of nodes.

    Attributes:
        step_s: From one update to the next.
        communication_s: Time of all sums, hidden or not.
        exposed_s: The part of it that the step waits for.
        cost_s: How much the sums slow down the backward pass, by using a processor.
        skew_s: The time that all wait for the slowest worker.
        efficiency: Of weak scaling: the step of one worker / this step.
    """

    num_nodes: int
    num_workers: int
    step_s: float
    communication_s: float
    exposed_s: float
    cost_s: float
    skew_s: float
    efficiency: float

    @property
    def speed_up(self) -> float:
        """The number of single workers that do the same work in the same time."""
        return self.num_workers * self.efficiency


def predict(work: Work, cluster: Cluster, num_nodes: int) -> Prediction:
    """Predict a step; DDP sums only after the last micro-step (`no_sync`), FSDP in each."""
    num_workers = num_nodes * cluster.per_node
    all_s = exposed_s = cost_s = 0.0
    if num_workers > 1 and work.is_sharded:
        exposed_s = work.accumulation * sharded_exposed_s(
            work, lambda size: cluster.half_s(size, num_nodes)
        )
        all_s = work.accumulation * 3 * cluster.half_s(work.gradient_bytes, num_nodes)
    elif num_workers > 1:
        buckets = make_buckets(work)
        sums = [cluster.all_reduce_s(bucket.size_bytes, num_nodes) for bucket in buckets]
        all_s = sum(sums)
        exposed_s, cost_s = ddp_waits(buckets, sums, work.backward_s, cluster.cpu_s_per_byte)
    skew_s = work.alone_s * work.spread * slowest_of(num_workers)
    step_s = work.alone_s + skew_s + exposed_s + cost_s
    return Prediction(
        num_nodes=num_nodes,
        num_workers=num_workers,
        step_s=step_s,
        communication_s=all_s,
        exposed_s=exposed_s,
        cost_s=cost_s,
        skew_s=skew_s,
        efficiency=work.alone_s / step_s,
    )


def slowest_of(num_workers: int) -> float:
    """Return how many deviations the slowest of n workers is above the mean; near sqrt(2 ln n).

    Source: Blom, "Statistical Estimates and Transformed Beta-Variables" (1958), for normal
    deviates.
    """
    if num_workers < 2:
        return 0.0
    return NormalDist().inv_cdf((num_workers - 0.375) / (num_workers + 0.25))


def make_buckets(work: Work) -> list[Arrival]:
    """Return DDP's buckets: filled by arrival, closed at their size or more, the first at 1 MiB.

    Gradients that were not measured come evenly over the backward pass, and split anywhere.

    Source: torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size.
    """
    if not work.arrivals:
        return _even_buckets(work)
    buckets: list[Arrival] = []
    filled = 0.0
    limit = min(FIRST_BUCKET_BYTES, work.bucket_bytes)
    for last, arrival in enumerate(work.arrivals, 1):
        filled += arrival.size_bytes
        if filled >= limit or last == len(work.arrivals):
            buckets.append(Arrival(size_bytes=filled, ready_s=arrival.ready_s))
            filled, limit = 0.0, work.bucket_bytes
    return buckets


def _even_buckets(work: Work) -> list[Arrival]:
    buckets: list[Arrival] = []
    passed, limit = 0.0, min(FIRST_BUCKET_BYTES, work.bucket_bytes)
    while passed < work.gradient_bytes:
        size = min(limit, work.gradient_bytes - passed)
        passed += size
        ready_s = work.backward_s * passed / work.gradient_bytes
        buckets.append(Arrival(size_bytes=size, ready_s=ready_s))
        limit = work.bucket_bytes
    return buckets


def ddp_waits(
    buckets: Sequence[Arrival], sums_s: Sequence[float], backward_s: float, cpu_s_per_byte: float
) -> tuple[float, float]:
    """Return how long a backward pass waits for its sums, and how much they slow it down.

    end_i = max(ready_i, end_(i-1)) + T(b_i); exposed = max(0, end_k - T_b). On a processor, each
    sum also slows the computation that runs at the same time, in proportion to their overlap: later
    gradients come later.
    """
    end_s = late_s = 0.0
    for bucket, sum_s in zip(buckets, sums_s, strict=True):
        begin_s = max(bucket.ready_s + late_s, end_s)
        end_s = begin_s + sum_s
        overlap_s = min(end_s, backward_s + late_s) - begin_s
        if overlap_s > 0 and sum_s > 0:
            late_s += cpu_s_per_byte * bucket.size_bytes * min(1.0, overlap_s / sum_s)
    return max(0.0, end_s - backward_s - late_s), late_s


def sharded_exposed_s(work: Work, half_s: SizeTime, num_blocks: int = NUM_BLOCKS) -> float:
    """Return how long one micro-step of FSDP waits for its transfers.

    A block's parameters are gathered while the one before it computes, forward and again backward,
    and its gradients are scattered while the next ones compute. Transfers share the network, one
    after the other.

    Source: Zhao et al., "PyTorch FSDP" (VLDB 2023), section 3.3; the volume is that of ZeRO,
    section 7.2.
    """
    transfer_s = half_s(work.gradient_bytes / num_blocks)
    network_s = computed_s = 0.0
    for _ in range(num_blocks):
        network_s += transfer_s
        computed_s = max(computed_s, network_s) + work.forward_s / num_blocks
    for block in range(num_blocks):
        # The gather of this block was requested before the scatter of the last one.
        network_s = network_s + transfer_s
        ready_s = max(computed_s, network_s)
        if block:
            network_s = max(network_s, computed_s) + transfer_s
        computed_s = ready_s + work.backward_s / num_blocks
    end_s = max(network_s, computed_s) + transfer_s
    return end_s - work.forward_s - work.backward_s


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


def format_seconds(seconds: float) -> str:
    """Return a time for people: `470 ms`, `4.78 s`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    return ""


def say_bytes(size_bytes: float) -> str:
    """Return a size in decimal units, as networks count: `2.6 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"


def say_link(link: NetworkLink) -> str:
    """Return a link for people: `2.75 GB/s, 50 us a hop`."""
    return f"{say_bytes(link.bytes_per_s)}/s, {format_seconds(link.latency_s)} a hop"


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
