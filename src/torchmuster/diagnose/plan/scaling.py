"""Predicts the time of a training step on more nodes, by the known models of collectives.

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
