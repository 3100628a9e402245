"""Decides which nodes take part in a training run: they join, are refused, are lost or leave.

It does no I/O. `TrainingPolicy` builds on it and decides what follows for the running attempt.
"""

import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchmuster.core.head.attempt import Attempt, AttemptPhase, RestartBook
from torchmuster.core.head.membership import MAX_LISTED, Leavers, Member, Membership, StopRequest
from torchmuster.core.head.options import TrainingHeadOptions
from torchmuster.core.model import contract, events
from torchmuster.core.model.failure import OVERUSED, WorkerEnd
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.text import span
from torchmuster.core.model.verdict import AGAIN_AFTER_S, Report, Result, StopCause, cause_of_stop
from torchmuster.core.net import messages
from torchmuster.core.net.channel import Channel

# The wait for the nodes of an attempt: when enough have joined, which are missing and why. Rules
# only.


_MAX_NAMED = 8  # in one sentence


@dataclass(slots=True)
class Gathering:
    """The wait for the nodes of an attempt.

    Attributes:
        since: When the wait began.
        enough_since: Since when the minimum number of nodes has been present; None while it is not.
        asked_for: The places of lost nodes for which replacements have been requested.
        start_failures: By place, why its last start brought no agent.
        gone: The places whose node the job has lost, as the scheduler says: no agent can come.
    """

    plan: RunPlan
    members: Membership
    since: float
    enough_since: float | None = None
    asked_for: set[int] = field(default_factory=set)
    start_failures: dict[int, str] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)

    def begin(self, now: float) -> None:
        """Start a wait."""
        self.since, self.enough_since = now, None

    def end(self) -> None:
        """End the wait: an attempt starts, and only spare nodes may still come."""
        self.gone.intersection_update(self.members.missing_places())
        if self.plan.spares:
            self.asked_for.intersection_update(self.members.missing_places())
        else:
            self.asked_for.clear()

    @property
    def due(self) -> float | None:
        """Return when the last call for more nodes ends."""
        return (
            None if self.enough_since is None else self.enough_since + self.plan.limits.last_call_s
        )

    def start_failed(self, place: int, why: str, *, is_gone: bool) -> None:
        """Record why no agent could start at a place; if the node is gone, add to the reason."""
        if place in self.gone:
            return
        first = self.start_failures.get(place)
        if is_gone:
            self.gone.add(place)
            why = f"{first}; {why}" if first is not None else why
        self.start_failures[place] = why

    @property
    def is_in_vain(self) -> bool:
        """Return whether the nodes that are present or can still come are too few for the run."""
        may_come = set(self.members.missing_places()) - self.gone
        return len(self.members.present()) + len(may_come) < self.plan.min_nodes

    def left_s(self, now: float) -> float:
        """Return for how long nodes may still join; 0 if there can't be enough.

        Too few may be able to come, or too many that are here may get no ranks.
        """
        if self.gone and self.is_in_vain:
            return 0.0
        all_here = self.members.left_out() and not self.members.missing_places()
        if all_here and len(self.members.present()) < self.plan.min_nodes:
            return 0.0
        return self.since + self.plan.limits.join_timeout_s - now

    def is_complete(self, here: Sequence[Member], now: float, *, shrinking: bool) -> bool:
        """Return whether an attempt may start with these members.

        Args:
            here: The members that are present.
            now: The time.
            shrinking: An attempt has run before: give other nodes no time to come.
        """
        if len(here) >= self.plan.max_nodes:
            return self._has_its_own(here, now, shrinking=shrinking)
        if not self.plan.is_elastic or len(here) < self.plan.min_nodes:
            self.enough_since = None
            return False
        if not any(member.hello.wants_place_0 for member in here):
            return False  # the head's own agent always takes part
        if self.enough_since is None:
            self.enough_since = now
        limits = self.plan.limits
        is_late = now - self.since >= limits.join_timeout_s  # this also ends a longer last call
        return shrinking or is_late or now - self.enough_since >= limits.last_call_s

    def _has_its_own(self, here: Sequence[Member], now: float, *, shrinking: bool) -> bool:
        """Return whether the planned nodes are here or had their time: spares replace the rest."""
        if not self.plan.spares:
            return True
        if not any(member.hello.wants_place_0 for member in here):
            return False
        if shrinking or all(
            place >= self.plan.max_nodes for place in self.members.missing_places()
        ):
            return True
        if self.enough_since is None:
            self.enough_since = now
        return now - self.enough_since >= self.plan.limits.last_call_s

    def lacks(self, *, is_last: bool = False) -> list[int]:
        """Return the places at which agents must be started before the next attempt.

        Args:
            is_last: No attempt can follow the next one, so spare nodes would be useless.
        """
        missing = self.members.missing_places()
        is_enough = len(self.members.present()) >= self.plan.min_nodes
        if is_enough and (is_last or self.plan.is_elastic):
            return []
        if self.plan.is_elastic:
            return missing
        return [place for place in missing if place not in self.asked_for]

    def missing(self, place: int) -> events.MissingNode:
        """Return the name of a place's node, and why it is missing."""
        why = "no agent has connected"
        if place in self.asked_for:
            why = "lost; a replacement has not connected"
        if place in self.start_failures:
            why = f"{why}: {self.start_failures[place]}"
        return events.MissingNode(node=self.plan.node_name(place), why=why)

    def wait(self, num_here: int, now: float, hint: str) -> events.WaitingEvent | None:
        """Return the event on the missing nodes; None if only the last attempt is in the way."""
        wanted = self.plan.min_nodes  # all of them, if the number is fixed
        places = self.members.missing_places()[: wanted - num_here]
        if not places:
            return None
        missing = [self.missing(place) for place in places]
        return events.WaitingEvent(
            missing=tuple(missing[:MAX_LISTED]),
            num_missing=len(missing),
            wanted=wanted,
            left_s=round(self.left_s(now), 1),
            hint=hint,
        )

    def report(self, num_here: int) -> Report:
        """Return the report on a run whose nodes did not join in time."""
        limit_s = self.plan.limits.join_timeout_s
        if num_here >= self.plan.min_nodes:
            busy = [m for m in self.members.members if m.running_attempt is not None]
            return Report(
                error=f"all nodes have joined, but the next attempt could not start within {limit_s:.0f} s",
                because=tuple(
                    f"{self.members.name(m)}: its last workers may still run"
                    for m in busy[:_MAX_NAMED]
                ),
            )
        if left_out := [self.members.name(member) for member in self.members.left_out()]:
            return Report(
                error=f"only {num_here} of the {self.plan.min_nodes} nodes that the run needs may have ranks",
                at=", ".join(left_out[:_MAX_NAMED]),
                because=("it has computed something else than the others before",),
                hint="start the run on other nodes",
            )
        missing = [self.missing(place) for place in self.members.missing_places()][:_MAX_NAMED]
        came = f"came within {limit_s:.0f} s"
        hint = f"start the missing nodes, or wait longer: {self.plan.longer_wait}"
        if self.gone and self.is_in_vain:
            came, hint = "can come", "another job may get other nodes"
        return Report(
            error=f"only {num_here} of {self.plan.min_nodes} nodes {came}",
            at=", ".join(one.node for one in missing),
            because=tuple(f"{one.node}: {one.why}" for one in missing),
            hint=hint,
        )


