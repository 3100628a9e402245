"""The options with which the head of a training run starts."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torchmuster.core.files.claims import Claims
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.plan import RunPlan

if TYPE_CHECKING:
    from torchmuster.core.model.events import RecordEvent


class Spread(Protocol):
    """Starts agents on other hosts for the head of `muster torchrun`: `launcher/jobs/spread.py`."""

    def begin(self, event: "Callable[[RecordEvent], object]") -> None:
        """Start; call `event` to record what is done."""

    def need(self, places: Sequence[int]) -> None:
        """Start agents at places that lack one."""

    def hear(self, event: "RecordEvent") -> None:
        """Handle an event; called for every event of the run."""

    def is_ours(self, host: str) -> bool:
        """Return whether it has started an agent for this host, which needs no second one."""

    async def close(self) -> None:
        """End everything it has started that is still left."""


@dataclass(slots=True, kw_only=True)
class HeadCredentials:
    """A head's claim to the run, renewed for each attempt, where another node may take its place.

    Attributes:
        term: Its newest term.
        place: The place of its agent.
        node: Its machine, as the engine calls it.
    """

    claims: Claims
    term: int
    holder: str
    place: int
    node: str


# How long a head that is done waits for its owner: on a busy machine, a session's workers may
# finish before the owner has called.
OWNER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingHeadOptions:
    """The options with which the head of a training run starts.

    Attributes:
        first_attempt: Not 0 if the head was lost and the engine started the run again.
        why: What its first attempt follows.
        hint: What to add to a message while nodes are missing.
        jobs: The head's scheduler jobs, if agents of other jobs must be refused.
        relay_port: The head's own port, which forwards connections to torch's store; 0: it doesn't.
        samples_bytes: The current size of the record of samples.
        spread: Starts the agents on other hosts, where no engine does.
        credentials: Set if another node may take the head's place.
        left_out: Machines that computed wrongly under an earlier head.
        expected: The places of an earlier head's agents, for which this head waits.
        began_at: When the run began, by the wall clock; 0: with this head, which is its first.
        has_owner: A process has started this head and will call it, maybe after the run has ended.
    """

    plan: RunPlan
    run_dir: RunDir
    own_address: str = "127.0.0.1"
    first_attempt: int = 0
    restarts_spent: int = 0
    why: str = "start"
    hint: str = ""
    jobs: tuple[str, ...] = ()
    relay_port: int = 0
    samples_bytes: int = 0
    spread: Spread | None = None
    has_owner: bool = False
    credentials: HeadCredentials | None = None
    left_out: frozenset[str] = frozenset()
    expected: frozenset[int] = frozenset()
    began_at: float = 0.0
    pid: int = field(default_factory=os.getpid)
