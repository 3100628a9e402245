"""The membership: which agents are connected, which place each holds, which are missing and why.

Values and rules only; the head communicates. A member that is gone remains in the membership until it
is certain that none of its workers lives: by proof, or because its lease has ended.

An engine starts an agent at a place, and there it starts its replacement, too. In a run with spare nodes a spare one takes the
place of a lost one, so what is started again is spare from then on: the place of its start and the place of its ranks differ.
"""

import errno
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchmuster.core import proc
from torchmuster.core.head.options import Office
from torchmuster.core.model import contract
from torchmuster.core.model.events import StoppingEvent
from torchmuster.core.model.failure import EndKind, WorkerEnd
from torchmuster.core.model.lease import SILENT_S, is_given_up
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.ranks import free_places, natural_key
from torchmuster.core.model.succession import Term
from torchmuster.core.model.text import name_on
from torchmuster.core.model.verdict import StopCause, better_cause
from torchmuster.core.net.channel import Channel
from torchmuster.core.net.messages import Hello, SpawnerReady
from torchmuster.errors import HeadLostError

# A head's right to start attempts, where another node may have taken its place: one term each (`docs/succession.md`).


_FULL = (errno.ENOSPC, errno.EDQUOT)


def claim_attempt(
    office: Office,
    attempt: int,
    members: tuple[int, ...],
    restarts_spent: int,
    say: Callable[[str], None],
) -> None:
    """Claim the term of an attempt that is about to start.

    Args:
        office: Whose newest term it becomes.
        attempt: Its number.
        members: The places of all agents that are connected.
        restarts_spent: Until now.
        say: Tells the user.

    Raises:
        HeadLostError: Another node is the head, or nobody can know whether it is.
    """
    claim = Term(
        number=office.term + 1,
        holder=office.holder,
        place=office.place,
        node=office.node,
        members=members,
        next_attempt=attempt + 1,
        restarts_spent=restarts_spent,
    )
    try:
        is_ours = office.claims.take(claim)
    except OSError as error:
        if error.errno not in _FULL or not _is_newest(office):
            raise HeadLostError(
                "this node can't know whether it is still the head of the run",
                where=office.claims.folder,
                why=str(error),
                fix="the folder of the run has to be there, and to be writable, on all its nodes",
            ) from error
        # On a full disk nobody else can claim it either.
        say("the disk is full: until there is space, no other node can take the head's place")
        return
    if not is_ours:
        raise deposed(office)
    office.term = claim.number


def is_deposed(office: Office) -> bool:
    """Say whether another node has become the head; where that can't be seen, it shows at the next attempt."""
    try:
        newest = office.claims.newest()
    except OSError:
        return False
    return newest is not None and newest.number > office.term and newest.holder != office.holder


def deposed(office: Office) -> HeadLostError:
    """Return the error of a head whose place another one has taken."""
    where = office.claims.head_node()
    return HeadLostError(f"{where} has become the head of this run, so this one ends")


def _is_newest(office: Office) -> bool:
    try:
        # Without the file that a look makes first, which has no space: what we see may be old, but never too new.
        newest = office.claims.newest(fresh=False)
    except OSError:
        return False
    return newest is not None and newest.number == office.term


MAX_LISTED = 256  # nodes in one event
_MOST_LOSSES = 2  # of a node that gets a place while another one is there


@dataclass(slots=True, eq=False)
class Member:
    """One agent that called."""

    hello: Hello
    channel: Channel | None
    heard_at: float
    place: int | None = None
    ready: SpawnerReady | None = None
    refused_why: str | None = None
    spawner_pid: int | None = None
    worker_pids: tuple[int, ...] = ()
    running_attempt: int | None = None
    lost_why: str | None = None
    num_interrupts: int = 0  # of its terminal; Ctrl-C reaches some twice
    interrupted_at: float = 0.0
    is_left_out: bool = False  # it has computed wrongly: it stays, without ranks

    @property
    def is_present(self) -> bool:
        """Say whether the agent is connected."""
        return self.channel is not None and self.lost_why is None

    @property
    def started_at(self) -> int | None:
        """Return the place at which its engine has started it, and starts it again."""
        return self.place if self.hello.place is None else self.hello.place

    @property
    def machine(self) -> str:
        """Return the machine that it is on, whichever place it holds there."""
        return self.hello.machine or self.hello.host


