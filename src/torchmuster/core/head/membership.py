"""The membership: which agents are connected, which place each holds, which are missing and why.

Values and rules only; the head communicates. A member that is gone stays listed until none of its
workers can be alive: that is proved, or the member's lease has ended.

An engine starts an agent at a place, and its replacement at the same place. In a run with spare
nodes, a spare takes the place of a lost node, and the node that is started again becomes a spare.
So the place of an agent's start and the place of its ranks may differ.
"""

import errno
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchmuster.core import proc
from torchmuster.core.files.claims import Term
from torchmuster.core.head.options import HeadCredentials
from torchmuster.core.model import contract
from torchmuster.core.model.events import StoppingEvent
from torchmuster.core.model.failure import EndKind, WorkerEnd
from torchmuster.core.model.lease import SILENT_S, is_given_up
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.ranks import free_places, natural_key
from torchmuster.core.model.text import name_on
from torchmuster.core.model.verdict import StopCause, better_cause
from torchmuster.core.net.channel import Channel
from torchmuster.core.net.messages import Hello, SpawnerReady
from torchmuster.errors import HeadLostError

# A head's right to start an attempt, where another node may have taken its place: each attempt
# claims a term (`docs/succession.md`).


_FULL = (errno.ENOSPC, errno.EDQUOT)


def claim_attempt(
    credentials: HeadCredentials,
    attempt: int,
    members: tuple[int, ...],
    restarts_spent: int,
    say: Callable[[str], None],
) -> None:
    """Claim a term for an attempt that is about to start.

    Args:
        credentials: Its newest term is updated.
        attempt: The number of the attempt.
        members: The places of all connected agents.
        restarts_spent: The restarts spent so far.
        say: Shows the user a sentence.

    Raises:
        HeadLostError: Another node is the head, or this node can't know whether it still is.
    """
    claim = Term(
        number=credentials.term + 1,
        holder=credentials.holder,
        place=credentials.place,
        node=credentials.node,
        members=members,
        next_attempt=attempt + 1,
        restarts_spent=restarts_spent,
    )
    try:
        is_ours = credentials.claims.take(claim)
    except OSError as error:
        if error.errno not in _FULL or not _is_newest(credentials):
            raise HeadLostError(
                "this node can't know whether it is still the head of the run",
                where=credentials.claims.folder,
                why=str(error),
                fix="the folder of the run has to be there, and to be writable, on all its nodes",
            ) from error
        # On a full disk nobody else can claim it either.
        say("the disk is full: until there is space, no other node can take the head's place")
        return
    if not is_ours:
        raise deposed(credentials)
    credentials.term = claim.number


def is_deposed(credentials: HeadCredentials) -> bool:
    """Return whether another node has become the head.

    If that can't be read now, the next attempt's claim shows it.
    """
    try:
        newest = credentials.claims.newest()
    except OSError:
        return False
    return (
        newest is not None
        and newest.number > credentials.term
        and newest.holder != credentials.holder
    )


def deposed(credentials: HeadCredentials) -> HeadLostError:
    """Return the error of a head that another one has replaced."""
    where = credentials.claims.head_node()
    return HeadLostError(f"{where} has become the head of this run, so this one ends")


def _is_newest(credentials: HeadCredentials) -> bool:
    try:
        # A fresh look first makes a file, for which there is no space. Without it, the answer may
        # be old, but never too new.
        newest = credentials.claims.newest(fresh=False)
    except OSError:
        return False
    return newest is not None and newest.number == credentials.term


MAX_LISTED = 256  # nodes in one event
_MOST_LOSSES = 2  # a machine with this many gets a place last


@dataclass(slots=True, eq=False)
class Member:
    """An agent that has joined."""

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
    num_interrupts: int = 0  # Ctrl-C on its terminal; some agents get it twice
    interrupted_at: float = 0.0
    is_left_out: bool = False  # it computed wrongly: it stays connected, without ranks

    @property
    def is_present(self) -> bool:
        """Return whether the agent is connected."""
        return self.channel is not None and self.lost_why is None

    @property
    def started_at(self) -> int | None:
        """Return the place at which its engine started it, and would start it again."""
        return self.place if self.hello.place is None else self.hello.place

    @property
    def machine(self) -> str:
        """Return the machine that it runs on, independent of its place."""
        return self.hello.machine or self.hello.host


