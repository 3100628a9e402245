"""What the head of a training run is told when it is started."""

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
    """Who starts agents on other hosts for the head of `muster torchrun`: `launcher/jobs/spread.py`."""

    def begin(self, event: "Callable[[RecordEvent], object]") -> None:
        """Begin; `event` notes what is done."""

    def need(self, places: Sequence[int]) -> None:
        """Take places that lack an agent."""

    def hear(self, event: "RecordEvent") -> None:
        """Take every event of the run."""

    def is_ours(self, host: str) -> bool:
        """Say whether an agent for this host was started here: a second one is not needed."""

    async def close(self) -> None:
        """End what is left of what was started."""


@dataclass(slots=True, kw_only=True)
class Office:
    """What a head has to show for each attempt, where another node may take its place.

    Attributes:
        term: Its newest.
        place: That of its agent.
        node: Its machine, as the engine calls it.
    """

    claims: Claims
    term: int
    holder: str
    place: int
    node: str


# How long a head stays for its owner: workers of a session may be done before that, on a busy machine, has called.
OWNER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingHeadOptions:
    """What the head of a training run is told when it is started.

    Attributes:
        first_attempt: Not 0 when the head was lost and the engine started the run again.
        why: What its first attempt follows.
        hint: What to add while nodes are missing.
        jobs: The schedulers' jobs of the head, where agents of other jobs have to be refused.
        relay_port: The head's own port, where callers of torch's store are passed on; 0: nowhere.
        samples_bytes: How large the record of samples is already.
        spread: Starts the agents of other hosts, where no engine does.
        office: Where another node may take the head's place.
        left_out: Machines that have computed wrongly under a head before this one.
        expected: The places of agents that a head before this one had, and that are waited for.
        began_at: Of the run, by the wall clock, where this head is not its first; 0: with this head.
        has_owner: A process has started it that will call, maybe later than the run ends.
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
    office: Office | None = None
    left_out: frozenset[str] = frozenset()
    expected: frozenset[int] = frozenset()
    began_at: float = 0.0
    pid: int = field(default_factory=os.getpid)
