"""Which agent may replace a lost head, and when: the rules of `docs/succession.md`, without I/O.

A term is the right to start one attempt, or to be the head at all. Terms are claimed in sequence in
a folder that all nodes of the run see, each by one process only. A head that finds its next term
claimed is no longer the head.
"""

from dataclasses import dataclass
from enum import Enum

from torchmuster.core.files.claims import Term
from torchmuster.core.model.lease import LEASE_S

TURN_S = 0.5  # between claims of agents that see the same votes
ASK_EVERY_S = 5.0
FIRST_ASK_S = 1.5  # let the others vote first


@dataclass(frozen=True, slots=True, kw_only=True)
class SucceedOrder:
    """The command line of `succeed`: the run, and the current head's place, process and port."""

    run_dir: str
    place: int
    head_pid: int
    head_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLostOrder:
    """The command line of `node-lost`: the run, and the node in question."""

    run_dir: str
    node: str


class Move(Enum):
    """What an agent does now."""

    NOTHING = "nothing"
    VOTE = "vote"  # vote that the newest term's head is lost
    WITHDRAW = "withdraw"  # withdraw its vote: the head is there
    ASK = "ask"  # ask the engine whether the head's machine is lost
    CLAIM = "claim"  # claim the next term


@dataclass(frozen=True, slots=True, kw_only=True)
class HeirView:
    """What an agent observes.

    Attributes:
        newest: The newest claim; None before the first.
        votes: Places that voted that its head is lost.
        is_silent: The agent's lease has ended.
        is_idle: None of its workers is alive.
        is_proved: The engine has confirmed that the machine of this head is lost.
    """

    newest: Term | None
    votes: frozenset[int] = frozenset()
    is_silent: bool = False
    is_idle: bool = True
    is_proved: bool = False


def is_voted_out(claim: Term, votes: frozenset[int]) -> bool:
    """Say whether more than half of a head's agents, its own included, have lost it."""
    members = set(claim.members)
    return 2 * len(votes & members) > len(members)


class Heir:
    """An agent that may become the head.

    Attributes:
        place: Its place.
        has_voted: It has voted that the newest term's head is lost.
    """

    def __init__(self, place: int) -> None:
        self.place = place
        self._newest: Term | None = None
        self._seen_at = 0.0
        self.has_voted = False
        self._ask_at = 0.0
        self._free_since: float | None = None

    def look(self, now: float, sight: HeirView) -> Move:
        """Return the next move; call it about twice a second.

        Args:
            now: Time by a clock that counts only while this process runs.
            sight: What it observes.
        """
        newest = sight.newest
        if newest is None:
            return Move.NOTHING
        if self._newest is None or newest.number > self._newest.number:
            # Its claimant gets the time of one lease to be found.
            self._newest, self._seen_at = newest, now
            self.has_voted, self._free_since = False, None
        elif newest.number < self._newest.number:
            return Move.NOTHING  # a stale view of the disk
        if not sight.is_silent:
            self._free_since = None
            if self.has_voted:
                self.has_voted = False
                return Move.WITHDRAW
            return Move.NOTHING
        if now - self._seen_at <= LEASE_S or not sight.is_idle:
            return Move.NOTHING
        if not self.has_voted:
            self.has_voted, self._ask_at = True, now + FIRST_ASK_S
            return Move.VOTE
        if self.place not in sight.votes:
            return Move.VOTE  # the disk has lost the vote
        if sight.is_proved or is_voted_out(newest, sight.votes):
            return self._take_turn(now, sight.votes)
        self._free_since = None
        if now >= self._ask_at:
            self._ask_at = now + ASK_EVERY_S
            return Move.ASK
        return Move.NOTHING

    def _take_turn(self, now: float, votes: frozenset[int]) -> Move:
        """Claim after giving each voter at a lower place one turn (`TURN_S`) to claim first."""
        if self._free_since is None:
            self._free_since = now
        before = sum(place < self.place for place in votes)
        return Move.CLAIM if now - self._free_since >= before * TURN_S else Move.NOTHING

    def next_claim(self, votes: frozenset[int], holder: str, node: str) -> Term:
        """Return the claim after the newest one, with the head on this node."""
        newest = self._newest
        if newest is None:
            raise ValueError("nothing was claimed before")
        return Term(
            number=newest.number + 1,
            holder=holder,
            place=self.place,
            node=node,
            members=tuple(sorted(votes | {self.place})),
            next_attempt=newest.next_attempt,
            restarts_spent=newest.restarts_spent + 1,
        )
