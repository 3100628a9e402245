"""Which change of a training job would help most, with numbers. Pure; standard library only."""

from dataclasses import dataclass, replace

from torchmuster.diagnose.plan.networks import next_faster
from torchmuster.diagnose.plan.scaling import Arrival, Cluster, Prediction, Work, predict

MORE_MICRO_STEPS = 4
WORTH_TELLING = 1.02  # less gain than this is within what any model is wrong by
_BF16_HOOK = "register_comm_hook(None, default_hooks.bf16_compress_hook); sums are rounded to bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChange:
    """A change, and what it would bring.

    Attributes:
        what: The change in words.
        gain: The factor of work per time, e.g. 1.5; gains that a single worker would have too (fewer updates) do not
            count.
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
    """Return the placements of this number of workers on nodes with at most `per_node`, fewest nodes first."""
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
        if gain >= WORTH_TELLING:
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
