"""Nodes that lose each other: a simulation of heads and agents that follow `launcher/model/succession.py`, in steps of half a second.

Every node has a clock that stands still while the node is paused. The folder of claims gives claims out one after the
other, but what a node reads there may be old. Orders are on their way for some steps. What is checked after each step:

- no attempt is started by two heads, and no agent goes back to an earlier attempt;
- never two attempts have the workers of all their nodes at once: only these train.
"""

from dataclasses import dataclass, field

from torchmuster.core.files.claims import Term
from torchmuster.core.model.lease import LEASE_S, SILENT_S
from torchmuster.launcher.model.succession import Heir, HeirView, Move

STEP_S = 0.5
_LOOK_EVERY = 4
_GATHER_STEPS = 3


@dataclass
class Head:
    """A head as far as it matters here."""

    place: int
    term: int
    attempt: int
    spent: int = 0
    members: dict[int, float] = field(default_factory=dict)  # when each was heard, by its clock
    world: tuple[int, ...] | None = None  # of the attempt that runs or ends
    is_ending: bool = False
    dangerous: dict[int, float] = field(default_factory=dict)  # heard last, while workers may live
    gathers: int = 0


@dataclass
class Node:
    """One node, its agent, and the head that it may have."""

    place: int
    heir: Heir
    is_alive: bool = True
    paused: int = 0
    clock_s: float = 0.0
    follows: tuple[int, int] = (0, -1)  # the place and the term of the head that is called
    is_connected: bool = False
    lease_from: float = 0.0
    workers: int | None = None
    killed_in: int = 0
    last_attempt: int = -1
    head: Head | None = None
    proved: int = -1  # the term whose head's machine the engine has called lost
    vote: int = -1


