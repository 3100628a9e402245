"""What the owner of a sweep needs of its slots, whatever fills them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.failure import WorkerEnd
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEnd:
    """How a member has ended.

    Attributes:
        state: By its own end, whoever asked for it.
        worker: How its only process ended, whose record is still to be written; None: it has a head that wrote it.
        is_lost: It ended by no fault of its own: what it ran in has died.
        has_lost_slot: Nothing can run in its slot any more.
        has_begun: False: it was refused by what is no fault of its own, and waits as before.
    """

    state: RunState
    worker: WorkerEnd | None = None
    is_lost: bool = False
    has_lost_slot: bool = False
    has_begun: bool = True


TakeEnd = Callable[[int, MemberEnd], None]


def gpus_of_slots(
    gpus: Sequence[str], num_slots: int, num_workers: int
) -> tuple[tuple[str, ...], ...]:
    """Return the GPUs that each slot's members see: one for each worker, in turn, so that all GPUs get the same number.

    Args:
        gpus: Of the machine; none where it has none.
        num_slots: How many there are.
        num_workers: Of each member. Where that is more than there are GPUs, a member sees all of them.
    """
    if not gpus:
        return ((),) * num_slots
    count = min(num_workers, len(gpus))
    firsts = (slot * num_workers for slot in range(num_slots))
    return tuple(tuple(gpus[(f + w) % len(gpus)] for w in range(count)) for f in firsts)


class Slots(Protocol):
    """Where members run."""

    @property
    def refusal(self) -> Report | None:
        """Return why no member can ever be started; None while that is not so."""

    @property
    def is_busy(self) -> bool:
        """Say whether members have to wait for what somebody else does there."""

    def home_of(self, run_dir: RunDir) -> frozenset[int] | None:
        """Return the slots that see what a member has saved; None: all do, or it has saved nothing."""

    def host(self, slot_number: int) -> str:
        """Return the name of the machine, or of the pod, that a slot is on."""

    async def open(self) -> None:
        """Get ready for members."""

    async def close(self) -> None:
        """End everything that is left."""

    def start(self, number: int, run_dir: RunDir, attempt: int, slot_number: int) -> None:
        """Start a member in a slot."""

    def signal(self, number: int, signum: int) -> None:
        """Send a signal to a member, if it runs."""
