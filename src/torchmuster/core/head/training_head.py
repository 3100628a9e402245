"""The head of a training run: hears agents and clients; `TrainingPolicy` decides what it does."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torchmuster
from torchmuster.core import plugs
from torchmuster.core.files import atomic
from torchmuster.core.files.disk import Backlog, DiskWriter
from torchmuster.core.head import membership, node_policy
from torchmuster.core.head.attempt import Attempt
from torchmuster.core.head.head import Head, HeadClient, Outlet
from torchmuster.core.head.options import OWNER_S, TrainingHeadOptions
from torchmuster.core.head.training_policy import TrainingPolicy
from torchmuster.core.model import codec, events
from torchmuster.core.model.verdict import Result
from torchmuster.core.net import messages
from torchmuster.core.net.channel import Channel, HandshakeError, Reason

_GOODBYE_S = 2.0
_WHY_REFUSED = {
    Reason.WRONG_SECRET: "it has another secret",
    Reason.OTHER_VERSION: "it uses another version of muster's protocol",
}


class TrainingHead(Head[membership.Member]):
    """The head of one training run.

    Args:
        options: The options with which it starts.
        disk: Writes the record.
        open_store: Binds a port for the store of an attempt on an address, and returns the port.
        on_event: Shows every event, if the head has a terminal.
    """

    def __init__(
        self,
        options: TrainingHeadOptions,
        disk: DiskWriter,
        open_store: Callable[[int, str], int],
        on_event: Callable[[events.RecordEvent], None] | None = None,
    ) -> None:
        super().__init__(disk, options.run_dir.events)
        self.plan, self.options = options.plan, options
        self.result: Result | None = None
        self._open_store, self.on_event = open_store, on_event
        before_s = time.time() - options.began_at if options.began_at else 0.0
        self._started_at = time.monotonic() - max(0.0, before_s)
        self._logs_lost = 0
        self._owner_came = False
        self._unheard: deque[messages.Event | messages.Output] = deque(maxlen=membership.MAX_LISTED)
        self._outlet = self._open_outlet()
        members = membership.Membership(
            options.plan,
            clock=self.clock,
            jobs=options.jobs,
            left_out_before=options.left_out,
        )
        self.policy = TrainingPolicy(options, members, self.clock(), self._checks)
        made = {name: plugs.load(what) for name, what in plugs.table("head_parts").items()}
        others, self._lacking = plugs.load_carried(self.plan.head_parts)
        self.parts: dict[str, HeadPart] = {
            name: make(self) for name, make in (made | others).items()
        }
        self.serves_open_key = False  # agents without the common key may use the public one

    def _checks(self, policy: node_policy.NodePolicy) -> node_policy.StartChecks:
        make = plugs.find("start_checks", "survey") or node_policy.StartChecks
        checks: node_policy.StartChecks = make(policy, self.options.own_address, self.own_ids[1])
        return checks

    def _open_outlet(self) -> Outlet | None:
        if not (self.options.has_owner and self.plan.every_line):
            return None
        return Outlet(Backlog(lambda: self.options.run_dir.untold, self.disk))

    # What the process of the head asks.

    def store_address(self) -> tuple[str, int] | None:
        """Return where the running attempt's store listens; None if there is none."""
        attempt = self.policy.running
        if attempt is None or not attempt.store:
            return None
        host, _, port = attempt.store.rpartition(":")
        return host, int(port)

    def refuse_stranger(self, peer: str, error: HandshakeError) -> None:
        """Record a caller that failed the handshake; garbage is not worth a line."""
        if error.reason is Reason.WRONG_SECRET and self.serves_open_key:
            return  # it calls again with the public key
        if error.reason in _WHY_REFUSED:
            self.policy.note_refusal(self.clock(), peer, _WHY_REFUSED[error.reason])
            self._carry_out()

    # The record.

    def event(self, event: events.RecordEvent) -> messages.Event:
        """Write an event to the record and send it to all clients, or later to an owner."""
        message = super().event(event)
        if self.options.spread is not None:
            self.options.spread.hear(event)
        if self.on_event is not None:
            self.on_event(event)
        self._keep_for_owner(message)
        for part in self.parts.values():
            part.hear(event)
        return message

    def _keep_for_owner(self, message: messages.Event | messages.Output) -> None:
        """Keep a message for an owner that has yet to call: forked workers may be quicker."""
        if self._outlet is None:
            if not self._owner_came:
                self._unheard.append(message)
        elif not any(client.outlet is not None for client in self._watchers):
            self._outlet.send(message)

    def notice(self, text: str) -> None:
        """Record a sentence about the whole run."""
        credentials = self.options.credentials
        node = credentials.node if credentials is not None else self.plan.node_name(0)
        self.event(events.NoticeEvent(node=node, text=text))

    # The one loop.

    async def conduct(self) -> Result:
        """Conduct the run to its end and return its result."""
        first = self.options.first_attempt
        self.event(events.RunStartedEvent(run_id=self.plan.run_id, first_attempt=first))
        for sentence in self._lacking:
            self.notice(f"a part of the head of another package, {sentence}")
        await self.run()
        return await self._say_goodbye()

    @property
    def is_over(self) -> bool:
        """Return whether the run has its result."""
        return self.policy.result is not None

    def patience_s(self) -> float:
        """Return in how many seconds the policy has something to do."""
        now = self.clock()
        return self.policy.due(now) - now

    def advance(self) -> None:
        """Do what is due."""
        now = self.clock()
        for part in self.parts.values():
            part.advance(now)
        self.policy.advance(now)
        self._carry_out()

    def _carry_out(self) -> None:
        """Carry out the policy's actions, also those that are added meanwhile."""
        actions = deque(self.policy.take_actions())
        while actions:
            self._do(actions.popleft())
            actions.extend(self.policy.take_actions())

    def _do(self, action: node_policy.TrainingAction) -> None:
        match action:
            case node_policy.Record(event=event):
                self.event(event)
            case node_policy.Send(channel=channel, message=message):
                channel.send_nowait(message)
            case node_policy.AskForNodes(places=places, again=again):
                if self.options.spread is not None:
                    self.options.spread.need(places)
                need = messages.NeedNodes(places=tuple(places), again=again)
                for client in self._watchers:
                    if client.owner:
                        client.channel.send_nowait(need)
            case node_policy.OpenStore(attempt=attempt, address=address):
                self._claim(attempt.number)
                port = self._open_store(attempt.number, address)
                self.policy.store_is_open(attempt, address, port)
            case node_policy.CutOff(member=member, channel=channel, why=why):
                channel.abort()
                for part in self.parts.values():
                    part.lose(member, why)

    def _claim(self, attempt: int) -> None:
        """Claim the attempt's term before any agent gets an order: another head may have taken over."""
        credentials = self.options.credentials
        if credentials is None:
            return
        starts = (m.started_at for m in self.policy.members.members if m.is_present)
        members = tuple(sorted({start for start in starts if start is not None}))
        membership.claim_attempt(credentials, attempt, members, self.policy.book.spent, self.notice)

    # From agents.

    def take_call(self, hello: messages.Message, channel: Channel) -> membership.Member | None:
        """Admit an agent, or refuse it with a reason."""
        if not isinstance(hello, messages.Hello):
            return None
        member = self.policy.called(self.clock(), hello, channel, torchmuster.__version__)
        self._carry_out()
        return member

    def take_word(self, agent: membership.Member, message: messages.Message) -> None:
        """Handle an agent's message: show output; offer the rest to all parts, and then to the policy."""
        match message:
            case messages.Output():
                self.show(message)
                self._keep_for_owner(message)
            case messages.Notice(text=text):
                self._logs_lost += message.logs_lost_lines
                if text:
                    lost, name = message.logs_lost_lines or None, self.policy.members.name(agent)
                    self.event(events.NoticeEvent(node=name, text=text, logs_lost_lines=lost))
            case _:
                taken = [part.take_word(agent, message) for part in self.parts.values()]
                if any(taken):
                    return
                self.policy.said(self.clock(), agent, message)
                self._carry_out()

    def take_loss(self, agent: membership.Member, channel: Channel, why: str) -> None:
        """Handle the end of an agent's connection: the agent may have gone to another head."""
        credentials = self.options.credentials
        if credentials is not None and membership.is_deposed(credentials):
            raise membership.deposed(credentials)
        self.policy.gone(self.clock(), agent, channel, why)
        self._carry_out()

    # From clients.

    def client_gone(self, client: HeadClient) -> None:
        """Handle the end of a client's connection."""
        super().client_gone(client)
        if client.outlet is not None and client.outlet.channel is client.channel:
            client.outlet.attach(None)
        for part in self.parts.values():
            part.client_gone(client)
        self._carry_out()

    def take_request(self, client: HeadClient, message: messages.Message) -> None:
        """Handle a client's request."""
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
            case messages.JobEnds(ends_at=ends_at):
                self.event(events.TimeLimitEvent(ends_at=ends_at))
            case _:
                for part in self.parts.values():
                    part.take_request(client, message)
        self._carry_out()

    def _watch(self, client: HeadClient, *, owner: bool) -> None:
        self.watch(client, owner=owner)
        if not owner:
            return
        if self._outlet is not None:
            for one in self._watchers:  # an earlier connection may not have ended yet
                one.outlet = self._outlet if one is client else None
            self._outlet.attach(client.channel)
        self._owner_came = True
        while self._unheard:  # from before an owner listened
            client.channel.send_nowait(self._unheard.popleft())
        places = self.policy.asked_for
        if places:
            client.channel.send_nowait(messages.NeedNodes(places=places))

    def rank_nodes(self, attempt: Attempt) -> dict[int, str]:
        """Return the node name of each rank of an attempt."""
        name = self.policy.members.name
        return attempt.rank_nodes({place: name(m) for place, m in attempt.members.items()})

    def send_to_nodes(self, message: messages.Message) -> set[int]:
        """Send a message to all agents of the attempt; return their places."""
        attempt = self.policy.attempt
        members = attempt.present if attempt is not None else []
        for member in members:
            self.policy.send(member, message)
        return {member.place for member in members if member.place is not None}

    def append_file(self, path: str, text: str) -> None:
        """Append text to a file of the run directory, in the writer thread."""
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
        self.event(events.RunEndedEvent(result=result))
        self.policy.dismiss_all()
        self._carry_out()
        began = time.monotonic()
        while (limit_s := self._stays_s()) and await self.take_next(
            began + limit_s - time.monotonic()
        ):
            pass
        if self._outlet is not None:
            await self.wait_for_reader(self._outlet)
        return result

    @property
    def may_have_unsent_messages(self) -> bool:
        """Return whether the run is over but its owner may have messages to read."""
        return self.is_over and self._outlet is not None

    def _stays_s(self) -> float:
        """Return how long to serve after the run's end: for nodes, or an owner that comes late."""
        if self.options.has_owner and not self._owner_came:
            return OWNER_S
        is_expected = self.policy.members.present() or self.policy.more_may_come
        return _GOODBYE_S if is_expected else 0.0


class HeadPart:
    """A part of the head of a training run; the base class does nothing.

    Rooms and other packages plug theirs in as `head_parts` (docs/plugging-in.md); a head makes its
    parts when it is made. A part writes files by `head.disk` only. An error in a part ends the head.
    """

    def __init__(self, head: TrainingHead) -> None:
        self.head = head

    async def serve(self) -> None:
        """Work while the head conducts its run; cancelled at its end."""

    def hear(self, event: events.RecordEvent) -> None:
        """Handle an event that was just handed to the writer."""

    def take_word(self, member: membership.Member, message: messages.Message) -> bool:
        """Handle an agent's message; return whether it was for this part."""
        del member, message
        return False

    def take_request(self, client: HeadClient, message: messages.Message) -> bool:
        """Handle a client's request; return whether it was for this part."""
        del client, message
        return False

    def client_gone(self, client: HeadClient) -> None:
        """Handle the end of a client's connection."""

    def lose(self, member: membership.Member, why: str) -> None:
        """Handle the loss of a node."""

    def advance(self, now: float) -> None:
        """Do what is due; called after messages, and at least once a second while workers run."""