# The actions that a policy requests of its head.


@dataclass(frozen=True, slots=True)
class Record:
    """Write an event."""

    event: events.RecordEvent


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to an agent."""

    channel: Channel
    message: messages.Message


@dataclass(frozen=True, slots=True)
class AskForNodes:
    """Request agents at these places; `again`: those requested before have not come."""

    places: tuple[int, ...]
    again: bool = False


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Open the store of the next attempt at this address, then call `store_is_open`."""

    attempt: Attempt
    address: str


@dataclass(frozen=True, slots=True)
class CutOff:
    """Close what is left of the connection of a lost node."""

    member: Member
    channel: Channel
    why: str


TrainingAction = Record | Send | AskForNodes | OpenStore | CutOff


LOOK_EVERY_S = 1.0
_MAX_REFUSALS = 1024
_EXPECT_S = 6.0  # agents that lost the same head call within a few pings of each other


@dataclass(frozen=True, slots=True)
class ChecksEnd:
    """The end of the run by the checks.

    `report` says what makes the run impossible; None if only the checks were requested.
    """

    exit_code: int
    report: Report | None


class StartChecks:
    """The checks before an attempt; the base class has none.

    The launcher plugs in its network survey as `start_checks`.

    Args:
        policy: The policy whose members are checked.
        own_address: The head's address, as far as it knows it.
        own_network_id: The network id of the head's machine.

    Attributes:
        end: How the checks end the run; None while they don't.
    """

    def __init__(self, policy: "NodePolicy", own_address: str, own_network_id: str) -> None:
        self.end: ChecksEnd | None = None
        self._own_address = own_address

    @property
    def due(self) -> float | None:
        """Return when `settle` has to be called again even if no message comes."""
        return None

    def greet(self, member: Member) -> None:
        """Handle an agent that has joined."""

    def take(self, member: Member, message: messages.Message) -> None:
        """Handle what an agent has measured or found."""

    def settle(self, here: Sequence[Member]) -> bool:
        """Return whether an attempt may start with these members; if it can't, `end` says why."""
        del here
        return True

    def interface_of(self, member: Member) -> str | None:
        """Return the interface that a node's workers use; None if none was chosen."""
        del member
        return None

    def master_address(self, here: Sequence[Member]) -> str:
        """Return the head's address that most other nodes reached; its own if there are none."""
        proved = [
            member.channel.own_address
            for member in here
            if member.channel is not None and not member.hello.wants_place_0
        ]
        # The head's own agent may have called over loopback, which proves nothing for the others.
        outside = [address for address in proved if not address.startswith("127.")]
        proved = outside or proved
        return max(sorted(set(proved)), key=proved.count) if proved else self._own_address