@dataclass(slots=True)
class Membership:
    """The members of a run, connected or lost, and the places they hold."""

    plan: RunPlan
    clock: Callable[[], float] = time.monotonic
    own_boot_id: str = field(default_factory=proc.boot_id)
    own_network_id: str = field(default_factory=proc.network_id)
    jobs: tuple[str, ...] = ()  # the head's scheduler jobs
    left_out_before: frozenset[str] = frozenset()  # machines
    is_running: Callable[[int], bool] = proc.is_running
    state_of: Callable[[int, tuple[str, str], tuple[str, str]], str | None] = (
        proc.local_process_state
    )
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
        """Return the name of a member's node with its machine: `r-1 (n2)` is the pod r-1 on n2."""
        return name_on(self.name_alone(member), member.hello.machine)

    def name_alone(self, member: Member) -> str:
        """Return the name of a member's node without its machine, which may change."""
        place = member.started_at
        if place is not None and place < len(self.plan.node_names):
            return self.plan.node_names[place]
        return member.hello.host

    def at_place(self, place: int) -> Member | None:
        """Return the member that holds a place now."""
        holder = self._holders.get(place)
        return holder if holder is not None and holder.lost_why is None else None

    def by_incarnation(self, incarnation: str) -> Member | None:
        """Return the member with this incarnation id, lost or not."""
        return self._by_incarnation.get(incarnation)

    def why_not(self, hello: Hello, version: str) -> str | None:
        """Return why an agent is refused, as a sentence; None if it may join."""
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
        """Return the member that was started at a place and is not lost.

        Without spare nodes, that is the member that holds the place.
        """
        if not self.plan.spares:
            return self.at_place(place)
        started = self._started.get(place)
        return started if started is not None and started.lost_why is None else None

    def admit(self, hello: Hello, channel: Channel) -> Member:
        """Add an agent to the membership."""
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
        """Return the place that an agent names, else the free place that has its host's name."""
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
        """Remove a member at once."""
        self.members.remove(member)
        del self._by_incarnation[member.hello.incarnation]
        self._lost.pop(member.hello.incarnation, None)
        start = member.hello.place
        if start is not None and self._started.get(start) is member:
            del self._started[start]
        if member.place is not None and self._holders.get(member.place) is member:
            del self._holders[member.place]

    def prefer_holders(self) -> None:
        """Free places of nodes without snapshots for spare nodes that hold some.

        The snapshots come from attempts under an earlier head.
        """
        here = [m for m in self.present() if not m.hello.wants_place_0]
        holders = [m for m in here if m.place is None and m.hello.holds_memory]
        others = [m for m in here if m.place is not None and not m.hello.holds_memory]
        for _, other in zip(holders, others, strict=False):
            if other.place is not None:
                del self._holders[other.place]
            other.place = None

    def number_places(self) -> list[Member]:
        """Give the free places to members without one, and return these members.

        Place 0 is the head's. Without spare nodes, the order is that of host names. With them,
        nodes that hold snapshots come first, then those with torch loaded; those lost twice in this
        run come last.
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
        is_worn = member.machine in self.worn_machines
        return is_worn, holds_none, member.ready is None, member.started_at or 0

    @property
    def worn_machines(self) -> dict[str, int]:
        """Return how often each machine was lost, for those that were lost repeatedly."""
        return {name: count for name, count in self._losses.items() if count >= _MOST_LOSSES}

    def leave_out(self, member: Member) -> None:
        """Give no ranks to a node again in this run.

        The same holds for any agent that starts at its place on its machine.
        """
        key = (member.hello.place, member.machine)
        self._left_out.add(key)
        for one in self.members:  # its agent may have connected again since
            if (one.hello.place, one.machine) == key:
                one.is_left_out = True
                if one.place is not None and self._holders.get(one.place) is one:
                    del self._holders[one.place]
                one.place = None

    def left_out(self) -> list[Member]:
        """Return the connected nodes that get no ranks."""
        if not self._left_out and not self.left_out_before:
            return []  # counting thousands at each call is slow
        return [m for m in self.members if m.is_present and m.is_left_out]

    def spares(self) -> list[Member]:
        """Return the spare nodes, which wait for the loss of another node."""
        return [m for m in self.present() if m.place is None] if self.plan.spares else []

    def missing_places(self) -> list[int]:
        """Return the places that lack a usable agent."""
        starts = [
            m.started_at
            for m in self.members
            if m.is_present and (m.is_left_out or m.refused_why is None)
        ]
        taken = set(starts)
        free = [p for p in range(self.plan.num_places) if p not in taken]
        return free[starts.count(None) :]

    def lose(self, member: Member, why: str, *, by_itself: bool = True) -> None:
        """Mark a member as lost; it stays listed while its workers may be alive.

        Args:
            member: The member that is gone.
            why: How that is known.
            by_itself: It was not asked to leave.
        """
        if by_itself and self.plan.spares:
            self._losses[member.machine] = self._losses.get(member.machine, 0) + 1
        member.lost_why = why
        member.channel = None
        self._lost[member.hello.incarnation] = member

    def silent(self) -> list[Member]:
        """Return the connected members that have been silent for too long."""
        now = self.clock()
        late = [m for m in self.members if m.is_present and now - m.heard_at > SILENT_S]
        return [m for m in late if is_given_up(now - m.heard_at, SILENT_S, self._state_of(m))]

    def _state_of(self, member: Member) -> str | None:
        """Return the process state of an agent on this machine: no network explains its silence."""
        hello = member.hello
        own = (self.own_boot_id, self.own_network_id)
        return self.state_of(hello.pid, (hello.boot_id, hello.network_id), own)

    def dangerous(self) -> list[Member]:
        """Return the lost members whose workers may be alive; remove the others."""
        for member in list(self._lost.values()):
            if not self._may_have_workers(member):
                self.forget(member)
        return list(self._lost.values())

    def _may_have_workers(self, member: Member) -> bool:
        is_recent = self.clock() - member.heard_at <= SILENT_S
        return member.running_attempt is not None and is_recent and not self._is_proved_dead(member)

    def _is_proved_dead(self, member: Member) -> bool:
        """Return whether the agent is on this machine and its processes are seen to be gone."""
        if not self.own_boot_id or member.hello.boot_id != self.own_boot_id:
            return False
        pids = {member.hello.pid, *member.worker_pids}
        if member.spawner_pid is not None:
            pids.add(member.spawner_pid)
        return not any(self.is_running(pid) for pid in pids)


def _host_key(member: Member) -> tuple[tuple[int, int, str], ...]:
    return natural_key(member.hello.host)


def other_job(jobs: Sequence[str], others: Sequence[str]) -> tuple[str, str] | None:
    """Return the two job ids if one scheduler gave different ones, else None."""
    known = dict(text.partition("=")[::2] for text in jobs)
    for name, job in (text.partition("=")[::2] for text in others):
        if known.get(name, job) != job:
            return known[name], job
    return None


# Requests to end: the whole run, or single nodes of an elastic run, such as a spot machine that is
# reclaimed. Rules only.
#
# A node's SIGTERM stops the run if the run needs that node. If enough others are left, or another
# node will take its place, only that node leaves: its workers get the signal and their grace, then
# the attempt ends and spends no restart. The next one continues without the node, or waits for its
# replacement.


_BETTER_WORD_S = 1.0  # from an agent's signal to the message of an owner that knows more


@dataclass(slots=True)
class StopRequest:
    """A stop of the whole run.

    Attributes:
        asked_at: When it was requested.
        sent: The signal has been sent to the workers.
        killed: The workers' grace is over.
    """

    signum: int
    cause: StopCause
    kill_at: float
    asked_at: float
    sent: bool = False
    killed: bool = False

    def is_settled(self, now: float) -> bool:
        """Return whether the cause is final.

        If a node was lost, an agent's signal arrives before the owner's better message.
        """
        is_unsure = self.cause is StopCause.NODE_LOST and now < self.kill_at
        return not is_unsure or now >= self.asked_at + _BETTER_WORD_S

    def as_event(self, grace_s: float, *, by_torchrun: bool) -> StoppingEvent:
        """Return the event on who stops the run; `muster torchrun` counts one more Ctrl-C."""
        name, who = contract.signal_name(self.signum), self.cause.value
        text = f"{who} asked to stop: {name} goes to every worker, SIGKILL after {grace_s:.0f} s"
        if self.signum == signal.SIGINT:
            text += f" or {'a third' if by_torchrun else 'a second'} Ctrl-C"
        return StoppingEvent(signal=name, who=who, text=text)

    def is_known_better(self, cause: StopCause) -> bool:
        """Record another cause of the stop; return whether it is a better one."""
        before, self.cause = self.cause, better_cause(self.cause, cause)
        return self.cause is not before


@dataclass(slots=True)
class Leavers:
    """The nodes that are leaving the run."""

    plan: RunPlan
    members: list[Member] = field(default_factory=list)
    _kill_at: float = float("inf")

    def may_leave(self, member: Member, signum: int, present: Sequence[Member]) -> bool:
        """Return whether the run can continue without this node and those already leaving."""
        if signum != signal.SIGTERM or member.hello.wants_place_0:
            return False
        if self.plan.nodes_return:
            return True
        if not self.plan.is_elastic:
            return False
        rest = [m for m in present if m is not member and m not in self.members]
        return len(rest) >= max(self.plan.min_nodes, 1)

    def add(self, member: Member, now: float) -> None:
        """Record that a node is leaving."""
        self.members.append(member)
        self._kill_at = min(self._kill_at, now + self.plan.limits.grace_s)

    def is_time(self, now: float, ends: Sequence[WorkerEnd], names: Sequence[str]) -> bool:
        """Return whether to end the attempt now: the grace is over, or a leaving worker failed."""
        if not self.members:
            return False
        kinds = (EndKind.SUCCESS, EndKind.PREEMPTED)
        has_ended = any(end.node in names and end.kind not in kinds for end in ends)
        return has_ended or now >= self._kill_at

    def take_all(self) -> list[Member]:
        """Return and clear the nodes that are leaving."""
        members, self.members, self._kill_at = self.members, [], float("inf")
        return members
