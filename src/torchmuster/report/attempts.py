"""Tell of the attempts of a training run: what its head has recorded, joined with what the training library has."""

from collections.abc import Sequence
from dataclasses import replace

from torchmuster.model.display.narration import narrate
from torchmuster.model.failure import WorkerEnd
from torchmuster.model.record.events import AttemptNode
from torchmuster.model.record.loose import lines, number, text, whole
from torchmuster.model.record.run import WHOLE_FIRST, WHOLE_LAST, AttemptRecord, RunRecord
from torchmuster.model.record.training import LibraryStart, TrainingState
from torchmuster.report.story import AttemptTold, NetworkTold, PairTold
from torchmuster.report.training import when_reached

_MAX_NODES = 64
_MAX_NETWORK, _MAX_PAIRS = 256, 4096


def told_attempts(
    record: RunRecord,
    attempts: Sequence[AttemptRecord],
    training: TrainingState | None,
    saved_step: int | None,
) -> tuple[AttemptTold, ...]:
    """Return all attempts, joined with what the library has recorded of each.

    Args:
        record: Of the head.
        attempts: Its attempts.
        training: Of the library, None without one.
        saved_step: What a restart would go on from, if the last attempt did not end well.
    """
    starts = training.starts if training is not None else []
    found: list[AttemptTold] = []
    place = 0
    for index, attempt in enumerate(attempts):
        is_last = index + 1 == len(attempts)
        ends = float("inf") if is_last else attempts[index + 1].began
        while place < len(starts) and starts[place].at < attempt.began:
            place += 1
        start = starts[place] if place < len(starts) and starts[place].at < ends else None
        following = next((s for s in starts[place + 1 :] if s.at >= ends), None) if start else None
        kept = following.step if following is not None else None
        if is_last:
            kept = saved_step
        state = record.result.state.value if is_last and record.result is not None else ""
        one = _told(attempt, start, state)
        if training is not None and start is not None and kept is not None:
            kept = min(kept, start.last_step)
            one = replace(one, kept_step=kept, kept_at=when_reached(training, start, kept))
        found.append(one)
    return tuple(found)


def _told(attempt: AttemptRecord, start: LibraryStart | None, state: str) -> AttemptTold:
    failure, cause, nodes = attempt.failure, attempt.cause, attempt.start.nodes
    ended_by = text(failure.what, 500) if failure is not None else text(attempt.stop, 300)
    if not ended_by and attempt.ended is not None:
        ended_by = "all workers ended well" if state == "succeeded" else state
    last_step = cause.step if cause is not None else None
    return AttemptTold(
        number=attempt.number,
        began=attempt.began,
        ended=attempt.ended,
        workers_at=attempt.workers_at,
        training_at=start.at if start is not None else None,
        why=text(attempt.start.why, 300),
        ended_by=ended_by,
        has_failed=failure is not None,
        cause_rank=whole(cause.rank) if cause is not None else None,
        cause_node=text(cause.node, 80) if cause is not None else "",
        world_size=attempt.num_workers or 0,
        nodes=tuple(
            AttemptNode(node=text(n.node, 80), host=text(n.host, 80), ranks=text(n.ranks, 80))
            for n in nodes[:_MAX_NODES]
        ),
        num_nodes=attempt.start.num_nodes or len(nodes),
        first_step=start.step if start is not None else None,
        last_step=start.last_step if start is not None else last_step,
        evidence=_evidence(cause) if cause is not None else (),
        ends=tuple(
            replace(one, node=text(one.node, 80), what=text(one.what, 300)) for one in attempt.ends
        ),
        num_ends=attempt.num_ends,
    )


def _evidence(cause: WorkerEnd) -> tuple[str, ...]:
    found = lines(cause.error.traceback if cause.error is not None else list(cause.tail), 30)
    more = (cause.detail, cause.memory_evidence)
    return (*found, *(text(one) for one in more if one is not None))


def told_network(record: RunRecord) -> NetworkTold | None:
    """Return the network of a run: what its workers used, or what a look at the nodes has measured."""
    network, looked = record.network, record.preflight
    if network is not None:
        nodes, pairs, sentence = network.nodes, network.pairs, text(narrate(network))
    elif looked is not None and looked.pairs:
        nodes = tuple(str(row.get("node", "")) for row in looked.nodes)
        pairs, sentence = looked.pairs, ""
    else:
        return None
    return NetworkTold(
        sentence=sentence,
        nodes=tuple(text(name, 80) for name in nodes[:_MAX_NETWORK]),
        pairs=tuple(
            PairTold(
                source=source,
                target=target,
                why=text(why, 200) or None,
                latency_us=number(latency_us),
                mb_per_s=number(mb_per_s),
            )
            for source, target, why, latency_us, mb_per_s in pairs[:_MAX_PAIRS]
            if min(source, target) >= 0
        ),
    )


def few_attempts(attempts: Sequence[AttemptTold]) -> tuple[AttemptTold, ...]:
    """Return the first and the last of very many."""
    if len(attempts) <= WHOLE_FIRST + WHOLE_LAST:
        return tuple(attempts)
    return (*attempts[:WHOLE_FIRST], *attempts[-WHOLE_LAST:])