@dataclass(slots=True)
class Membership:
    """All members of a run."""

    plan: RunPlan
    clock: Callable[[], float] = time.monotonic
    own_boot_id: str = field(default_factory=proc.boot_id)
    own_network_id: str = field(default_factory=proc.network_id)
    jobs: tuple[str, ...] = ()  # of the head
    left_out_before: frozenset[str] = frozenset()  # machines
    is_running: Callable[[int], bool] = proc.is_running
    state_of: Callable[[int, tuple[str, str], tuple[str, str]], str | None] = proc.state_beside
    members: list[Member] = field(default_factory=list)
    _by_incarnation: dict[str, Member] = field(default_factory=dict)
    _holders: dict[int, Member] = field(default_factory=dict)
    _started: dict[int, Member] = field(default_factory=dict)  # by the place of their start
    _losses: dict[str, int] = field(default_factory=dict)  # by machine, where there are spare nodes
    _left_out: set[tuple[int | None, str]] = field(default_factory=set)
    _lost: dict[str, Member] = field(default_factory=dict)  # by incarnation

    def present(self) -> list[Member]:
        """Return the members that an attempt could be started with."""
        found = (m for m in self.members if m.is_present and m.refused_why is None)
        return [m for m in found if not m.is_left_out]

    def name(self, member: Member) -> str:
        """Return what a member's node is called, with the machine under it: `r-1 (n2)` is the pod r-1 on n2."""
        return name_on(self.name_alone(member), member.hello.machine)

    def name_alone(self, member: Member) -> str:
        """Return that without the machine, which may be another one the next time."""
        place = member.started_at
        if place is not None and place < len(self.plan.node_names):
            return self.plan.node_names[place]
        return member.hello.host

    def at_place(self, place: int) -> Member | None:
        """Return who holds a place now."""
        holder = self._holders.get(place)
        return holder if holder is not None and holder.lost_why is None else None

    def by_incarnation(self, incarnation: str) -> Member | None:
        """Return the member with this random name, gone or not."""
        return self._by_incarnation.get(incarnation)

    def why_not(self, hello: Hello, version: str) -> str | None:
        """Return the sentence that refuses an agent; None when it may join."""
        if hello.version != version:
            return f"it has torchmuster {hello.version}, the head has {version}"
        other = other_job(hello.jobs, self.jobs)
        if other is not None:
            its, ours = other
            return (
                f"it is of job {its}, and the run at this address is of job {ours}:"
                " give each job a port of its own (or both the same --rdzv-id, to train one model)"
            )
        if hello.place is not None:
            holder = self._holder_of_start(hello.place)
            if holder is not None and holder.hello.incarnation != hello.incarnation:
                name = self.plan.node_name(hello.place)
                return (
                    f"the place of {name} is held by another agent"
                    f" (pid {holder.hello.pid} on {holder.hello.host})"
                )
            if not 0 <= hello.place < self.plan.num_places:
                return f"place {hello.place} is outside this run of {self.plan.num_places} nodes"
        if len(self.members) < self.plan.num_places:
            return None
        if sum(m.lost_why is None for m in self.members) >= self.plan.num_places:
            return f"the run has all its {self.plan.num_places} nodes"
        return None

    def _holder_of_start(self, place: int) -> Member | None:
        """Return the agent that was started at a place, or holds it, and is not lost."""
        if not self.plan.spares:
            return self.at_place(place)
        started = self._started.get(place)
        return started if started is not None and started.lost_why is None else None

    def admit(self, hello: Hello, channel: Channel) -> Member:
        """Take an agent in."""
        member = Member(
            hello=hello,
            channel=channel,
            heard_at=self.clock(),
            place=0 if hello.wants_place_0 else self._place_of(hello),
            spawner_pid=hello.spawner_pid,
        )
        is_known = member.machine in self.left_out_before and not hello.wants_place_0
        member.is_left_out = is_known or (hello.place, member.machine) in self._left_out
        if member.is_left_out:
            member.place = None
        self.members.append(member)
        self._by_incarnation[hello.incarnation] = member
        if hello.place is not None:
            self._started[hello.place] = member
        if member.place is not None:
            self._holders[member.place] = member
        return member

    def _place_of(self, hello: Hello) -> int | None:
        """Return the place that an agent names, else the free one that has its host's name."""
        if hello.place is not None:
            is_spare = hello.place >= self.plan.max_nodes
            is_taken = self.plan.spares and self.at_place(hello.place) is not None
            return None if is_spare or is_taken else hello.place
        host = hello.host.partition(".")[0]
        for place, name in enumerate(self.plan.node_names):
            if place and name.partition(".")[0] == host and self.at_place(place) is None:
                return place
        return None

    def forget(self, member: Member) -> None:
        """Strike a member off at once: it has called anew."""
        self.members.remove(member)
        del self._by_incarnation[member.hello.incarnation]
        self._lost.pop(member.hello.incarnation, None)
        start = member.hello.place
        if start is not None and self._started.get(start) is member:
            del self._started[start]
        if member.place is not None and self._holders.get(member.place) is member:
            del self._holders[member.place]

    def prefer_holders(self) -> None:
        """Let spare nodes that hold snapshots of an earlier head's attempts have the places of nodes that hold none."""
        here = [m for m in self.present() if not m.hello.wants_place_0]
        holders = [m for m in here if m.place is None and m.hello.holds_memory]
        others = [m for m in here if m.place is not None and not m.hello.holds_memory]
        for _, other in zip(holders, others, strict=False):
            if other.place is not None:
                del self._holders[other.place]
            other.place = None

    def number_places(self) -> list[Member]:
        """Give the free places to members without one, and return these members.

        Head first, then in natural order of host names; of spare nodes those that hold snapshots and have torch loaded come
        first, those that were lost twice in this run last.
        """
        taken = [m.place for m in self.members if m.place is not None and m.lost_why is None]
        reserved = [] if any(m.place == 0 for m in self.members) else [0]
        free = free_places([*taken, *reserved], self.plan.max_nodes)
        homeless = [
            m for m in self.members if m.place is None and m.lost_why is None and not m.is_left_out
        ]
        homeless.sort(key=self._spare_key if self.plan.spares else _host_key)
        placed = list(zip(homeless, free, strict=False))
        for member, place in placed:
            member.place = place
            self._holders[place] = member
        return [member for member, _ in placed]

    def _spare_key(self, member: Member) -> tuple[bool, bool, bool, int]:
        holds_none = not member.hello.holds_memory
        return (self.is_worn(member), holds_none, member.ready is None, member.started_at or 0)

    def is_worn(self, member: Member) -> bool:
        """Say whether a node was lost so often in this run that another one is preferred."""
        return self._losses.get(member.machine, 0) >= _MOST_LOSSES

    @property
    def worn_machines(self) -> dict[str, int]:
        """Return the machines that were lost repeatedly, and how often."""
        return {name: count for name, count in self._losses.items() if count >= _MOST_LOSSES}

    def leave_out(self, member: Member) -> None:
        """Give a node no ranks again in this run, nor an agent that is started at its place on its machine."""
        key = (member.hello.place, member.machine)
        self._left_out.add(key)
        for one in self.members:  # its agent may have called anew since
            if (one.hello.place, one.machine) == key:
                one.is_left_out = True
                if one.place is not None and self._holders.get(one.place) is one:
                    del self._holders[one.place]
                one.place = None

    @property
    def may_leave_out(self) -> bool:
        """Say whether any node may be here without ranks: of thousands, each call would count all."""
        return bool(self._left_out or self.left_out_before)

    def left_out(self) -> list[Member]:
        """Return the nodes that are here and get no ranks."""
        if not self.may_leave_out:
            return []
        return [m for m in self.members if m.is_present and m.is_left_out]

    def spares(self) -> list[Member]:
        """Return the nodes that wait for another's loss."""
        return [m for m in self.present() if m.place is None] if self.plan.spares else []

    def missing_places(self) -> list[int]:
        """Return the places at which no agent is, for a run of fixed size."""
        starts = [
            m.started_at
            for m in self.members
            if m.is_present and (m.is_left_out or m.refused_why is None)
        ]
        self_numbered = [start for start in starts if start is None]
        taken = set(starts)
        free = [p for p in range(self.plan.num_places) if p not in taken]
        return free[len(self_numbered) :] if self_numbered else free

    def lose(self, member: Member, why: str, *, by_itself: bool = True) -> None:
        """Strike a member off; it stays listed while its workers may live.

        Args:
            member: Who is gone.
            why: How that is known.
            by_itself: Nobody asked it to leave.
        """
        if by_itself and self.plan.spares:
            self._losses[member.machine] = self._losses.get(member.machine, 0) + 1
        member.lost_why = why
        member.channel = None
        self._lost[member.hello.incarnation] = member

    def silent(self) -> list[Member]:
        """Return the members that have been silent for too long."""
        now = self.clock()
        late = [m for m in self.members if m.is_present and now - m.heard_at > SILENT_S]
        return [m for m in late if is_given_up(now - m.heard_at, SILENT_S, self._state_of(m))]

    def _state_of(self, member: Member) -> str | None:
        """Return the state of an agent of this machine, whose silence no network explains."""
        hello = member.hello
        own = (self.own_boot_id, self.own_network_id)
        return self.state_of(hello.pid, (hello.boot_id, hello.network_id), own)

    def dangerous(self) -> list[Member]:
        """Return lost members whose workers may still live; forget the others."""
        for member in list(self._lost.values()):
            if not self._may_have_workers(member):
                self.forget(member)
        return list(self._lost.values())

    def _may_have_workers(self, member: Member) -> bool:
        if member.running_attempt is None:
            return False
        if self.clock() - member.heard_at > SILENT_S:
            return False
        return not self._is_proved_dead(member)

    def _is_proved_dead(self, member: Member) -> bool:
        """Say whether, on this very machine, the agent's workers are seen to be gone."""
        if not self.own_boot_id or member.hello.boot_id != self.own_boot_id:
            return False
        pids = {member.hello.pid, *member.worker_pids}
        if member.spawner_pid is not None:
            pids.add(member.spawner_pid)
        return not any(self.is_running(pid) for pid in pids)


