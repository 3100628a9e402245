"""What a run took, and what of that counts: node hours, hours lost to failures and restarts, goodput.

A node second is a second in which one node was held. Between the start of the run and its end every second is of one kind:

    starting      before the first training step: nodes, imports, loading
    kept          training of steps that count
    lost          training of steps that were done again, or never saved when the run ended badly
    restarting    between the end of an attempt and the first training step of the next

Goodput is `kept / all`. Where a script saves by itself, nobody knows what a failed attempt has left: then there are two
numbers, one as if nothing was left and one as if everything was.
"""

from collections.abc import Sequence

from torchmuster.report.story import AttemptTold, Cost


def cost_of(
    attempts: Sequence[AttemptTold],
    *,
    blocked_s: float | None,
    began: float | None,
    ended: float | None,
    went_well: bool,
) -> Cost:
    """Return what a run took.

    Args:
        attempts: All of them.
        blocked_s: How long the loop waited for snapshots; None where the library was not used.
        began: When the run began.
        ended: When it ended, or the last sign of life.
        went_well: Whether the work of the last attempt counts to its end.
    """
    if not attempts or began is None or ended is None:
        return Cost()
    starting = kept = unsure = lost = restarting = workers = 0.0
    before = began
    for place, attempt in enumerate(attempts):
        is_last = place + 1 == len(attempts)
        over = max(attempt.began, attempt.ended if attempt.ended is not None else ended)
        over = min(over, attempts[place + 1].began) if not is_last else over
        trains = min(attempt.training_at or attempt.workers_at or over, over)
        nodes = max(attempt.num_nodes, 1)
        idle = nodes * max(0.0, trains - before)
        if place:
            restarting += idle
        else:
            starting += idle
        trained = nodes * (over - trains)
        counts = went_well if is_last else not attempt.has_failed and attempt.training_at is None
        if counts:
            kept += trained
        elif blocked_s is not None and attempt.training_at is not None:
            part = nodes * _kept_s(attempt, trains, over)
            kept += part
            lost += trained - part
        else:
            unsure += trained
        workers += max(attempt.world_size, 1) * (over - before)
        before = over
    nodes = max(attempts[-1].num_nodes, 1)
    restarting += nodes * max(0.0, ended - before)
    held = starting + kept + unsure + lost + restarting
    return Cost(
        held_s=held,
        worker_s=workers + max(attempts[-1].world_size, 1) * max(0.0, ended - before),
        starting_s=starting,
        kept_s=kept,
        lost_s=lost + unsure,
        restarting_s=restarting,
        saving_s=nodes * (blocked_s or 0.0),
        most_kept_s=kept + unsure,
        goodput=kept / held if held > 0 else None,
        most_goodput=(kept + unsure) / held if held > 0 else None,
    )


def _kept_s(attempt: AttemptTold, trains: float, over: float) -> float:
    """Return how much of an attempt's training counts: up to the step from which the next one went on."""
    if attempt.kept_at is None:
        return 0.0
    return min(max(0.0, attempt.kept_at - trains), over - trains)
