"""The head of a training run: hears its agents and clients, lets `TrainingPolicy` decide, carries out what follows."""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torchmuster
from torchmuster.core.files import atomic
from torchmuster.core.files.disk import Backlog, DiskWriter
from torchmuster.core.head.attempt import Attempt
from torchmuster.core.head.head import Head, HeadClient, Outlet
from torchmuster.core.head.membership import (
    MAX_LISTED,
    Member,
    Membership,
    claim_attempt,
    deposed,
    is_deposed,
)
from torchmuster.core.head.node_policy import (
    AskForNodes,
    CutOff,
    NodePolicy,
    OpenStore,
    Record,
    Send,
    TrainingAction,
)
from torchmuster.core.head.options import OWNER_S, TrainingHeadOptions
from torchmuster.core.head.training_policy import TrainingPolicy
from torchmuster.core.model import codec
from torchmuster.core.model.events import (
    NoticeEvent,
    RecordEvent,
    RunEndedEvent,
    RunStartedEvent,
    TimeLimitEvent,
)
from torchmuster.core.model.failure import WorkerEnd
from torchmuster.core.model.message import utc_now
from torchmuster.core.model.progress import RankPhase, RankProgress, RankSample, split
from torchmuster.core.model.verdict import Result
from torchmuster.core.net import messages
from torchmuster.core.net.channel import Channel
from torchmuster.core.net.handshake import HandshakeError, Reason
from torchmuster.launcher.head.hangs.stragglers import StepParts, per_step, waits_s
from torchmuster.launcher.head.hangs.watch import was_active
from torchmuster.launcher.head.preflight import StartChecks, preflight_form

if TYPE_CHECKING:
    from torchmuster.launcher.head.exec_relay import ExecRelay
    from torchmuster.launcher.head.hangs.monitor import HangMonitor
    from torchmuster.launcher.head.openmetrics import NewestTraining


# How all ranks of a run stand: takes what agents report, answers who looks, and writes the record.
#
# A value of a sample is what has changed between two reports of a rank. Those who look get a window of ten to twenty
# seconds, so that the numbers are steady. The record (`samples.jsonl`) has a line every ten seconds at first; the
# interval doubles with every 4 MiB that the file has, whoever wrote them, so its size grows with the logarithm of the
# run's time: a line of 512 ranks has about 60 KB, and a week of them about 40 MiB.


WRITE_EVERY_S = 10.0
DOUBLE_EVERY_BYTES = 4 << 20
_WINDOW_S = 10.0  # of those who look: one to two of it
_FRESH_S = 1.0  # one sample serves all who look within it
_RANKS_PER_MESSAGE = 1024  # with names of 100 characters still half a frame
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Told:
    """What an agent has told of a rank, and when."""

    at: float
    progress: RankProgress


@dataclass(slots=True)
class _Base:
    """With what the newest reports are compared."""

    at: float
    ranks: dict[int, _Told] = field(default_factory=dict)


