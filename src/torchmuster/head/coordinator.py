"""The coordinator: calls the roll, starts and ends attempts, gives the one verdict.

One task owns all state and takes everything from one inbox, in the order of arrival: that order is the
order of events (`docs/design.md`, rule 3). Connections only put messages into the inbox.

    GATHERING --all here--> RUNNING --failure, loss, growth, stop--> ENDING --all reaped--> GATHERING
                               |                                        |
                               +--all ended well--> OVER <--no more-----+
"""

import asyncio
import enum
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torchmuster
from torchmuster import proc
from torchmuster.errors import ChannelError
from torchmuster.files.disk import DiskWriter
from torchmuster.files.layout import RunDir
from torchmuster.head.leavers import Leavers
from torchmuster.head.membership import Member, Membership
from torchmuster.head.restarts import Next, RestartBook
from torchmuster.model import codec, contract
from torchmuster.model.event import event_line, utc_now
from torchmuster.model.failure import EndKind, WorkerEnd, describe, first_cause, last_step
from torchmuster.model.lease import SILENT_S, OwnClock
from torchmuster.model.nodelist import compress_counts
from torchmuster.model.plan import RunPlan
from torchmuster.model.ranks import NodeRanks, assign_ranks, compress_ranks
from torchmuster.model.states import RunState
from torchmuster.model.stop import StopCause, better_cause, cause_of_stop, end_by_stop
from torchmuster.model.verdict import (
    Circumstances,
    Report,
    Result,
    both_attempts,
    explain_failure,
    final_exit_code,
    notes_on_success,
)
from torchmuster.net import messages
from torchmuster.net.channel import Channel, ChannelClosedError
from torchmuster.net.handshake import HandshakeError, Reason, Role

if TYPE_CHECKING:
    from torchmuster.head.hangs.monitor import HangMonitor
    from torchmuster.head.network_survey import NetworkSurvey
    from torchmuster.head.preflight import Preflight
    from torchmuster.head.rank_relay import RankRelay

SAY_EVERY_S = 5.0
FIRST_SAY_S = 4.0
EARLY_END_SAY_S = 3.0
PROOF_EVERY_S = 0.02
PREEMPTION_GRACE_S = 30.0
_MAX_LISTED = 256  # nodes in one event
_MAX_UNSENT_OUTPUT_BYTES = 1 << 20


class AttemptPhase(enum.Enum):
    """Where the run stands."""

    GATHERING = "gathering"
    RUNNING = "running"
    ENDING = "ending"
    OVER = "over"


@dataclass(slots=True)
class Attempt:
    """One life of the process group, as the coordinator sees it."""

    number: int
    world_size: int
    started_at: float
    members: dict[int, Member]  # by place
    ranks: dict[int, NodeRanks]
    workers_up_at: float | None = None
    places_up: set[int] = field(default_factory=set)
    ends: list[WorkerEnd] = field(default_factory=list)
    reaped: set[int] = field(default_factory=set)
    ending_at: float | None = None
    ending_why: str = ""
    store: str = ""  # its address and port
    early_said: int = 0
    early_at: float | None = None
    preempted_at: float | None = None
    ended_after_stop: bool = False  # a worker ended when a stop had been asked for

    @property
    def ended_ranks(self) -> set[int]:
        """The ranks whose end is known."""
        return {end.rank for end in self.ends}

    @property
    def is_done(self) -> bool:
        """Say whether all workers have ended with 0, unasked."""
        all_ended = len(self.ended_ranks) >= self.world_size
        well = all(e.kind is EndKind.SUCCESS and not e.asked for e in self.ends)
        return all_ended and well and not self.ended_after_stop

    @property
    def early_ranks(self) -> list[int]:
        """The ranks that ended with 0 while others ran on."""
        return [end.rank for end in self.ends if end.kind is EndKind.SUCCESS]


@dataclass(slots=True)
class _Client:
    channel: Channel
    owner: bool
    left_out: int = 0


@dataclass(slots=True)
class _StopRequest:
    signum: int
    cause: StopCause
    kill_at: float
    sent: bool = False
    killed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions:
    """What the coordinator is given beside its plan.

    Attributes:
        open_store: Binds the store's port on an address and returns the port.
        first_attempt: Not 0 when the head was lost and the engine started the run again.
        on_event: Called with every event, e.g. to print it where the head has a terminal.
        on_need: Called with places that lack an agent, where the head itself can start some.
        is_ours: Says whether the head has started an agent for this host: a second one is not needed.
        hint: What to add while nodes are missing.
        jobs: The schedulers' jobs of the head, where agents of other jobs have to be refused.
        relay_port: The head's own port, where callers of torch's store are passed on; 0: nowhere.
    """

    plan: RunPlan
    run_dir: RunDir
    open_store: Callable[[int, str], int]
    own_address: str
    first_attempt: int = 0
    restarts_spent: int = 0
    on_event: Callable[[messages.Event], None] | None = None
    on_need: Callable[[Sequence[int]], None] | None = None
    is_ours: Callable[[str], bool] | None = None
    hint: str = ""
    relay_port: int = 0
    jobs: tuple[str, ...] = ()