def _host_key(member: Member) -> tuple[tuple[int, int, str], ...]:
    return natural_key(member.hello.host)


def other_job(jobs: Sequence[str], others: Sequence[str]) -> tuple[str, str] | None:
    """Return the two ids if one scheduler gave two different ones, else None."""
    known = dict(text.partition("=")[::2] for text in jobs)
    for name, job in (text.partition("=")[::2] for text in others):
        if known.get(name, job) != job:
            return known[name], job
    return None


# What was asked to end: the run, or nodes of an elastic run, such as a spot machine that is called back. Rules only.
#
# A node's SIGTERM stops the run where the run needs that node; where a range leaves enough others, or another node will come in
# its place, only that node goes: its workers get the signal and their grace, then the attempt ends, no restart is spent, and the
# next one continues without it, or when its replacement is there.


_BETTER_WORD_S = 1.0  # from an agent's signal to the word of an owner who knows more


@dataclass(slots=True)
class StopRequest:
    """A stop of the whole run.

    Attributes:
        asked_at: When it was asked for.
        sent: The workers have been sent the signal.
        killed: Their grace is over.
    """

    signum: int
    cause: StopCause
    kill_at: float
    asked_at: float
    sent: bool = False
    killed: bool = False

    def is_settled(self, now: float) -> bool:
        """Say whether nobody will say better any more who asked: with a lost node an agent's signal comes before its owner's word."""
        is_unsure = self.cause is StopCause.NODE_LOST and now < self.kill_at
        return not is_unsure or now >= self.asked_at + _BETTER_WORD_S

    def told(self, grace_s: float, *, by_torchrun: bool) -> StoppingEvent:
        """Return the event that says who stops the run, and how; `muster torchrun` counts one Ctrl-C more."""
        name, who = contract.signal_name(self.signum), self.cause.value
        text = f"{who} asked to stop: {name} goes to every worker, SIGKILL after {grace_s:.0f} s"
        if self.signum == signal.SIGINT:
            text += f" or {'a third' if by_torchrun else 'a second'} Ctrl-C"
        return StoppingEvent(signal=name, who=who, text=text)

    def is_known_better(self, cause: StopCause) -> bool:
        """Take a second word on who asked for this stop; say whether it was news."""
        before, self.cause = self.cause, better_cause(self.cause, cause)
        return self.cause is not before


