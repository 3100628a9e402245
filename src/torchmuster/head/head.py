"""What every head is: one task that owns all state, takes everything from one inbox, and records what happens.

Connections only fill the inbox, so its order is the order of events (`docs/design.md`, rule 3). `TrainingHead` and
`GroupHead` say what follows, by their policies.
"""

import asyncio
import heapq
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from torchmuster import proc
from torchmuster.files.disk import DiskWriter
from torchmuster.model.event import event_line, utc_now
from torchmuster.model.liveness.lease import SILENT_S, OwnClock
from torchmuster.net import messages
from torchmuster.net.channel import Channel, ChannelClosedError
from torchmuster.net.handshake import Role

SAY_EVERY_S = 5.0
_MAX_UNSENT_OUTPUT_BYTES = 1 << 20


class HeadAgent(Protocol):
    """An agent as its head sees it: `heard_at` is the time of its last word."""

    heard_at: float


AgentT = TypeVar("AgentT", bound=HeadAgent)


@dataclass(slots=True)
class HeadClient:
    """Who watches or commands, over its own connection; `left_out` lines were not sent to it."""

    channel: Channel
    owner: bool = False
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Called(Generic[AgentT]):
    """An agent calls; `joined` gets what became of it."""

    hello: messages.Message
    channel: Channel
    joined: "asyncio.Future[AgentT | None]"


@dataclass(frozen=True, slots=True)
class Said(Generic[AgentT]):
    """An agent says something."""

    agent: AgentT
    message: messages.Message


@dataclass(frozen=True, slots=True)
class Gone(Generic[AgentT]):
    """The connection of an agent has ended."""

    agent: AgentT
    channel: Channel
    why: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A client asks for something; None is the end of its connection."""

    client: HeadClient
    message: messages.Message | None


class Timers:
    """What has to be done later, by the clock that never stops."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def later(self, after_s: float, action: Callable[[], None]) -> None:
        """Do something after so many seconds; at once when there are none."""
        if after_s <= 0:
            action()
        else:
            entry = (time.monotonic() + after_s, next(self._numbers), action)
            heapq.heappush(self._waiting, entry)

    def next_s(self, most_s: float) -> float:
        """Return for how long nothing is due, at most."""
        due = self._waiting[0][0] - time.monotonic() if self._waiting else most_s
        return max(0.0, min(due, most_s))

    def run(self, now: float) -> None:
        """Do what is due."""
        while self._waiting and self._waiting[0][0] <= now:
            heapq.heappop(self._waiting)[2]()


