"""Checks in the first steps of every attempt that all ranks call the same collectives.

If a rank calls one collective more or less than the others, collectives of different kinds are
paired: the sums are wrong without a message, or Gloo aborts, or everything hangs until the
time-out. torch counts the collectives of a process group; in the first steps each rank writes its
count into the store at the end of the step and waits for the others'. A rank that is stuck in a
collective which the others don't call never arrives: then a separate thread reports its count.
"""

import json
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from torchmuster.core.model.ranks import name_ranks
from torchmuster.train.group import WorldError

NUM_CHECKED_STEPS = 3
_STUCK_AFTER_S = 3.0
_POLL_S = 0.02


def count_collectives() -> int | None:
    """Return the number of collectives this rank has begun; None if torch doesn't count them."""
    try:
        group: Any = dist.group.WORLD
        return int(group._get_backend(torch.device("cpu"))._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):
        return None


class Lockstep:
    """Compares the ranks' counts at the end of a step.

    Attributes:
        is_over: Whether all steps to be checked have passed.
    """

    def __init__(self, world: Any) -> None:
        self.is_over = world.world_size == 1 or count_collectives() is None
        self._store = world.connect()
        self._rank, self._world_size = world.rank, world.world_size
        self._timeout_s = world.timeout_s
        self._checked = 0
        self._arrived = threading.Event()
        if not self.is_over:
            self._watch(1)

    def check(self) -> None:
        """Compare the counts; called at the end of a step, not at other boundaries.

        Raises:
            WorldError: Ranks have called different numbers of collectives.
        """
        if self.is_over or (count := count_collectives()) is None:
            return
        self._arrived.set()
        self._checked += 1
        step = self._checked
        self._store.set(_key(step, self._rank), json.dumps([count, False]))
        self._wait_for_all(step, count)
        if step >= NUM_CHECKED_STEPS:
            self.is_over = True
        else:
            self._watch(step + 1)

    def close(self) -> None:
        """End the check, e.g. because the run ends in fewer steps."""
        self.is_over = True
        self._arrived.set()

    def _wait_for_all(self, step: int, mine: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        missing = set(range(self._world_size)) - {self._rank}
        while missing:
            for rank in sorted(missing):
                if not self._store.check([_key(step, rank)]):
                    continue
                count, is_stuck = json.loads(self._store.get(_key(step, rank)))
                if count != mine:
                    raise _differ({self._rank: mine, rank: count}, step, is_stuck=is_stuck)
                if not is_stuck:
                    missing.discard(rank)
            if missing and time.monotonic() > deadline:
                raise WorldError(
                    f"{name_ranks(missing)} did not end step {step} of this attempt within"
                    f" {self._timeout_s:g} s",
                    where=f"rank {self._rank} waits for {name_ranks(missing)}",
                )
            threading.Event().wait(_POLL_S)

    def _watch(self, step: int) -> None:
        """Start the thread that reports our count if the step does not end."""
        self._arrived = threading.Event()
        threading.Thread(
            target=self._tell_when_stuck,
            args=(step, self._arrived),
            name="muster-lockstep",
            daemon=True,
        ).start()

    def _tell_when_stuck(self, step: int, arrived: threading.Event) -> None:
        """Report the count once it stops changing: a long step's still goes up."""
        before = count_collectives()
        while not arrived.wait(_STUCK_AFTER_S):
            count = count_collectives()
            if count == before and count is not None and self._somebody_waits(step):
                self._store.set(_key(step, self._rank), json.dumps([count, True]))
                return
            before = count

    def _somebody_waits(self, step: int) -> bool:
        try:
            others = [rank for rank in range(self._world_size) if rank != self._rank]
            return any(self._store.check([_key(step, rank)]) for rank in others)
        except RuntimeError:  # the store is gone with its job
            return False


def _key(step: int, rank: int) -> str:
    return f"muster/lockstep/{step}/{rank}"


def _differ(counts: dict[int, int], step: int, *, is_stuck: bool) -> WorldError:
    words = ", ".join(f"rank {rank}: {count}" for rank, count in sorted(counts.items()))
    state = "; the other rank is stuck in the additional one" if is_stuck else ""
    return WorldError(
        f"the ranks call different numbers of collectives in step {step} of this attempt",
        where=words,
        why=f"torch's count of them differs{state}",
        fix="look for all_reduce, barrier or a model's forward that only some ranks reach"
        " (`if rank == 0:`, an early `continue`)",
    )