@dataclass(slots=True)
class Leavers:
    """Who leaves."""

    plan: RunPlan
    members: list[Member] = field(default_factory=list)
    _kill_at: float = float("inf")

    def may_leave(self, member: Member, signum: int, present: Sequence[Member]) -> bool:
        """Say whether the run can go on without this node and those that leave already."""
        if signum != signal.SIGTERM or member.hello.wants_place_0:
            return False
        if self.plan.nodes_return:
            return True
        if not self.plan.is_elastic:
            return False
        rest = [m for m in present if m is not member and m not in self.members]
        return len(rest) >= max(self.plan.min_nodes, 1)

    def add(self, member: Member, now: float) -> None:
        """Note that a node leaves."""
        self.members.append(member)
        self._kill_at = min(self._kill_at, now + self.plan.limits.grace_s)

    def is_time(self, now: float, ends: Sequence[WorkerEnd], names: Sequence[str]) -> bool:
        """Say whether the attempt ends now; workers that leave with code 75 take the others with them."""
        if not self.members:
            return False
        kinds = (EndKind.SUCCESS, EndKind.PREEMPTED)
        has_ended = any(end.node in names and end.kind not in kinds for end in ends)
        return has_ended or now >= self._kill_at

    def take_all(self) -> list[Member]:
        """Return who leaves, and forget them."""
        members, self.members, self._kill_at = self.members, [], float("inf")
        return members