class World:
    """A run of `num` nodes.

    Args:
        num: How many; node 0 has the first head.
        least: How many an attempt needs.
        chance: Returns a whole number from 0 to its argument: what the disk shows, how long orders take.
    """

    def __init__(self, num, least, chance):
        self.least, self._chance = least, chance
        self.nodes = [Node(place, Heir(place)) for place in range(num)]
        self.claims: list[Term] = []
        self.claims_at: list[int] = []  # the step of each
        self.moved: list[tuple[int, int, int]] = []  # step, place and first term of each new head
        self.votes: list[tuple[int, int, int, bool]] = []  # step, term, place, voted or withdrawn
        self.cut: set[tuple[int, int]] = set()
        self.orders: list[tuple[int, int, int, tuple[int, int], int]] = []
        self.started: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.step_number = 0
        self.takeovers = 0
        self.died_at: dict[int, int] = {}
        self.nodes[0].head = Head(0, -1, 0)

    # What may happen to them.

    def kill(self, place):
        node = self.nodes[place]
        node.is_alive, node.is_connected, node.workers, node.head = False, False, None, None
        self.died_at[place] = self.step_number

    def revive(self, place):
        """Start the machine again, with a new agent; what it had voted stays in the folder."""
        old = self.nodes[place]
        if not old.is_alive:
            node = Node(place, Heir(place), vote=old.vote)
            self.nodes[place] = node

    def pause(self, place, steps):
        self.nodes[place].paused = max(self.nodes[place].paused, steps)

    def fail_worker(self, place):
        for node in self.nodes:
            head = node.head
            if head is not None and head.world is not None and place in head.world:
                head.is_ending = True

    def heal(self):
        self.cut.clear()
        for node in self.nodes:
            node.paused = 0

    # Time.

    def step(self):
        self.step_number += 1
        for node in self.nodes:
            if node.is_alive and node.paused:
                node.paused -= 1
            elif node.is_alive:
                node.clock_s += STEP_S
        self._ping()
        self._deliver()
        for node in self.nodes:
            if node.is_alive and not node.paused:
                self._agent(node)
                if node.head is not None:
                    self._head(node, node.head)
        self._check()

    def _runs(self, node):
        return node.is_alive and not node.paused

    def _passes(self, one, other):
        return one == other or (one, other) not in self.cut

    def _head_of(self, node):
        place, term = node.follows
        head = self.nodes[place].head
        return head if head is not None and head.term >= term else None

    def _ping(self):
        for node in self.nodes:
            head = self._head_of(node)
            if not node.is_connected or head is None or not self._runs(node):
                continue
            there = self.nodes[head.place]
            if self._runs(there) and self._passes(node.place, head.place):
                if node.place not in head.members:  # it was given up: its connection is closed
                    node.is_connected = not self._passes(head.place, node.place)
                    continue
                head.members[node.place] = there.clock_s
                if self._passes(head.place, node.place):
                    node.lease_from = node.clock_s

    def _deliver(self):
        left = []
        for due, place, attempt, follows, term in self.orders:
            node = self.nodes[place]
            stands = node.is_alive and node.is_connected and node.follows == follows
            if not stands:
                continue  # it ended with its connection
            passes = self._passes(follows[0], place)
            if due > self.step_number or node.paused or not passes:
                left.append((due, place, attempt, follows, term))
                continue
            assert attempt > node.last_attempt, f"{place} goes back to attempt {attempt}"
            node.workers, node.killed_in, node.last_attempt = attempt, 0, attempt
        self.orders = left

    def is_machine_lost(self, claim):
        """Say what the engine says: a machine that came back has lost its processes all the same."""
        claimed_at = self.claims_at[claim.number - self.claims[0].number]
        return self.died_at.get(claim.place, -1) >= claimed_at

    # The agent.

    def _agent(self, node):
        if node.killed_in:
            node.killed_in -= 1
            if not node.killed_in:
                node.workers = None
        if node.clock_s - node.lease_from > LEASE_S:
            self._kill_workers(node)
            node.is_connected = False
        if self.step_number % _LOOK_EVERY == 0 or not node.is_connected:
            moved = self._read_moved()
            if moved is not None and moved[1] > node.follows[1]:
                node.follows, node.is_connected = moved, False
        if not node.is_connected:
            self._call(node)
        if node.head is None:
            self._look(node)

    def _kill_workers(self, node):
        if node.workers is not None and not node.killed_in:
            node.killed_in = 1 + self._chance(3)

    def _call(self, node):
        head = self._head_of(node)
        if head is None or not self._runs(self.nodes[head.place]):
            return
        if self._passes(node.place, head.place) and self._passes(head.place, node.place):
            self._kill_workers(node)
            self._lose(head, node.place)
            node.is_connected, node.lease_from = True, node.clock_s
            head.members[node.place] = self.nodes[head.place].clock_s

    def _read(self):
        """Return how many claims a node sees: maybe not the newest."""
        old = self._chance(4)
        seen = self.step_number - old
        return [claim for claim, at in zip(self.claims, self.claims_at, strict=True) if at <= seen]

    def _read_newest(self):
        seen = self._read()
        return seen[-1].number if seen else -1

    def _read_moved(self):
        seen = self.step_number - self._chance(4)
        found = [(place, term) for at, place, term in self.moved if at <= seen]
        return found[-1] if found else None

    def _read_votes(self, term, own):
        seen = self.step_number - self._chance(4)
        found = set()
        for at, number, place, is_vote in self.votes:
            if number == term and at <= (self.step_number if place == own else seen):
                (found.add if is_vote else found.discard)(place)
        return frozenset(found)

    def _look(self, node):
        claims = self._read()
        newest = claims[-1] if claims else None
        number = newest.number if newest is not None else -1
        votes = self._read_votes(number, node.place)
        silent = node.clock_s - node.lease_from > LEASE_S
        sight = HeirView(
            newest=newest,
            votes=votes,
            is_silent=silent and not node.is_connected,
            is_idle=node.workers is None,
            is_proved=node.proved == number,
        )
        match node.heir.look(node.clock_s, sight):
            case Move.VOTE:
                self.votes.append((self.step_number, number, node.place, True))
            case Move.WITHDRAW:
                self.votes.append((self.step_number, number, node.place, False))
            case Move.ASK:
                if self.is_machine_lost(newest):
                    node.proved = number
            case Move.CLAIM:
                claim = node.heir.next_claim(votes, "x", f"n{node.place}")
                if self._claim(claim):
                    self.takeovers += 1
                    head = Head(node.place, claim.number, claim.next_attempt, claim.restarts_spent)
                    node.head, node.follows = head, (node.place, claim.number)
                    self.moved.append((self.step_number, node.place, claim.number))
                    node.is_connected = False

    def _claim(self, claim):
        if any(one.number == claim.number for one in self.claims):
            return False
        assert not self.claims or claim.number == self.claims[-1].number + 1
        self.claims.append(claim)
        self.claims_at.append(self.step_number)
        return True

    # The head.

    def _lose(self, head, place):
        heard = head.members.pop(place, None)
        if heard is not None and head.world is not None and place in head.world:
            head.dangerous[place] = heard
            head.is_ending = True

    def _depose(self, node):
        node.head = None
        self._kill_workers(node)
        node.is_connected = False

    def _head(self, node, head):
        now = node.clock_s
        looks = self.step_number % 2 == 0 and head.term >= 0
        if looks and self._read_newest() > head.term:
            self._depose(node)
            return
        for place, heard in list(head.members.items()):
            other = self.nodes[place]
            hears = other.is_alive and other.is_connected and self._head_of(other) is head
            if (
                now - heard > SILENT_S
                or (not hears and self._runs(other))
                or (not other.is_alive and self._chance(1))
            ):
                self._lose(head, place)
        for place, heard in list(head.dangerous.items()):
            if now - heard > SILENT_S:
                del head.dangerous[place]
        if head.world is None:
            self._gather(node, head)
        elif head.is_ending:
            here = [self.nodes[p] for p in head.world if p in head.members]
            for other in here:
                if self._passes(head.place, other.place):
                    self._kill_workers(other)
            coming = {place for _, place, *_ in self.orders}  # the kill comes behind the start
            is_idle = all(o.workers is None and o.place not in coming for o in here)
            if is_idle and not head.dangerous:
                head.world, head.is_ending, head.gathers = None, False, 0

    def _gather(self, node, head):
        head.gathers += 1
        here = tuple(sorted(head.members))
        if len(here) < self.least or node.place not in here or head.gathers < _GATHER_STEPS:
            return
        if any(self.nodes[place].workers is not None for place in here):
            return
        claim = Term(
            number=head.term + 1,
            holder="x",
            place=head.place,
            node=f"n{head.place}",
            members=here,
            next_attempt=head.attempt + 1,
            restarts_spent=head.spent,
        )
        if not self._claim(claim):
            self._depose(node)
            return
        assert head.attempt not in self.started, f"attempt {head.attempt} is started twice"
        self.started[head.attempt] = (self.step_number, here)
        head.term = claim.number
        head.world = here
        for place in here:
            follows = self.nodes[place].follows
            due = self.step_number + 1 + self._chance(3)
            self.orders.append((due, place, head.attempt, follows, head.term))
        head.attempt += 1

    # What must hold.

    def _check(self):
        training = self.training()
        assert len(training) < 2, f"two attempts train: {training}"

    def training(self):
        """Return the attempts all of whose nodes have their workers."""
        whole = []
        for attempt, (_, world) in self.started.items():
            if all(self.nodes[place].workers == attempt for place in world):
                whole.append(attempt)
        return whole