class Coordinator:
    """Conducts one run."""

    def __init__(self, options: CoordinatorOptions, disk: DiskWriter) -> None:
        self.plan = options.plan
        self.options = options
        self.disk = disk
        self._clock = OwnClock()  # a pause of the whole job costs nobody his lease, nor a limit
        self.roll = Membership(options.plan, clock=self._clock, jobs=options.jobs)
        limits, policy = options.plan.limits, options.plan.restart_policy
        self.book = RestartBook(limits.max_restarts, options.restarts_spent, policy)
        self.inbox: asyncio.Queue[tuple[Member | _Client | None, Any]] = asyncio.Queue()
        self.phase = AttemptPhase.GATHERING
        self.attempt: Attempt | None = None
        self.result: Result | None = None
        self._next_attempt = options.first_attempt
        self._clients: list[_Client] = []
        self._started_at = time.monotonic()
        self._gathering_since = self._clock()
        self._enough_since: float | None = None
        self._say_at = self._gathering_since + FIRST_SAY_S
        self._look_at = 0.0
        self._leavers = Leavers(options.plan)
        self._stop: _StopRequest | None = None
        self._debugging: set[int] = set()
        self._last_stop = ""
        self._trained_step: int | None = None
        self._saved_step: int | None = None
        self._is_time_up = False
        self._lost: dict[str, str] = {}  # nodes that are missing now, and why
        self._asked_for: set[int] = set()
        self._start_failures: dict[int, str] = {}  # why each place's last start brought no agent
        self._refusals: dict[str, float] = {}
        self._why_next = "start"
        self._failed_at: float | None = None
        self._lost_s = 0.0
        self._logs_lost = 0
        self._held_failure_said = self._no_store_said = False
        self._owner_came = False
        self._unheard: deque[messages.Event] = deque(maxlen=_MAX_LISTED)
        self._network: NetworkSurvey | None = None  # only where agents are on several machines
        self._network_id = proc.network_id()
        self._preflight = self._make_preflight()
        self._hangs: HangMonitor | None = (
            None  # of the attempt that runs, from the first progress on
        )
        self._execs: RankRelay | None = None

    def _make_preflight(self) -> "Preflight | None":
        """Return who looks at the nodes before an attempt; a run on one node needs nobody."""
        wanted = os.environ.get("MUSTER_PREFLIGHT") if self.plan.preflight == "short" else None
        form = "off" if wanted in ("off", "no", "0") else self.plan.preflight
        if form == "off" or (form == "short" and self.plan.max_nodes == 1):
            return None
        from torchmuster.head.preflight import Preflight

        return Preflight(self.plan, self._send, self._name, self.event, self._clock)

    # Connections: they only fill the inbox.

    async def serve(self, channel: Channel) -> None:
        """Serve one authenticated connection until it ends."""
        if channel.role is Role.CLIENT:
            if not channel.is_open:  # clients run commands: the public key is not enough
                await self._serve_client(channel)
        elif channel.role is Role.AGENT:
            await self._serve_agent(channel)

    async def _serve_agent(self, channel: Channel) -> None:
        try:
            async with asyncio.timeout(SILENT_S):
                hello = await channel.receive()
        except (ChannelClosedError, TimeoutError):
            return
        if not isinstance(hello, messages.Hello):
            return
        joined: asyncio.Future[Member | None] = asyncio.get_running_loop().create_future()
        await self.inbox.put((None, (hello, channel, joined)))
        member = await joined
        if member is None:
            await channel.close()
            return
        why = "its connection ended"
        try:
            while True:
                message = await channel.receive()
                member.heard_at = self._clock()
                if isinstance(message, messages.Ping):
                    channel.send_nowait(messages.Pong(number=message.number))
                else:
                    self.inbox.put_nowait((member, message))
        except ChannelClosedError as error:
            why = f"its agent has gone ({error})"
        finally:
            self.inbox.put_nowait((member, (channel, why)))

    async def _serve_client(self, channel: Channel) -> None:
        client = _Client(channel, owner=False)
        try:
            while True:
                self.inbox.put_nowait((client, await channel.receive()))
        except ChannelClosedError:
            pass
        finally:
            self.inbox.put_nowait((client, None))

    def store_address(self) -> tuple[str, int] | None:
        """Return where the store of the attempt that runs listens."""
        if self.attempt is None or self.phase is not AttemptPhase.RUNNING:
            return None
        host, _, port = self.attempt.store.rpartition(":")
        return host, int(port)

    def refuse_stranger(self, peer: str, error: HandshakeError) -> None:
        """Note a caller that failed the handshake; garbage is not worth a line."""
        if error.reason in (Reason.WRONG_SECRET, Reason.OTHER_VERSION):
            why = {
                Reason.WRONG_SECRET: "it has another secret",
                Reason.OTHER_VERSION: "it speaks another version of muster's protocol",
            }[error.reason]
            self._note_refusal(peer, why)

    def _note_refusal(self, host: str, why: str) -> None:
        now = self._clock()
        if len(self._refusals) < 1024 and now - self._refusals.get(why, -60.0) >= 60.0:
            self._refusals[why] = now
            self.event("agent_refused", host=host, why=why)

    # The record.

    def event(self, name: str, **fields: Any) -> None:
        """Write one event to the record and to everyone who watches."""
        now = utc_now()
        text = event_line(now, name, fields)
        self.disk.append(self.options.run_dir.events, text.encode())
        message = messages.Event(name=name, time=now, fields=fields)
        if self.options.on_event is not None:
            self.options.on_event(message)
        for client in self._clients:
            client.channel.send_nowait(message)
        if not self._owner_came:
            self._unheard.append(message)

    def notice(self, text: str) -> None:
        """Say a sentence about the whole run."""
        self.event("notice", node=self.plan.node_name(0), text=text)

    # The one loop.

    async def conduct(self) -> Result:
        """Conduct the run to its end and return its result."""
        self.event("run_started", run_id=self.plan.run_id, first_attempt=self._next_attempt)
        while self.result is None:
            try:
                async with asyncio.timeout(max(self._next_wakeup() - self._clock(), 0.0)):
                    source, message = await self.inbox.get()
            except TimeoutError:
                pass
            else:
                self._take(source, message)
                while not self.inbox.empty() and self.result is None:
                    self._take(*self.inbox.get_nowait())
            self._advance()
        await self._say_goodbye(self.result)
        return self.result

    def _next_wakeup(self) -> float:
        """Return when something is due even if nobody calls."""
        now = self._clock()
        due = now + 1.0
        if self.phase is AttemptPhase.GATHERING and self._enough_since is not None:
            due = min(due, self._enough_since + self.plan.limits.last_call_s)
        if self.phase in (AttemptPhase.GATHERING, AttemptPhase.ENDING) and self.roll.dangerous():
            due = min(due, now + PROOF_EVERY_S)
        if self._stop is not None and not self._stop.killed:
            due = min(due, self._stop.kill_at)
        if self._network is not None and (self._network.due or 0.0) > now:
            due = min(due, self._network.due or due)
        if self._preflight is not None and (self._preflight.due or 0.0) > now:
            due = min(due, self._preflight.due or due)
        return due

    def _advance(self) -> None:
        if self.result is not None:
            return
        self._lose_silent()
        if self.phase is AttemptPhase.GATHERING:
            self._advance_gathering()
        elif self.phase is AttemptPhase.RUNNING:
            self._advance_running()
        elif self.phase is AttemptPhase.ENDING:
            self._advance_ending()

    def _lose_silent(self) -> None:
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + 1.0
        for member in self.roll.silent():
            channel = member.channel
            if channel is not None:
                why = f"its agent has been silent for {now - member.heard_at:.0f} s"
                self._take_loss(member, channel, why)
                channel.abort()

    # Taking what comes in.

    def _take(self, source: Member | _Client | None, message: Any) -> None:
        if source is None:
            self._take_hello(*message)
        elif isinstance(source, _Client):
            self._take_client(source, message)
        elif isinstance(message, tuple):
            self._take_loss(source, *message)
        else:
            self._take_agent(source, message)

    def _take_hello(
        self, hello: messages.Hello, channel: Channel, joined: "asyncio.Future[Member | None]"
    ) -> None:
        known = self.roll.by_incarnation(hello.incarnation)
        if known is not None:  # it calls again; what it was is settled by what it says now
            if known.lost_why is None and known.channel is not None:
                self._take_loss(known, known.channel, "its agent called a second time")
            self.roll.forget(known)
        why_not = self.roll.why_not(hello, torchmuster.__version__)
        if why_not is not None:
            self._turn_away(hello, channel, why_not)
            joined.set_result(None)
            return
        member = self.roll.admit(hello, channel)
        member.running_attempt = hello.attempt
        if member.place is None and self._next_attempt > self.options.first_attempt:
            self.roll.number_places()
        name = self._name(member)
        channel.send_nowait(
            messages.Welcome(
                run_id=self.plan.run_id,
                node=name,
                tee=self.plan.tee.value,
                head_pid=os.getpid(),
                boot_id=self.roll.own_boot_id,
                network_id=self._network_id,
            )
        )
        self._lost.pop(name, None)
        self.event("agent_joined", node=name, host=hello.host, pid=hello.pid)
        if self.result is not None:
            joined.set_result(member)
            self._dismiss(member, self.result)
            return
        if self._preflight is not None:
            self._preflight.greet(member)
        joined.set_result(member)
        if channel.is_open:
            text = f"{name} has no key in common with the head: its channel is not authenticated"
            self.event("notice", node=name, text=text)
        if self.phase is not AttemptPhase.GATHERING:
            self._take_newcomer(name)

    def _turn_away(self, hello: messages.Hello, channel: Channel, why_not: str) -> None:
        if self.options.is_ours is not None and self.options.is_ours(hello.host):
            # The job's script was slower than the head to start this host; nothing is wrong.
            text = f"the head has started an agent for {hello.host} already: this one is not needed"
            channel.send_nowait(messages.Goodbye(exit_code=0, sentence=text))
            return
        channel.send_nowait(messages.Refused(sentence=f"this agent is not wanted: {why_not}"))
        self._note_refusal(hello.host, why_not)

    def _take_newcomer(self, name: str) -> None:
        self.event("newcomer", node=name)
        if self.plan.grow and self.phase is AttemptPhase.RUNNING:
            self._begin_ending(f"{name} has come")
            self._why_next = f"{name} has come"

    def _take_loss(self, member: Member, channel: Channel, why: str) -> None:
        if member.channel is not channel:  # it has called again since
            return
        self.roll.lose(member, why)
        if self.phase is AttemptPhase.OVER:
            return
        name = self._name(member)
        in_attempt = self.attempt is not None and member in self.attempt.members.values()
        self._lost[name] = why
        self.event("node_lost", node=name, why=why)
        if member.place is not None and self._hangs is not None:
            self._hangs.lose(member.place)
        if self._execs is not None:
            self._execs.node_gone(member, f"{name} was lost: {why}")
        if in_attempt and self.attempt is not None and self.phase is AttemptPhase.RUNNING:
            self.attempt.ends.append(self._node_end(member, why))
        if member.place is not None and not self.plan.is_elastic:
            self._ask_for([member.place])

    def _node_end(self, member: Member, why: str) -> WorkerEnd:
        attempt = self.attempt
        ranks = attempt.ranks[member.place] if attempt and member.place is not None else None
        return WorkerEnd(
            attempt=attempt.number if attempt else -1,
            rank=ranks.first_rank if ranks else -1,
            local_rank=0,
            node=self._name(member),
            kind=EndKind.NODE_LOST,
            asked=False,
            elapsed_s=round(self._clock() - attempt.started_at, 3) if attempt else 0.0,
            signum=9,
            detail=why,
        )

    def _take_agent(self, member: Member, message: messages.Message) -> None:
        attempt = self.attempt
        match message:
            case messages.SpawnerReady():
                again, member.ready = member.ready is not None, message
                if again:
                    return
                if message.why:
                    self.event("notice", node=self._name(member), text=message.why)
                no_torch = message.torch is None and message.why is None and message.forks
                if no_torch and not self._no_store_said:
                    self._no_store_said = True
                    text = "torch is not installed in the job's interpreter, so no rendezvous store can be offered"
                    self.event("notice", node=self._name(member), text=text)
            case messages.SpawnerRefused(why=why):
                member.refused_why = why
                self._fail_to_start(member, message)
            case messages.WorkersStarted(attempt=number) if attempt and number == attempt.number:
                member.worker_pids = message.pids
                member.spawner_pid = message.spawner_pid
                self._note_up(attempt, member)
            case messages.WorkerEnded(end=end) if attempt and end.attempt == attempt.number:
                self._take_end(attempt, end)
            case messages.StoreLost(attempt=number, detail=detail):
                if attempt and number == attempt.number and self.phase is AttemptPhase.RUNNING:
                    end = self._node_end(member, f"the store of the attempt ended ({detail})")
                    attempt.ends.append(end)
            case messages.AllReaped(attempt=number, left=left):
                member.running_attempt = None
                if left:
                    plain = [codec.to_plain(process) for process in left[:_MAX_LISTED]]
                    self.event("left_running", node=self._name(member), processes=plain)
                if attempt and number == attempt.number and member.place is not None:
                    attempt.reaped.add(member.place)
            case messages.NetworkFacts() | messages.ProbeResults():
                if self._network is not None:
                    self._network.take(member, message)
                if self._preflight is not None:
                    self._preflight.take(member, message)
            case messages.NodeFacts():
                if self._preflight is not None:
                    self._preflight.take(member, message)
            case messages.Output():
                self._pass_on(message)
            case messages.Notice():
                self._logs_lost += message.logs_lost_lines
                if message.text:
                    self.event("notice", node=self._name(member), text=message.text)
            case messages.Progress() | messages.Stacks():
                self._take_progress(member, message)
            case (
                messages.ExecOutput()
                | messages.ExecTaken()
                | messages.ExecEnded()
                | messages.ExecRefused()
            ):
                if self._execs is not None:
                    self._execs.from_node(member, message)
            case messages.Debugger(rank=rank, active=active):
                self._debugging.add(rank) if active else self._debugging.discard(rank)
            case messages.LastStop(reason=reason):
                self._last_stop = reason
            case messages.TrainingEnded(step=step, saved_step=saved_step):
                self._trained_step, self._saved_step = step, saved_step
            case messages.SignalReceived(signum=signum) if self._lets_go(member, signum):
                pass
            case messages.SignalReceived(signum=signum):
                # Schedulers send SIGTERM to every agent, some twice; Ctrl-C twice means at once.
                repeat = signum == signal.SIGINT and member.interrupted
                member.interrupted = signum == signal.SIGINT
                self._request_stop(signum, cause_of_stop(signum), repeat=repeat)

    # Nodes that leave.

    def _lets_go(self, member: Member, signum: int) -> bool:
        """Say whether only this node ends, and begin with it."""
        if self._stop is not None or self.phase in (AttemptPhase.ENDING, AttemptPhase.OVER):
            return member in self._leavers.members
        if member in self._leavers.members:
            return True
        if not self._leavers.may_leave(member, signum, self.roll.present()):
            return False
        name, word = self._name(member), contract.signal_name(signum)
        text = f"{name} was asked to end ({word}): the job goes on without it"
        self.event("notice", node=name, text=text)
        self._leavers.add(member, self._clock())
        if self.phase is AttemptPhase.GATHERING:
            self._dismiss_leavers()
        else:
            self._send(member, messages.SignalWorkers(signum=signum, asks_to_stop=True))
        return True

    def _dismiss_leavers(self) -> list[str]:
        """Let those go who leave; return their names."""
        names = []
        for member in self._leavers.take_all():
            names.append(self._name(member))
            sentence = "this node was asked to end; the job goes on without it"
            code = 128 + signal.SIGTERM
            self._send(member, messages.Goodbye(exit_code=code, sentence=sentence))
            self.roll.lose(member, "it has left")
        return names

    def _note_up(self, attempt: Attempt, member: Member) -> None:
        if member.place is None or member.place in attempt.places_up:
            return
        attempt.places_up.add(member.place)
        if len(attempt.places_up) == len(attempt.members):
            attempt.workers_up_at = self._clock()
            lost_s = 0.0
            if self._failed_at is not None:
                lost_s = attempt.workers_up_at - self._failed_at
                self._lost_s += lost_s
                self._failed_at = None
            self.event("workers_started", attempt=attempt.number, restart_s=round(lost_s, 3))

    def _take_end(self, attempt: Attempt, end: WorkerEnd) -> None:
        if any(e.rank == end.rank and e.kind is not EndKind.NODE_LOST for e in attempt.ends):
            return  # said again after a broken connection
        end = self.book.take(end, wants_to_resume=bool(self._last_stop))
        attempt.ends.append(end)
        attempt.ended_after_stop |= self._stop is not None
        self._debugging.discard(end.rank)
        if self._hangs is not None and self._hangs.attempt == attempt.number:
            self._hangs.note_end(end)
        fields = {"attempt": end.attempt, "rank": end.rank, "node": end.node, "asked": end.asked}
        self.event("worker_ended", what=describe(end), elapsed_s=end.elapsed_s, **fields)
        if end.kind is EndKind.SUCCESS and attempt.early_at is None:
            attempt.early_at = self._clock()
        if end.kind is EndKind.PREEMPTED and attempt.preempted_at is None:
            attempt.preempted_at = self._clock()

    def _take_client(self, client: _Client, message: messages.Message | None) -> None:
        match message:
            case None:
                self._clients = [c for c in self._clients if c is not client]
                if self._execs is not None:
                    self._execs.client_gone(client.channel)
            case messages.AskStacks(ask_id=ask_id):
                self._ask_stacks(client, ask_id)
            case (
                messages.ExecStart()
                | messages.ExecInput()
                | messages.ExecTaken()
                | messages.ExecResize()
                | messages.ExecSignal()
            ):
                self._exec_relay().from_client(client.channel, message)
            case messages.Watch(owner=owner):
                client.owner = owner
                if client not in self._clients:
                    self._clients.append(client)
                if owner:
                    self._owner_came = True
                    while self._unheard:  # what was said before anyone listened
                        client.channel.send_nowait(self._unheard.popleft())
                if owner and self._asked_for:
                    places = tuple(sorted(self._asked_for))
                    client.channel.send_nowait(messages.NeedNodes(places=places))
            case messages.Stop(signum=signum, at_once=at_once, cause=cause, time_is_up=time_is_up):
                self._is_time_up = self._is_time_up or time_is_up
                self._request_stop(signum, cause, repeat=at_once)
            case messages.StartFailed(place=place, why=why):
                self._start_failures[place] = why
            case messages.Forward(signum=signum, last=last):
                self._last_stop = last or self._last_stop
                for member in self._attempt_members():
                    self._send(member, messages.SignalWorkers(signum=signum, if_caught=True))
            case messages.Input(rank=rank):
                for member in self._attempt_members():
                    ranks = self.attempt.ranks[member.place] if self.attempt else None  # type: ignore[index]
                    if ranks and 0 <= rank - ranks.first_rank < ranks.num_workers:
                        self._send(member, message)
            case messages.TerminalSize():
                for member in self._attempt_members():
                    self._send(member, message)
            case messages.Ping(number=number):
                client.channel.send_nowait(messages.Pong(number=number))

    # Where the ranks stand.

    def _take_progress(self, member: Member, message: messages.Progress | messages.Stacks) -> None:
        attempt = self.attempt
        if attempt is None or member.place is None or self.phase is not AttemptPhase.RUNNING:
            return
        if isinstance(message, messages.Stacks):
            if self._hangs is not None:
                self._hangs.take_stacks(member.place, message)
        elif message.attempt == attempt.number:
            self._hang_desk(attempt).take_progress(self._clock(), message)

    def _hang_desk(self, attempt: Attempt) -> "HangMonitor":
        if self._hangs is None or self._hangs.attempt != attempt.number:
            from torchmuster.head.hangs.monitor import HangMonitor, watch_limits

            nodes = {p: self._name(m) for p, m in attempt.members.items()}
            ranks = {
                ranks.first_rank + index: nodes[place]
                for place, ranks in attempt.ranks.items()
                for index in range(ranks.num_workers)
            }
            folder = self.options.run_dir.attempt_logs(attempt.number)
            limits = watch_limits(self.plan.limits)
            now = self._clock()
            store, relay = attempt.store, self.options.relay_port
            number = attempt.number
            self._hangs = HangMonitor(number, ranks, limits, folder, self, now, store, relay)
            for end in attempt.ends:
                self._hangs.note_end(end)
        return self._hangs

    def _advance_hangs(self, attempt: Attempt, now: float) -> None:
        if self._hangs is None or self._hangs.attempt != attempt.number:
            return
        held = bool(self._debugging) or self._stop is not None or attempt.preempted_at is not None
        end = self._hangs.advance(now, held=held)
        if end is not None:
            attempt.ends.append(end)

    def _ask_stacks(self, client: _Client, ask_id: str) -> None:
        if self.attempt is None or self.phase is not AttemptPhase.RUNNING:
            sentence = "no worker runs now"
            told = messages.StacksTold(ask_id=ask_id, sentence=sentence, lines=())
            client.channel.send_nowait(told)
            return
        desk = self._hang_desk(self.attempt)
        desk.ask_for(self._clock(), ask_id, client.channel.send_nowait)

    def send_to_nodes(self, message: messages.Message) -> set[int]:
        """Send to all agents of the attempt; return their places."""
        members = self._attempt_members()
        for member in members:
            self._send(member, message)
        return {member.place for member in members if member.place is not None}

    def write_file(self, path: str, text: str) -> None:
        """Write a file of the run directory, by the writer thread."""
        self.disk.append(path, text.encode(errors="replace"))  # it makes the folder
        self.disk.close_file(path)

    def _exec_relay(self) -> "RankRelay":
        if self._execs is None:
            from torchmuster.head.rank_relay import RankRelay

            self._execs = RankRelay(lambda: self.attempt, self._name, self._send)
        return self._execs

    def _pass_on(self, output: messages.Output) -> None:
        for client in self._clients:
            if client.channel.unsent_bytes > _MAX_UNSENT_OUTPUT_BYTES:
                client.left_out += output.dropped_lines + (output.text.count("\n") or 1)
                continue
            left_out, client.left_out = client.left_out + output.dropped_lines, 0
            client.channel.send_nowait(
                messages.Output(
                    rank=output.rank,
                    attempt=output.attempt,
                    stream=output.stream,
                    text=output.text,
                    dropped_lines=left_out,
                )
            )

    # Gathering.

    def _advance_gathering(self) -> None:
        if self._stop is not None:
            self._finish_stopped()
            return
        now = self._clock()
        left_s = self._gathering_since + self.plan.limits.join_timeout_s - now
        if len(self.roll.members) < self.plan.min_nodes and now < self._say_at and left_s > 0:
            return  # thousands are calling: the roll is not worth reading for each of them
        here = self.roll.present()
        dangerous = self.roll.dangerous()
        busy = any(m.running_attempt is not None for m in here)
        if not dangerous and not busy and self._is_complete(here, now):
            if self._network_is_settled(here) and self._preflight_is_settled(here):
                self._start_attempt(here)
            return
        if left_s <= 0:
            self._fail_to_gather(len(here))
        elif now >= self._say_at:
            self._say_at = now + SAY_EVERY_S
            self._say_who_is_missing(here, dangerous, left_s)

    def _network_is_settled(self, here: list[Member]) -> bool:
        """Say whether it is known which network the workers shall use; measure if not."""
        if self._network is None:
            if {member.hello.network_id for member in here} == {self._network_id}:
                return True
            from torchmuster.head.network_survey import NetworkSurvey

            self._network = NetworkSurvey(self._send, self._name, self.event, clock=self._clock)
        settled = self._network.settle(here, self._proved_address(here))
        if self._network.error is not None:
            if self._preflight is not None and self._preflight.take_failure(self._network.error):
                return True  # who asks for all gets the matrix too
            self._finish(RunState.FAILED, ChannelError.exit_code, self._network.error)
        return settled

    def _preflight_is_settled(self, here: list[Member]) -> bool:
        """Say whether the nodes have been looked at, and nothing makes the run impossible."""
        if self._preflight is None:
            return True
        settled = self._preflight.settle(here, self._proved_address(here), self._network)
        if self._preflight.has_failed:
            self._finish(RunState.FAILED, 1, self._preflight.error)
        elif settled and self._preflight.is_all:
            self._finish(RunState.SUCCEEDED, 0, None)
            return False
        return settled

    def _is_complete(self, here: list[Member], now: float) -> bool:
        if len(here) >= self.plan.max_nodes:
            return True
        if not self.plan.is_elastic or len(here) < self.plan.min_nodes:
            self._enough_since = None
            return False
        if not any(m.hello.wants_place_0 for m in here):
            return False  # the head's own agent is always of the party
        if self._enough_since is None:
            self._enough_since = now
        shrinking = self._next_attempt > self.options.first_attempt
        limits = self.plan.limits
        is_late = (
            now - self._gathering_since >= limits.join_timeout_s
        )  # a longer last call ends too
        return shrinking or is_late or now - self._enough_since >= limits.last_call_s

    def _say_who_is_missing(
        self, here: list[Member], dangerous: list[Member], left_s: float
    ) -> None:
        if dangerous:
            name = self._name(dangerous[0])
            text = (
                f"waiting until the lease of {name} has ended, so that its workers are surely gone"
            )
            self.event("waiting_for_end", text=text)
            return
        if len(here) >= self.plan.min_nodes and self.plan.is_elastic:
            return
        missing = [self._missing(place) for place in self.roll.missing_places()]
        wanted = self.plan.max_nodes
        if self.plan.is_elastic:
            missing, wanted = missing[: self.plan.min_nodes - len(here)], self.plan.min_nodes
        self.event(
            "waiting",
            missing=missing[:_MAX_LISTED],
            num_missing=len(missing),
            wanted=wanted,
            left_s=round(left_s, 1),
            **({"hint": self.options.hint} if self.options.hint else {}),
        )
        self._send_need(self.roll.missing_places(), again=True)

    def _missing(self, place: int) -> dict[str, str]:
        why = "no agent has called"
        if place in self._asked_for:
            why = "lost; a replacement has not called"
        if place in self._start_failures:
            why = f"{why}: {self._start_failures[place]}"
        return {"node": self.plan.node_name(place), "why": why}

    def _ask_for(self, places: list[int]) -> None:
        self._asked_for.update(places)
        self._send_need(places)

    def _send_need(self, places: list[int], *, again: bool = False) -> None:
        if self.options.on_need is not None:
            self.options.on_need(places)
        for client in self._clients:
            if client.owner:
                need = messages.NeedNodes(places=tuple(places), again=again)
                client.channel.send_nowait(need)

    def _start_attempt(self, here: list[Member]) -> None:
        self.roll.number_places()
        now = self._clock()
        members = {m.place: m for m in here if m.place is not None}
        ranks = assign_ranks({p: m.hello.num_workers for p, m in members.items()})
        number, self._next_attempt = self._next_attempt, self._next_attempt + 1
        world_size = sum(r.num_workers for r in ranks.values())
        tasks_per_node = compress_counts(ranks[place].num_workers for place in sorted(ranks))
        address = self._master_address(here)
        port = self.options.open_store(number, address)
        self.attempt = Attempt(number, world_size, now, members, ranks, store=f"{address}:{port}")
        self.phase = AttemptPhase.RUNNING
        self._asked_for.clear()
        self._trained_step = self._saved_step = None  # an earlier attempt's end is not this one's
        if self.plan.is_elastic and len(members) < self.plan.max_nodes and number:
            wanted = self.plan.max_nodes
            self.event("shrunk", num_nodes=len(members), wanted=wanted)
        for place, member in members.items():
            member.running_attempt = number
            member.worker_pids = ()
            self._send(
                member,
                messages.StartAttempt(
                    attempt=number,
                    ranks=ranks[place],
                    world_size=world_size,
                    num_nodes=len(members),
                    master_addr=address,
                    master_port=port,
                    restarts_spent=self.book.spent,
                    max_restarts=self.plan.limits.max_restarts,
                    node=self._name(member),
                    stdin_rank=self.plan.stdin_rank,
                    interface=self._network.interface_of(member) if self._network else None,
                    tasks_per_node=tasks_per_node,
                ),
            )
        self.event(
            "attempt_started",
            attempt=number,
            world_size=world_size,
            num_nodes=len(members),
            why=self._why_next,
            master=f"{address}:{port}",
            nodes=[self._describe_node(m, ranks[p]) for p, m in sorted(members.items())][
                :_MAX_LISTED
            ],
        )

    def _describe_node(self, member: Member, ranks: NodeRanks) -> dict[str, Any]:
        last = ranks.first_rank + ranks.num_workers - 1
        shown = compress_ranks([ranks.first_rank, last] if last > ranks.first_rank else [last])
        if ranks.num_workers > 2:
            shown = f"{ranks.first_rank}-{last}"
        return {"node": self._name(member), "host": member.hello.host, "ranks": shown}

    def _master_address(self, here: list[Member]) -> str:
        """Return the head's address in the network that was measured, else one that others have reached."""
        measured = self._network.master_address if self._network is not None else None
        return measured or self._proved_address(here)

    def _proved_address(self, here: list[Member]) -> str:
        """Return the head's address that most other nodes have reached; ours when there are none."""
        proved = [
            m.channel.own_address
            for m in here
            if m.channel is not None and not m.hello.wants_place_0
        ]
        # The head's own agent may have called over loopback, which proves nothing to the others.
        outside = [address for address in proved if not address.startswith("127.")]
        proved = outside or proved
        return max(sorted(set(proved)), key=proved.count) if proved else self.options.own_address

    # Running.

    def _advance_running(self) -> None:
        attempt = self.attempt
        if attempt is None:
            return
        now = self._clock()
        if self._stop is not None:
            self._advance_stop(self._stop, now)
        self._advance_hangs(attempt, now)
        failures = [end for end in attempt.ends if end.is_failure]
        leaving = [self._name(member) for member in self._leavers.members]
        if self._leavers.is_time(now, attempt.ends, leaving):
            self._begin_ending(f"{leaving[0]} leaves")
        elif failures and not self._is_held_by_debugger(failures):
            self._failed_at = now
            self._begin_ending(describe(failures[0]))
        elif len(attempt.ended_ranks) >= attempt.world_size:
            self._begin_ending("all workers have ended")
        elif attempt.preempted_at and now - attempt.preempted_at > PREEMPTION_GRACE_S:
            self._begin_ending("a worker was preempted and the others did not follow")
        elif attempt.early_at and now - attempt.early_at > EARLY_END_SAY_S:
            self._say_early_end(attempt)

    def _is_held_by_debugger(self, failures: list[WorkerEnd]) -> bool:
        """Say whether someone sits in a debugger that a restart would end."""
        if not self._debugging or self._stop is not None:
            return False
        if not self._held_failure_said:
            self._held_failure_said = True
            text = (
                f"rank {failures[0].rank} failed ({describe(failures[0])}) while rank"
                f" {min(self._debugging)} is in the debugger; the restart waits for it"
            )
            self.event("notice", node=failures[0].node, text=text)
        return True

    def _say_early_end(self, attempt: Attempt) -> None:
        early = attempt.early_ranks
        if len(early) > attempt.early_said:
            num_running = attempt.world_size - len(attempt.ended_ranks)
            ranks = compress_ranks(early)
            self.event("early_end", ranks=ranks, num_running=num_running)
            attempt.early_said = len(early)

    def _begin_ending(self, why: str) -> None:
        attempt = self.attempt
        if attempt is None or self.phase is not AttemptPhase.RUNNING:
            return
        self.phase = AttemptPhase.ENDING
        attempt.ending_at, attempt.ending_why = self._clock(), why
        self._say_at = attempt.ending_at + FIRST_SAY_S
        for member in self._attempt_members():
            ended_well = self._stop is None and attempt.is_done
            order = messages.KillAttempt(attempt=attempt.number, ended_well=ended_well)
            self._send(member, order)

    # Stopping.

    def _request_stop(self, signum: int, cause: StopCause, *, repeat: bool) -> None:
        now = self._clock()
        cause = better_cause(cause, cause_of_stop(signum, node_is_lost=bool(self._lost)))
        if self._stop is None:
            kill_at = now if repeat else now + self.plan.limits.grace_s
            self._stop = _StopRequest(signum, cause, kill_at)
            name = contract.signal_name(signum)
            grace, who = self.plan.limits.grace_s, cause.value
            text = f"{who} asked to stop: {name} goes to every worker, SIGKILL after {grace:.0f} s"
            self.event("stopping", signal=name, who=who, text=text)
            return
        better = better_cause(self._stop.cause, cause)
        if better is not self._stop.cause:  # an agent was first, and only saw a signal
            self._stop.cause = better
            self.event("stopping", who=better.value, text=f"{better.value} asked for this stop")
        if repeat:
            self._stop.kill_at = now

    def _advance_stop(self, stop: _StopRequest, now: float) -> None:
        if not stop.sent and self.attempt is not None and self.attempt.workers_up_at is None:
            stop.kill_at = (
                now  # a signal would not reach who is being started, and nothing is trained yet
            )
        elif not stop.sent:
            stop.sent = True
            order = messages.SignalWorkers(signum=stop.signum, asks_to_stop=True)
            for member in self._attempt_members():
                self._send(member, order)
        if now >= stop.kill_at and not stop.killed:
            stop.killed = True
            self._begin_ending("stopped")

    def _finish_stopped(self) -> None:
        stop, attempt = self._stop, self.attempt
        if stop is None:
            return
        ends = attempt.ends if attempt is not None else []
        saved = self._is_time_up or any(end.exit_code == contract.EX_TEMPFAIL for end in ends)
        self._finish(
            *end_by_stop(stop.cause, stop.signum, self.plan.run_id, saved=saved, lost=self._lost)
        )

    # Ending.

    def _advance_ending(self) -> None:
        attempt = self.attempt
        if attempt is None:
            return
        waiting = [m for m in attempt.members.values() if m.lost_why is None]
        unreaped = [m for m in waiting if m.place not in attempt.reaped]
        if unreaped:
            if self._clock() >= self._say_at:
                self._say_at = self._clock() + SAY_EVERY_S
                text = f"waiting until the killed workers of {self._name(unreaped[0])} are gone"
                self.event("waiting_for_end", text=text)
            return
        dangerous = self.roll.dangerous()
        if dangerous and self.plan.is_elastic and self._could_finish(attempt):
            dangerous = []
        if dangerous:
            if self._clock() >= self._say_at:
                self._say_at = self._clock() + SAY_EVERY_S
                self._say_who_is_missing([], dangerous, 0.0)
            return
        self._decide(attempt)

    def _could_finish(self, attempt: Attempt) -> bool:
        """Say whether the run is over whatever a lost node still does."""
        return not any(end.is_failure for end in attempt.ends) and self._stop is None

    def _decide(self, attempt: Attempt) -> None:
        self._held_failure_said = False
        self._debugging.clear()
        if attempt.is_done:
            notes = notes_on_success(attempt.ends, attempt.world_size)
            for note in notes:
                self.event("notice", text=note)
            self._finish(RunState.SUCCEEDED, 0, None, notes=notes)
            return
        if self._stop is not None:
            self._finish_stopped()
            return
        left = self._dismiss_leavers()
        if left:
            self._why_next = f"{left[0]} has left"
            self._gather_again()
            return
        cause = first_cause(attempt.ends)
        preempted = [end for end in attempt.ends if end.kind is EndKind.PREEMPTED]
        if cause is not None and not (preempted and cause.looks_like_echo):
            self._decide_after_failure(attempt, cause)
        elif preempted:
            self._decide_after_preemption(attempt, preempted[0])
        else:  # growth
            self._gather_again()

    def _decide_after_failure(self, attempt: Attempt, cause: WorkerEnd) -> None:
        follows = self.book.after_failure(cause, last_step(attempt.ends))
        again = follows is Next.AGAIN
        what = f"{describe(cause)} in rank {cause.rank} on {cause.node}"
        if cause.kind is EndKind.NODE_LOST:
            what = f"{cause.node}: {describe(cause)}"
        elif cause.kind is EndKind.HANG:
            what = describe(cause)
        self.event(
            "attempt_failed",
            attempt=attempt.number,
            what=what,
            cause=codec.to_plain(cause),
            restarts_left=self.book.max_restarts - self.book.spent if again else None,
        )
        if again:
            self._why_next = f"after {describe(cause)}"
            self._gather_again()
            return
        circumstances = Circumstances(
            world_size=attempt.world_size,
            attempt=attempt.number,
            restarts_spent=self.book.spent,
            max_restarts=self.book.max_restarts,
            same_as=self.book.same_as if follows is Next.FAIL_SAME_BUG else None,
            is_final=follows is Next.FAIL_FINAL,
            early_ranks=tuple(attempt.early_ranks),
            restart_hint=self.plan.restart_hint,
            log_path=self.options.run_dir.rank_log(attempt.number, cause.rank)
            if cause.rank >= 0
            else None,
        )
        report = explain_failure(cause, attempt.ends, circumstances)
        code = final_exit_code(cause, first_cause_code=self.plan.first_cause_code)
        self._finish(RunState.FAILED, code, report, cause)

    def _decide_after_preemption(self, attempt: Attempt, end: WorkerEnd) -> None:
        if self._last_stop:
            report = Report(
                error="the run has stopped and can be resumed",
                because=(self._last_stop,),
                hint=f"muster restart {self.plan.run_id}",
            )
            self._finish(RunState.PREEMPTED, contract.EX_TEMPFAIL, report)
            return
        if self.book.after_preemption(end, last_step(attempt.ends)) is Next.AGAIN:
            text = (
                f"rank {end.rank} was preempted (exit code 75): the run goes on, no restart spent"
            )
            self.event("notice", node=end.node, text=text)
            self._why_next = "after a preemption"
            self._gather_again()
            return
        both = both_attempts(self.book.same_as or 0, end.attempt)
        report = Report(
            error=f"rank {end.rank} left with exit code 75 in {both} in the same way",
            at=f"rank {end.rank} of {attempt.world_size} on {end.node}, attempt {end.attempt}",
            because=("code 75 asks to be resumed, but resuming leads straight back to it",),
        )
        self._finish(RunState.PREEMPTED, contract.EX_TEMPFAIL, report, end)

    def _gather_again(self) -> None:
        now = self._clock()
        self.phase = AttemptPhase.GATHERING
        self._gathering_since, self._enough_since = now, None
        self._say_at = now + FIRST_SAY_S
        if not self.plan.is_elastic:
            wanted = [p for p in self.roll.missing_places() if p not in self._asked_for]
            if wanted:
                self._ask_for(wanted)
        elif len(self.roll.present()) < self.plan.min_nodes:
            self._ask_for(self.roll.missing_places())
        self._advance_gathering()

    # The end.

    def _fail_to_gather(self, num_here: int) -> None:
        limit = self.plan.limits.join_timeout_s
        if num_here >= self.plan.min_nodes:
            held = [m for m in self.roll.members if m.running_attempt is not None]
            error = f"all nodes are here, but the next attempt could not start within {limit:.0f} s"
            because = tuple(f"{self._name(m)}: its last workers may still run" for m in held[:8])
            self._finish(RunState.FAILED, 6, Report(error=error, because=because))
            return
        missing = [self._missing(p) for p in self.roll.missing_places()]
        names = ", ".join(m["node"] for m in missing[:8])
        report = Report(
            error=f"only {num_here} of {self.plan.min_nodes} nodes came within {limit:.0f} s",
            at=names,
            because=tuple(f"{m['node']}: {m['why']}" for m in missing[:8]),
            hint=f"start the missing nodes, or wait longer: {self.plan.longer_wait}",
        )
        self._finish(RunState.FAILED, 6, report)

    def _fail_to_start(self, member: Member, refused: messages.SpawnerRefused) -> None:
        hint = "`--python PATH` names the interpreter that has the job's packages"
        report = Report(
            error=refused.what or "the workers could not be started",
            at=refused.where or self._name(member),
            because=tuple(refused.why.splitlines()),
            hint=refused.hint if refused.what else hint,
        )
        self._finish(RunState.FAILED, 1, report)

    def _finish(
        self,
        state: RunState,
        code: int,
        report: Report | None,
        cause: WorkerEnd | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        if self.result is not None:
            return
        self.phase = AttemptPhase.OVER
        self.result = Result(
            run_id=self.plan.run_id,
            state=state,
            exit_code=code,
            attempts=self._next_attempt,
            restarts_spent=self.book.spent,
            elapsed_s=round(time.monotonic() - self._started_at, 3),
            report=report,
            cause=cause,
            lost_s=round(self._lost_s, 3),
            logs_lost_lines=self._logs_lost,
            notes=notes,
            node_was_lost=self._stop is not None and bool(self._lost),
            trained_step=self._trained_step,
            saved_step=self._saved_step,
        )

    async def _say_goodbye(self, result: Result) -> None:
        plain = codec.to_plain(result)
        text = json.dumps(plain, indent=1) + "\n"
        self.disk.replace(self.options.run_dir.result, text.encode())
        self.event("run_ended", **plain)
        for member in [m for m in self.roll.members if m.is_present]:
            self._dismiss(member, result)
        deadline = time.monotonic() + 2.0
        while (self.roll.present() or self._more_may_come(result)) and time.monotonic() < deadline:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    self._take(*await self.inbox.get())
            except TimeoutError:
                return

    def _more_may_come(self, result: Result) -> bool:
        """Say whether nodes that have not called yet would wait in vain for a head that has gone."""
        before_all = self._next_attempt == self.options.first_attempt
        missing = len(self.roll.members) < self.plan.max_nodes
        return result.state is RunState.FAILED and before_all and missing

    def _dismiss(self, member: Member, result: Result) -> None:
        sentence = None
        if result.report is not None and not member.hello.wants_place_0:
            sentence = f"the run has ended: {result.report.error}"
        self._send(member, messages.Goodbye(exit_code=result.exit_code, sentence=sentence))

    # Small things.

    def _attempt_members(self) -> list[Member]:
        return [m for m in self.attempt.members.values() if m.is_present] if self.attempt else []

    def _send(self, member: Member, message: messages.Message) -> None:
        if member.channel is not None:
            member.channel.send_nowait(message)

    def _name(self, member: Member) -> str:
        if member.place is not None and member.place < len(self.plan.node_names):
            return self.plan.node_names[member.place]
        return member.hello.host