class Head(ABC, Generic[AgentT]):
    """The skeleton of a head.

    Args:
        disk: Writes the record.
        record: Its path.
    """

    def __init__(self, disk: DiskWriter, record: str) -> None:
        self.disk = disk
        self.clock = OwnClock()  # a pause of the whole machine ends no lease, and no limit
        self.inbox: asyncio.Queue[Called[AgentT] | Said[AgentT] | Gone[AgentT] | Asked] = (
            asyncio.Queue()
        )
        self.own_ids = (proc.boot_id(), proc.network_id())
        self._record = record
        self._clients: list[HeadClient] = []  # who watches

    # What differs.

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Say whether nothing more has to be decided."""

    @abstractmethod
    def patience_s(self) -> float:
        """Return when something is due even if no message comes."""

    @abstractmethod
    def advance(self) -> None:
        """Do what is due."""

    @abstractmethod
    def take_call(self, hello: messages.Message, channel: Channel) -> AgentT | None:
        """Take an agent in, or tell it why not."""

    @abstractmethod
    def take_word(self, agent: AgentT, message: messages.Message) -> None:
        """Take what an agent says."""

    @abstractmethod
    def take_loss(self, agent: AgentT, channel: Channel, why: str) -> None:
        """Take the end of an agent's connection."""

    @abstractmethod
    def take_request(self, client: HeadClient, message: messages.Message) -> None:
        """Take what a client asks for."""

    def client_gone(self, client: HeadClient) -> None:
        """Take the end of a client's connection."""
        self._clients = [one for one in self._clients if one is not client]

    # Connections.

    async def serve(self, channel: Channel) -> None:
        """Serve one authenticated connection until it ends."""
        if channel.role is Role.AGENT:
            await self._serve_agent(channel)
        elif channel.role is Role.CLIENT and not channel.is_open:
            await self._serve_client(channel)  # clients run commands: the public key is not enough

    async def _serve_agent(self, channel: Channel) -> None:
        try:
            async with asyncio.timeout(SILENT_S):
                hello = await channel.receive()
        except (ChannelClosedError, TimeoutError):
            return
        joined: asyncio.Future[AgentT | None] = asyncio.get_running_loop().create_future()
        self.inbox.put_nowait(Called(hello, channel, joined))
        agent = await joined
        if agent is None:
            await channel.close()
            return
        why = "its connection ended"
        try:
            while True:
                message = await channel.receive()
                agent.heard_at = self.clock()
                if isinstance(message, messages.Ping):
                    channel.send_nowait(messages.Pong(number=message.number))
                else:
                    self.inbox.put_nowait(Said(agent, message))
        except ChannelClosedError as error:
            why = f"its agent has gone ({error})"
        finally:
            self.inbox.put_nowait(Gone(agent, channel, why))

    async def _serve_client(self, channel: Channel) -> None:
        client = HeadClient(channel)
        try:
            while True:
                message = await channel.receive()
                if isinstance(message, messages.Ping):
                    channel.send_nowait(messages.Pong(number=message.number))
                else:
                    self.inbox.put_nowait(Asked(client, message))
        except ChannelClosedError:
            pass
        finally:
            self.inbox.put_nowait(Asked(client, None))

    # The one loop.

    async def run(self) -> None:
        """Take what comes and do what is due, until it is over."""
        while not self.is_over:
            await self.take_next(self.patience_s())
            while not self.inbox.empty():
                self._take(self.inbox.get_nowait())
            self.advance()

    async def take_next(self, within_s: float) -> bool:
        """Take the next thing that comes within this time; say whether there was one."""
        try:
            async with asyncio.timeout(max(within_s, 0.0)):
                event = await self.inbox.get()
        except TimeoutError:
            return False
        self._take(event)
        return True

    def _take(self, event: Called[AgentT] | Said[AgentT] | Gone[AgentT] | Asked) -> None:
        match event:
            case Called(hello=hello, channel=channel, joined=joined):
                joined.set_result(self.take_call(hello, channel))
            case Said(agent=agent, message=message):
                self.take_word(agent, message)
            case Gone(agent=agent, channel=channel, why=why):
                self.take_loss(agent, channel, why)
            case Asked(client=client, message=None):
                self.client_gone(client)
            case Asked(client=client, message=message) if message is not None:
                self.take_request(client, message)

    # What goes out.

    def event(self, name: str, **fields: Any) -> messages.Event:
        """Write one event to the record and to everyone who watches."""
        now = utc_now()
        self.disk.append(self._record, event_line(now, name, fields).encode())
        message = messages.Event(name=name, time=now, fields=fields)
        for client in self._clients:
            client.channel.send_nowait(message)
        return message

    def watch(self, client: HeadClient, *, owner: bool) -> None:
        """Let a client hear what happens from now on."""
        client.owner = owner
        if client not in self._clients:
            self._clients.append(client)

    def show(self, output: messages.Output | messages.TaskOutput) -> None:
        """Pass output on to the clients that take it; for a slow one lines are counted instead."""
        for client in self._clients:
            if client.channel.unsent_bytes > _MAX_UNSENT_OUTPUT_BYTES:
                client.left_out += output.dropped_lines + (output.text.count("\n") or 1)
                continue
            left_out, client.left_out = client.left_out + output.dropped_lines, 0
            client.channel.send_nowait(replace(output, dropped_lines=left_out))