class NodePolicy:
    """The nodes of one training run.

    Args:
        options: The head's options.
        members: The run's agents.
        now: The current time.
        checks: Makes the checks before an attempt for this policy.

    Attributes:
        result: The result of the run, once it has ended; the head fills in its times.
    """

    def __init__(
        self,
        options: TrainingHeadOptions,
        members: Membership,
        now: float,
        checks: "Callable[[NodePolicy], StartChecks]",
    ) -> None:
        self.plan, self.members, self.now = options.plan, members, now
        self.phase = AttemptPhase.GATHERING
        self.attempt: Attempt | None = None
        self.next_attempt = options.first_attempt
        self.result: Result | None = None
        self.book = RestartBook(
            self.plan.limits.max_restarts, options.restarts_spent, self.plan.restart_policy
        )
        self._options = options
        self._actions: list[TrainingAction] = []
        self._gathering = Gathering(self.plan, members, now)
        self._leavers = Leavers(self.plan)
        self._stop: StopRequest | None = None
        self._lost: dict[str, str] = {}  # nodes that are missing now -> why
        self._left_out: dict[int, str] = {}  # rank that computed wrongly -> its node
        self._refusals: dict[str, float] = {}
        self._look_at = 0.0
        # When a node that was lost for its silence was last heard: the time since then is lost,
        # too.
        self._heard_last = math.inf
        self._no_store_said = False
        self._why_next = options.why
        self._checks = checks(self)

    def _begin_ending(self) -> None:
        """End the running attempt."""
        raise NotImplementedError

    def stop(
        self,
        now: float,
        signum: int,
        cause: StopCause,
        *,
        at_once: bool = False,
        time_is_up: bool = False,
    ) -> None:
        """Stop the run."""
        raise NotImplementedError

    @property
    def running(self) -> Attempt | None:
        """Return the running attempt; None if there is none."""
        return self.attempt if self.phase is AttemptPhase.RUNNING else None

    @property
    def asked_for(self) -> tuple[int, ...]:
        """Return the places for which agents have been requested."""
        return tuple(sorted(self._gathering.asked_for))

    # Actions.

    def take_actions(self) -> list[TrainingAction]:
        """Return and clear the actions, in order."""
        actions, self._actions = self._actions, []
        return actions

    def tell(self, event: events.RecordEvent) -> None:
        """Write an event."""
        self._actions.append(Record(event))

    def send(self, member: Member, message: messages.Message) -> None:
        """Send to an agent, if it is connected."""
        if member.channel is not None:
            self._actions.append(Send(member.channel, message))

    def _send_all(self, message: messages.Message) -> None:
        for member in self.attempt.present if self.attempt is not None else ():
            self.send(member, message)

    # Agents join and are lost.

    def called(
        self, now: float, hello: messages.Hello, channel: Channel, version: str
    ) -> Member | None:
        """Admit an agent and return its member, or refuse it and return None."""
        self.now = now
        known = self.members.by_incarnation(hello.incarnation)
        if known is not None:  # it calls again, and its new message replaces what was known of it
            if known.lost_why is None and known.channel is not None:
                self.gone(now, known, known.channel, "its agent connected a second time")
            self.members.forget(known)
        why_not = self.members.why_not(hello, version)
        if why_not is not None:
            self._turn_away(hello, channel, why_not)
            return None
        member = self.members.admit(hello, channel)
        member.running_attempt = hello.attempt
        if member.place is None and self.next_attempt > self._options.first_attempt:
            self._number_places()
        self._welcome(member, channel)
        return member

    def _number_places(self) -> None:
        """Give free places to nodes without one; record which spare node takes another's place."""
        if self._is_first and self.plan.spares:
            self.members.prefer_holders()
        for member in self.members.number_places():
            if self.plan.spares and member.place is not None and member.place != member.started_at:
                name, before = self.members.name(member), self.plan.node_name(member.place)
                self.tell(events.SpareTakenEvent(node=name, place=member.place, before=before))

    def _to_check(self, here: Sequence[Member]) -> list[Member]:
        """Return the nodes to check before an attempt: spare ones only before the first."""
        if not self.plan.spares:
            return list(here)
        self._number_places()
        return [member for member in here if self._is_first or member.place is not None]

    def _is_free(self, here: Sequence[Member], dangerous: Sequence[Member]) -> bool:
        """Return whether nothing of an earlier attempt is left and no agent is still expected."""
        late = self._options.expected - {member.started_at for member in here}
        if late and self.now - self._gathering.since < _EXPECT_S and self._is_first:
            return False
        return not dangerous and all(member.running_attempt is None for member in here)

    @property
    def _is_first(self) -> bool:
        """Return whether this head has started no attempt yet."""
        return self.next_attempt == self._options.first_attempt

    def _num_workers(self, place: int, member: Member) -> int:
        """Return a node's number of workers; a spare node has as many as the node it replaces."""
        if self.plan.spares and place != member.started_at:
            return self.plan.num_workers(place)
        return member.hello.num_workers

    def _is_spare(self, member: Member) -> bool:
        return self.plan.spares > 0 and member.place is None

    def _reported_spares(self) -> tuple[str, ...] | None:
        """Return the spare nodes for the event on an attempt's start; None in a run without any."""
        names = tuple(self.members.name(member) for member in self.members.spares())
        return names[:MAX_LISTED] if self.plan.spares else None

    def _leave_out(self, attempt: Attempt, cause: WorkerEnd) -> str | None:
        """If the cause is a node that computed wrongly, give it no ranks again.

        Return why the run can't continue, None if it can.
        """
        member = attempt.member_of(cause.rank)
        if member is None or cause.error is None or not cause.error.blames_node:
            return None
        name = self.members.name(member)
        before = self._left_out.get(cause.rank)
        if before is not None and before != name:
            return f"rank {cause.rank} did so on {before} as well: look at what the script does on this rank alone"
        self.members.leave_out(member)
        self._left_out[cause.rank] = name
        self.tell(events.NodeLeftOutEvent(node=name, rank=cause.rank, machine=member.machine))
        has_head = member.hello.wants_place_0  # no other node can be the run's first
        if has_head or len(self.members.present()) < self.plan.min_nodes:
            return f"{name} gets no ranks again, and the run can't go on without it: start it on other nodes"
        return None

    def _notes_on_losses(self) -> list[str]:
        """Record and return notes on the machines that were lost repeatedly or left out."""
        notes = [
            f"{name} was lost {count} times: look at it before you use it again (`muster doctor`)"
            for name, count in self.members.worn_machines.items()
        ]
        notes += [
            f"{name} was left out, as it has computed something else than the others: don't trust it before you have looked at it"
            for name in self._left_out.values()
        ]
        for note in notes:
            self.tell(events.NoticeEvent(text=note))
        return notes

    def _welcome(self, member: Member, channel: Channel) -> None:
        name, hello = self.members.name(member), member.hello
        welcome = messages.Welcome(
            run_id=self.plan.run_id,
            node=name,
            tee=self.plan.tee.value,
            head_pid=self._options.pid,
            boot_id=self.members.own_boot_id,
            network_id=self.members.own_network_id,
        )
        self.send(member, welcome)
        self._lost.pop(self.members.name_alone(member), None)
        self.tell(events.AgentJoinedEvent(node=name, host=hello.host, pid=hello.pid))
        if self.result is not None:
            self._dismiss(member, self.result)
            return
        self._checks.greet(member)
        if channel.is_open:
            text = f"{name} has no common key with the head: its channel is not authenticated"
            self.tell(events.NoticeEvent(node=name, text=text))
        if member.is_left_out:
            text = f"{name} has computed wrongly before, so it gets no ranks"
            self.tell(events.NoticeEvent(node=name, text=text))
        elif self._is_spare(member):
            if self.next_attempt > self._options.first_attempt:
                self.tell(events.SpareJoinedEvent(node=name))
        elif self.phase is not AttemptPhase.GATHERING:
            self.tell(events.NewcomerEvent(node=name))
            if self.plan.grow and self.running is not None:
                self._why_next = f"{name} has come"
                self._begin_ending()

    def _turn_away(self, hello: messages.Hello, channel: Channel, why_not: str) -> None:
        if self._options.spread is not None and self._options.spread.is_ours(hello.host):
            # The job's script was slower than the head to start this agent; nothing is wrong.
            text = f"the head has started an agent for {hello.host} already: this one is not needed"
            self._actions.append(Send(channel, messages.Goodbye(exit_code=0, sentence=text)))
            return
        sentence = f"this agent is not needed: {why_not}"
        self._actions.append(Send(channel, messages.Refused(sentence=sentence)))
        self.note_refusal(self.now, hello.host, why_not)

    def note_refusal(self, now: float, host: str, why: str) -> None:
        """Record that an agent was refused, at most once a minute for the same reason."""
        if len(self._refusals) < _MAX_REFUSALS and now - self._refusals.get(why, -60.0) >= 60.0:
            self._refusals[why] = now
            self.tell(events.AgentRefusedEvent(host=host, why=why))

    def gone(self, now: float, member: Member, channel: Channel, why: str) -> None:
        """Handle the loss of an agent's connection."""
        self.now = now
        if member.channel is not channel:  # it has reconnected since
            return
        self._actions.append(CutOff(member, channel, why))
        self.members.lose(member, why)
        if self.phase is AttemptPhase.OVER:
            return
        name = self.members.name(member)
        is_spare = self._is_spare(member) or member.is_left_out
        if not is_spare:  # the run doesn't need it
            self._lost[self.members.name_alone(member)] = why
        self.tell((events.SpareLostEvent if is_spare else events.NodeLostEvent)(node=name, why=why))
        attempt = self.running or self._ending_by_echoes
        if attempt is not None and member in attempt.members.values():
            attempt.take_loss(member, name, why, now)
        place = member.started_at
        if place is not None and self._is_missed(member):
            self._ask_for([place])

    def _is_missed(self, member: Member) -> bool:
        """Return whether a lost node, even a spare, needs a replacement.

        It needs none if no attempt can follow the next one.
        """
        if member.is_left_out or self.plan.is_elastic or not self._may_go_on:
            return False
        return not self.book.is_spent or len(self.members.present()) < self.plan.min_nodes

    @property
    def _ending_by_echoes(self) -> Attempt | None:
        """Return the attempt that ends because of echoes only: their cause may be reported later.

        The workers of a stalled node are killed there before its lease ends, which others notice.
        """
        attempt = self.attempt
        if attempt is None or self.phase is not AttemptPhase.ENDING or self._stop is not None:
            return None
        return attempt if attempt.has_only_echoes and attempt.preempted_at is None else None

    @property
    def _may_go_on(self) -> bool:
        """Return whether an attempt may follow a node's loss; between attempts, a loss is free."""
        gathering = self.phase is AttemptPhase.GATHERING
        return self._stop is None and (gathering or not self.book.is_spent)

    def _lose_silent(self) -> None:
        if self.now < self._look_at:
            return
        self._look_at = self.now + LOOK_EVERY_S
        for member in self.members.silent():
            if member.channel is not None:
                why = f"its agent has been silent for {self.now - member.heard_at:.0f} s"
                self._heard_last = member.heard_at
                self.gone(self.now, member, member.channel, why)

    # What agents report about themselves.

    def _take_ready(self, member: Member, ready: messages.SpawnerReady) -> None:
        again, member.ready = member.ready is not None, ready
        if again:
            return
        if ready.why:
            self.tell(events.NoticeEvent(node=self.members.name(member), text=ready.why))
        if ready.imports_why:
            self.tell(
                events.ImportsInWorkersEvent(node=self.members.name(member), why=ready.imports_why)
            )
        no_torch = ready.torch is None and ready.why is None and ready.forks
        if no_torch and not self._no_store_said:
            self._no_store_said = True
            text = "torch is not installed in the job's interpreter, so no rendezvous store can be offered"
            self.tell(events.NoticeEvent(node=self.members.name(member), text=text))

    # Nodes that leave.

    def _take_signal(self, member: Member, signum: int) -> None:
        if signum == contract.OVERUSED_SIGNAL and member.channel is not None:
            self.gone(self.now, member, member.channel, OVERUSED)
            return
        if self._lets_go(member, signum):
            return
        # Schedulers send SIGTERM to every agent, some twice. On an agent's terminal (`muster
        # torchrun`), a second Ctrl-C still lets workers save, as torchrun does; a third does not.
        is_new = not member.num_interrupts or self.now - member.interrupted_at >= AGAIN_AFTER_S
        if signum == signal.SIGINT and is_new:
            member.num_interrupts, member.interrupted_at = member.num_interrupts + 1, self.now
            if member.num_interrupts == 2 and self._stop is not None:
                left_s = max(self._stop.kill_at - self.now, 0.0)
                text = f"waiting for the workers: SIGKILL in {span(left_s, whole=True)}, or with a third Ctrl-C"
                self.tell(events.NoticeEvent(node=self.members.name(member), text=text))
        self.stop(self.now, signum, cause_of_stop(signum), at_once=member.num_interrupts > 2)

    def _lets_go(self, member: Member, signum: int) -> bool:
        """Return whether the signal concerns only this node; if so, let the node leave."""
        if member in self._leavers.members:
            return True
        is_late = self.phase in (AttemptPhase.ENDING, AttemptPhase.OVER)
        if self._stop is not None or is_late:
            return False
        if not self._leavers.may_leave(member, signum, self.members.present()):
            return False
        name, word = self.members.name(member), contract.signal_name(signum)
        if self._is_spare(member):
            self._release_spare(member, f"was asked to end ({word})")
            return True
        # Only the cluster knows whether another one comes: it may be deleting the Job.
        returns = self.plan.nodes_return
        goes_on = "waits for another in its place" if returns else "continues without it"
        text = f"{name} was asked to end ({word}): the job {goes_on}"
        self.tell(events.NoticeEvent(node=name, text=text))
        self._leavers.add(member, self.now)
        if self.phase is AttemptPhase.GATHERING:
            self._dismiss_leavers()
        else:
            self.send(member, messages.SignalWorkers(signum=signum, asks_to_stop=True))
        return True

    def _release_spare(self, member: Member, why: str) -> None:
        """Dismiss a node that has no ranks."""
        name = self.members.name(member)
        text = f"the spare {name} {why}"
        self.tell(events.NoticeEvent(node=name, text=text))
        self._send_away(member, text)

    def _send_away(self, member: Member, sentence: str) -> None:
        self.send(member, messages.Goodbye(exit_code=128 + signal.SIGTERM, sentence=sentence))
        self.members.lose(member, "it has left", by_itself=False)

    def _dismiss_leavers(self) -> list[str]:
        """Dismiss the nodes that are leaving; return their names."""
        leavers = self._leavers.take_all()
        for member in leavers:
            self._send_away(member, "this node was asked to end; the job continues without it")
        return [self.members.name(member) for member in leavers]

    def dismiss_all(self) -> None:
        """Tell every agent that the run has ended."""
        if self.result is not None:
            for member in [m for m in self.members.members if m.is_present]:
                self._dismiss(member, self.result)

    def _dismiss(self, member: Member, result: Result) -> None:
        sentence = None
        if result.report is not None and not member.hello.wants_place_0:
            sentence = f"the run has ended: {result.report.error}"
        self.send(member, messages.Goodbye(exit_code=result.exit_code, sentence=sentence))

    def _ask_for(self, places: Sequence[int]) -> None:
        self._gathering.asked_for.update(places)
        self._actions.append(AskForNodes(tuple(places)))
