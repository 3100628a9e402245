"""What the owner of a sweep needs of its slots, whatever fills them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torchmuster.files.layout import RunDir
from torchmuster.model.failure import WorkerEnd
from torchmuster.model.states import RunState
from torchmuster.model.verdict import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberEnd:
    """How a member has ended.

    Attributes:
        state: By its own end, whoever asked for it.
        worker: How its only process ended, whose record is still to be written; None: it has a head that wrote it.
        is_lost: It ended by no fault of its own: what it ran in has died.
    """

    state: RunState
    worker: WorkerEnd | None = None
    is_lost: bool = False


TakeEnd = Callable[[int, MemberEnd], None]


class Slots(Protocol):
    """Where members run."""

    @property
    def refusal(self) -> Report | None:
        """Return why no member can ever be started; None while that is not so."""

    async def open(self) -> None:
        """Get ready for members."""

    async def close(self) -> None:
        """End everything that is left."""

    def start(self, number: int, run_dir: RunDir, attempt: int, slot_number: int) -> None:
        """Start a member in a slot."""

    def signal(self, number: int, signum: int) -> None:
        """Send a signal to a member, if it runs."""