class Board:
    """Knows how the ranks of the attempt that runs stand.

    Args:
        write: Takes a line of the record.
        has_bytes: How large the record is already, of heads before this one.
    """

    def __init__(self, write: Callable[[bytes], None], has_bytes: int = 0) -> None:
        self._write, self._has_bytes = write, has_bytes
        self.attempt: int | None = None
        self._nodes: tuple[str, ...] = ()
        self._ended: set[int] = set()
        self._num_ends = 0
        self._told: dict[int, _Told] = {}
        self._stepped: dict[int, _Told] = {}  # each rank's first report of a step
        self._active_at: dict[int, float] = {}
        self._written = self._older = self._newer = _Base(0.0)
        self._is_news = False
        self._shown: tuple[float, RankSample] | None = None

    # What comes in.

    def begin(self, now: float, attempt: int, nodes: Mapping[int, str]) -> None:
        """Begin with an attempt; `nodes` has the node of every rank."""
        self.end(now)
        self.attempt = attempt
        self._nodes = tuple(nodes[rank] for rank in sorted(nodes))
        self._told, self._stepped, self._ended, self._num_ends = {}, {}, set(), 0
        self._active_at = {}
        self._written = self._older = self._newer = _Base(now)

    def take(self, now: float, progress: Sequence[RankProgress]) -> None:
        """Take an agent's report."""
        for one in progress:
            if not 0 <= one.rank < len(self._nodes):
                continue
            before = self._told.get(one.rank)
            if before is None or was_active(before.progress, one, now - before.at):
                self._active_at[one.rank] = now
            told = self._told[one.rank] = _Told(now, one)
            for base in (self._written, self._older, self._newer):
                base.ranks.setdefault(one.rank, told)  # its first: there is nothing to compare yet
            if one.steps_here:
                self._stepped.setdefault(one.rank, told)
            self._is_news = True
        if now - self._newer.at >= _WINDOW_S:
            self._older, self._newer = self._newer, _Base(now, dict(self._told))

    def note_ends(self, ends: Sequence[WorkerEnd]) -> None:
        """Note which workers have ended: all that the attempt knows, in the order of their ends."""
        self._ended.update(end.rank for end in ends[self._num_ends :])
        self._num_ends = len(ends)

    def advance(self, now: float) -> None:
        """Write a line when it is due."""
        every_s = WRITE_EVERY_S * 2 ** (self._has_bytes // DOUBLE_EVERY_BYTES)
        if self._is_news and now - self._written.at >= every_s:
            self._record(now)

    def end(self, now: float) -> None:
        """Write what is not written yet: the attempt has ended."""
        if self.attempt is not None and self._is_news:
            self._record(now)
        self.attempt = self._shown = None

    # What goes out.

    def answer(self, now: float, ask_id: str) -> list[messages.BoardTold]:
        """Return the answer to a client."""
        sample = self.newest(now)
        if sample is None:
            return [messages.BoardTold(ask_id=ask_id, sample=None)]
        parts = split(sample, _RANKS_PER_MESSAGE)
        return [
            messages.BoardTold(ask_id=ask_id, sample=part, is_last=part is parts[-1])
            for part in parts
        ]

    def newest(self, now: float) -> RankSample | None:
        """Return how all ranks stand now; None while no attempt runs."""
        if self.attempt is None:
            return None
        if self._shown is None or now - self._shown[0] >= _FRESH_S:
            self._shown = (now, self._sample(now, self._older))
        return self._shown[1]

    def _record(self, now: float) -> None:
        sample = self._sample(now, self._written)
        plain = {name: value for name, value in codec.to_plain(sample).items() if value != []}
        line = json.dumps(plain, separators=(",", ":")).encode() + b"\n"
        self._write(line)
        self._has_bytes += len(line)
        self._written, self._is_news = _Base(now, dict(self._told)), False

    def _sample(self, now: float, base: _Base) -> RankSample:
        ranks = range(len(self._nodes))
        rows = [self._row(now, rank, base) for rank in ranks]
        steps = {rank: row.parts for rank, row in enumerate(rows) if row.parts is not None}
        waits = waits_s(steps)
        for rank, wait_s in waits.items():
            rows[rank].values["wait_s"] = round(wait_s * rows[rank].num_steps, 3)
        return RankSample(
            time=utc_now(),
            attempt=self.attempt or 0,
            over_s=round(max(now - base.at, 0.0), 3),
            nodes=self._nodes,
            **{name: _column(rows, name) for name in _COLUMNS},
        )

    def _row(self, now: float, rank: int, base: _Base) -> "_Row":
        told = self._told.get(rank)
        if told is None:
            return _Row({"states": "" if rank in self._ended else "?"})
        progress, before = told.progress, base.ranks[rank]
        values: dict[str, Any] = {
            "states": "" if rank in self._ended else progress.state,
            "report_ages_s": round(max(now - told.at, 0.0), 1),
            "still_s": round(told.at - self._active_at[rank], 1),
            "rss_mib": progress.rss_mib,
            "gpu_percent": progress.gpu_percent,
            "gpu_mib": progress.gpu_mib,
            **_of_kernel(before, told),
        }
        if progress.beat_age_s is None:
            return _Row(values)
        values["ages_s"] = round(progress.beat_age_s + max(now - told.at, 0.0), 1)
        # What came before the first step is no step's time.
        start = before if before.progress.steps_here else self._stepped.get(rank, told)
        values |= _of_library(before.progress, start.progress, progress)
        num_steps = progress.steps_here - start.progress.steps_here
        over_s = progress.step_at - start.progress.step_at
        if num_steps <= 0 or over_s <= 0:
            return _Row(values)
        parts = per_step(start.progress, progress)
        values["steps_per_s"] = round(num_steps / over_s, 4)
        values["rest_s"] = round(parts.rest_s * num_steps, 3)
        return _Row(values, num_steps, parts)


@dataclass(frozen=True, slots=True)
class _Row:
    """The values of one rank, by column; `parts` where it has made steps."""

    values: dict[str, Any]
    num_steps: int = 0
    parts: StepParts | None = None


def _of_kernel(before: _Told, now: _Told) -> dict[str, Any]:
    over_s = now.at - before.at
    if over_s <= 0:
        return {}
    busy_s = now.progress.active_s - before.progress.active_s
    io_bytes = now.progress.io_bytes - before.progress.io_bytes
    return {
        "cpus": round(max(busy_s, 0.0) / over_s, 2),
        "io_mib": round(max(io_bytes, 0) / _MIB, 1),
    }


def _of_library(before: RankProgress, start: RankProgress, now: RankProgress) -> dict[str, Any]:
    values: dict[str, Any] = {
        "steps": now.step if now.steps_here else None,
        "steps_here": now.steps_here,
        "phases": now.phase.name.lower(),
        "median_s": now.median_s or None,
    }
    if len(now.seconds) != _NUM_PHASES:
        return values
    for name, (phase, is_of_steps) in _PHASES.items():
        first = start if is_of_steps else before
        if len(first.seconds) == _NUM_PHASES:
            values[name] = round(max(now.seconds[phase] - first.seconds[phase], 0.0), 3)
    return values


_NUM_PHASES = len(RankPhase)
_PHASES = {  # and whether it is a part of every step
    "data_s": (RankPhase.DATA, True),
    "forward_s": (RankPhase.FORWARD, True),
    "save_s": (RankPhase.SAVE, False),
    "evaluate_s": (RankPhase.EVALUATE, False),
}
_COLUMNS = (
    *(
        "states",
        "report_ages_s",
        "still_s",
        "steps",
        "steps_here",
        "ages_s",
        "phases",
        "steps_per_s",
    ),
    *("median_s", "data_s", "forward_s", "rest_s", "wait_s", "save_s", "evaluate_s"),
    *("cpus", "rss_mib", "io_mib", "gpu_percent", "gpu_mib"),
)


def _column(rows: Sequence[_Row], name: str) -> tuple[Any, ...]:
    """Return a column; empty where no rank has it."""
    nothing = "" if name == "phases" else None
    column = tuple(row.values.get(name, nothing) for row in rows)
    return column if any(value is not nothing for value in column) else ()


_GOODBYE_S = 2.0
_WHY_REFUSED = {
    Reason.WRONG_SECRET: "it has another secret",
    Reason.OTHER_VERSION: "it uses another version of muster's protocol",
}


class TrainingHead(Head[Member]):
    """Conducts one training run.

    Args:
        options: What it was told at its start.
        disk: Writes the record.
        open_store: Binds the port of an attempt's store on an address and returns the port.
        on_event: Shows every event, where the head has a terminal.
    """

    def __init__(
        self,
        options: TrainingHeadOptions,
        disk: DiskWriter,
        open_store: Callable[[int, str], int],
        on_event: Callable[[RecordEvent], None] | None = None,
    ) -> None:
        super().__init__(disk, options.run_dir.events)
        self.plan, self.options = options.plan, options
        self.result: Result | None = None
        self._open_store, self.on_event = open_store, on_event
        before_s = time.time() - options.began_at if options.began_at else 0.0
        self._started_at = time.monotonic() - max(0.0, before_s)
        self._logs_lost = 0
        self._owner_came = False
        self._unheard: deque[messages.Event | messages.Output] = deque(maxlen=MAX_LISTED)
        self._outlet = self._open_outlet()
        self._hangs: HangMonitor | None = (
            None  # of the attempt that runs, from its first progress on
        )
        self._execs: ExecRelay[Member] | None = None
        self._training: NewestTraining | None = None
        samples = options.run_dir.samples
        self._board = Board(lambda line: disk.append(samples, line), options.samples_bytes)
        members = Membership(
            options.plan,
            clock=self.clock,
            jobs=options.jobs,
            left_out_before=options.left_out,
        )
        self.policy = TrainingPolicy(options, members, self.clock(), self._checks)
        self.has_open_door = False  # who has no common key may come in with the public one

    def _checks(self, policy: NodePolicy) -> StartChecks:
        return StartChecks(
            self.plan,
            preflight_form(self.plan, os.environ),
            send=policy.send,
            name_of=policy.members.name,
            tell=policy.tell,
            clock=lambda: policy.now,
            own_address=self.options.own_address,
            own_network_id=self.own_ids[1],
        )

    def _open_outlet(self) -> Outlet | None:
        if not (self.options.has_owner and self.plan.every_line):
            return None
        return Outlet(Backlog(lambda: self.options.run_dir.untold, self.disk))

    # What others in this process ask.

    def store_address(self) -> tuple[str, int] | None:
        """Return where the store of the attempt that runs listens."""
        attempt = self.policy.running
        if attempt is None or not attempt.store:
            return None
        host, _, port = attempt.store.rpartition(":")
        return host, int(port)

    def refuse_stranger(self, peer: str, error: HandshakeError) -> None:
        """Note a caller that failed the handshake; garbage is not worth a line."""
        if error.reason is Reason.WRONG_SECRET and self.has_open_door:
            return  # it calls again with the public key
        if error.reason in _WHY_REFUSED:
            self.policy.note_refusal(self.clock(), peer, _WHY_REFUSED[error.reason])
            self._carry_out()

    def metrics(self) -> str:
        """Return the page that Prometheus reads; asked for only where there is a port for it."""
        from torchmuster.launcher.head.openmetrics import NewestTraining, render

        if self._training is None:
            self._training = NewestTraining(self.options.run_dir.training)
        self._training.read()
        attempt = self.policy.attempt
        started = attempt.number + 1 if attempt is not None else self.options.first_attempt
        return render(self.plan.run_id, started, self._board.newest(self.clock()), self._training)

    # The record.

    def event(self, event: RecordEvent) -> messages.Event:
        """Write one event to the record and to everyone who watches; an owner who comes later hears it, too."""
        message = super().event(event)
        if self.options.spread is not None:
            self.options.spread.hear(event)
        if self.on_event is not None:
            self.on_event(event)
        self._keep_for_owner(message)
        return message

    def _keep_for_owner(self, message: messages.Event | messages.Output) -> None:
        """Keep what an owner has not heard: workers that were forked may be quicker than it."""
        if self._outlet is None:
            if not self._owner_came:
                self._unheard.append(message)
        elif not any(client.outlet is not None for client in self._clients):
            self._outlet.send(message)

    def notice(self, text: str) -> None:
        """Say a sentence about the whole run."""
        office = self.options.office
        node = office.node if office is not None else self.plan.node_name(0)
        self.event(NoticeEvent(node=node, text=text))

    # The one loop.

    async def conduct(self) -> Result:
        """Conduct the run to its end and return its result."""
        first = self.options.first_attempt
        self.event(RunStartedEvent(run_id=self.plan.run_id, first_attempt=first))
        await self.run()
        return await self._say_goodbye()

    @property
    def is_over(self) -> bool:
        """Say whether the run has its result."""
        return self.policy.result is not None

    def patience_s(self) -> float:
        """Return when the policy has something to do."""
        now = self.clock()
        return self.policy.due(now) - now

    def advance(self) -> None:
        """Do what is due."""
        now = self.clock()
        attempt, hangs = self.policy.running, self._hangs
        if attempt is not None and hangs is not None and hangs.attempt == attempt.number:
            hangs.note_ends(attempt.ends)
            end = hangs.advance(now, held=self.policy.is_held)
            if end is not None:
                self.policy.hung(now, end)
        if attempt is not None:
            self._board.note_ends(attempt.ends)
            self._board.advance(now)
        else:
            self._board.end(now)
        self.policy.advance(now)
        self._carry_out()

    def _carry_out(self) -> None:
        """Do what the policy asks for; it may ask for more on the way."""
        actions = deque(self.policy.take_actions())
        while actions:
            self._do(actions.popleft())
            actions.extend(self.policy.take_actions())

    def _do(self, action: TrainingAction) -> None:
        match action:
            case Record(event=event):
                self.event(event)
            case Send(channel=channel, message=message):
                channel.send_nowait(message)
            case AskForNodes(places=places, again=again):
                self._need(places, again=again)
            case OpenStore(attempt=attempt, address=address):
                self._claim(attempt.number)
                port = self._open_store(attempt.number, address)
                self.policy.store_is_open(attempt, address, port)
            case CutOff(member=member, channel=channel, why=why):
                self._cut_off(member, channel, why)

    def _claim(self, attempt: int) -> None:
        """Show that this is the head still, before its agents are told anything."""
        office = self.options.office
        if office is None:
            return
        starts = (m.started_at for m in self.policy.members.members if m.is_present)
        members = tuple(sorted({start for start in starts if start is not None}))
        claim_attempt(office, attempt, members, self.policy.book.spent, self.notice)

    def _need(self, places: Sequence[int], *, again: bool) -> None:
        if self.options.spread is not None:
            self.options.spread.need(places)
        need = messages.NeedNodes(places=tuple(places), again=again)
        for client in self._clients:
            if client.owner:
                client.channel.send_nowait(need)

    def _cut_off(self, member: Member, channel: Channel, why: str) -> None:
        channel.abort()
        if member.place is not None and self._hangs is not None:
            self._hangs.lose(member.place)
        if self._execs is not None:
            name = self.policy.members.name(member)
            self._execs.agent_gone(member, f"{name} was lost: {why}")

    # What agents say.

    def take_call(self, hello: messages.Message, channel: Channel) -> Member | None:
        """Take an agent in, or tell it why not."""
        if not isinstance(hello, messages.Hello):
            return None
        member = self.policy.called(self.clock(), hello, channel, torchmuster.__version__)
        self._carry_out()
        return member

    def take_word(self, agent: Member, message: messages.Message) -> None:
        """Take what an agent says: what the policy has nothing to do with is passed on."""
        match message:
            case messages.Output():
                self.show(message)
                self._keep_for_owner(message)
            case messages.Notice(text=text):
                self._logs_lost += message.logs_lost_lines
                if text:
                    lost, name = message.logs_lost_lines or None, self.policy.members.name(agent)
                    self.event(NoticeEvent(node=name, text=text, logs_lost_lines=lost))
            case messages.Progress() | messages.Stacks():
                self._take_progress(agent, message)
            case _ if isinstance(message, messages.FromExecTask):
                if self._execs is not None:
                    self._execs.from_agent(agent, message)
            case _:
                self.policy.said(self.clock(), agent, message)
                self._carry_out()

    def take_loss(self, agent: Member, channel: Channel, why: str) -> None:
        """Take the end of an agent's connection: it may have gone to another head."""
        office = self.options.office
        if office is not None and is_deposed(office):
            raise deposed(office)
        self.policy.gone(self.clock(), agent, channel, why)
        self._carry_out()

    # What clients ask for.

    def client_gone(self, client: HeadClient) -> None:
        """Take the end of a client's connection."""
        super().client_gone(client)
        if client.outlet is not None and client.outlet.channel is client.channel:
            client.outlet.attach(None)
        if self._execs is not None:
            self._execs.client_gone(client.channel)
            self._carry_out()

    def take_request(self, client: HeadClient, message: messages.Message) -> None:
        """Take what a client asks for."""
        match message:
            case messages.Watch(owner=owner):
                self._watch(client, owner=owner)
            case messages.Stop(signum=signum, cause=cause, at_once=at_once, time_is_up=is_up):
                now = self.clock()
                self.policy.stop(now, signum, cause, at_once=at_once, time_is_up=is_up)
            case messages.StartFailed(place=place, why=why, is_gone=is_gone):
                self.policy.start_failed(place, why, is_gone=is_gone)
            case messages.Forward(signum=signum, last=last):
                self.policy.forward(signum, last)
            case messages.Input(rank=rank):
                attempt = self.policy.attempt
                member = attempt.member_of(rank) if attempt is not None else None
                if member is not None:
                    self.policy.send(member, message)
            case messages.TerminalSize():
                self.send_to_nodes(message)
            case messages.AskStacks(ask_id=ask_id):
                self._ask_stacks(client, ask_id)
            case messages.JobEnds(ends_at=ends_at):
                self.event(TimeLimitEvent(ends_at=ends_at))
            case messages.AskBoard(ask_id=ask_id):
                for told in self._board.answer(self.clock(), ask_id):
                    client.channel.send_nowait(told)
            case _ if isinstance(message, messages.FromExecClient):
                self._exec_relay().from_client(client.channel, message)
        self._carry_out()

    def _watch(self, client: HeadClient, *, owner: bool) -> None:
        self.watch(client, owner=owner)
        if not owner:
            return
        if self._outlet is not None:
            for one in self._clients:  # an earlier connection may not have ended yet
                one.outlet = self._outlet if one is client else None
            self._outlet.attach(client.channel)
        self._owner_came = True
        while self._unheard:  # what was said before anyone listened
            client.channel.send_nowait(self._unheard.popleft())
        places = self.policy.asked_for
        if places:
            client.channel.send_nowait(messages.NeedNodes(places=places))

    def _exec_relay(self) -> "ExecRelay[Member]":
        if self._execs is None:
            from torchmuster.launcher.head.exec_relay import ExecRelay
            from torchmuster.launcher.head.rank_relay import NamedAgents

            agents = NamedAgents(lambda: self.policy.attempt, self.policy.members.name)
            self._execs = ExecRelay(agents.find, self.policy.send, agents.why_not)
        return self._execs

    # Ranks that stand still.

    def _take_progress(self, member: Member, message: messages.Progress | messages.Stacks) -> None:
        attempt = self.policy.running
        if attempt is None or member.place is None:
            return
        if isinstance(message, messages.Stacks):
            if self._hangs is not None:
                self._hangs.take_stacks(member.place, message)
        elif message.attempt == attempt.number:
            now = self.clock()
            self._hang_monitor(attempt).take_progress(now, message)
            if self._board.attempt != attempt.number:
                self._board.begin(now, attempt.number, self._rank_nodes(attempt))
            self._board.take(now, message.ranks)

    def _hang_monitor(self, attempt: Attempt) -> "HangMonitor":
        if self._hangs is None or self._hangs.attempt != attempt.number:
            from torchmuster.launcher.head.hangs.monitor import HangMonitor, watch_limits

            self._hangs = HangMonitor(
                attempt.number,
                self._rank_nodes(attempt),
                watch_limits(self.plan.limits),
                self.options.run_dir.attempt_logs(attempt.number),
                self,
                self.clock(),
                attempt.store,
                self.options.relay_port,
            )
            self._hangs.note_ends(attempt.ends)
        return self._hangs

    def _rank_nodes(self, attempt: Attempt) -> dict[int, str]:
        name = self.policy.members.name
        return attempt.rank_nodes({place: name(m) for place, m in attempt.members.items()})

    def _ask_stacks(self, client: HeadClient, ask_id: str) -> None:
        attempt, send = self.policy.running, client.channel.send_nowait
        if attempt is None:
            send(messages.StacksTold(ask_id=ask_id, sentence="no worker runs now", lines=()))
            return
        self._hang_monitor(attempt).ask_for(self.clock(), ask_id, send)

    def send_to_nodes(self, message: messages.Message) -> set[int]:
        """Send to all agents of the attempt; return their places."""
        attempt = self.policy.attempt
        members = attempt.present if attempt is not None else []
        for member in members:
            self.policy.send(member, message)
        return {member.place for member in members if member.place is not None}

    def write_file(self, path: str, text: str) -> None:
        """Write a file of the run directory, by the writer thread."""
        self.disk.append(path, text.encode(errors="replace"))  # it makes the folder
        self.disk.close_file(path)

    # The end.

    async def _say_goodbye(self) -> Result:
        if self.policy.result is None:
            raise RuntimeError("the run has not ended")
        self.result = result = replace(
            self.policy.result,
            elapsed_s=round(time.monotonic() - self._started_at, 3),
            logs_lost_lines=self._logs_lost,
        )
        self.disk.replace(self.options.run_dir.result, atomic.as_json(codec.to_plain(result)))
        self.event(RunEndedEvent(result=result))
        self.policy.dismiss_all()
        self._carry_out()
        began = time.monotonic()
        while (limit_s := self._stays_s()) and await self.take_next(
            began + limit_s - time.monotonic()
        ):
            pass
        if self._outlet is not None:
            await self.tell_the_rest(self._outlet)
        return result

    @property
    def is_telling(self) -> bool:
        """Say whether the owner of a run that is over may still have to hear something."""
        return self.is_over and self._outlet is not None

    def _stays_s(self) -> float:
        """Return how long after the end of the run there may be somebody to serve: nodes, or an owner that comes late."""
        if self.options.has_owner and not self._owner_came:
            return OWNER_S
        is_expected = self.policy.members.present() or self.policy.more_may_come
        return _GOODBYE_S if is_expected else 0.0
