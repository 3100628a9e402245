"""The base of every head: one task owns all state, handles one inbox, and records events.

Connections only fill the inbox, so its order is the order of events (`docs/design.md`, rule 3). The
policies of `TrainingHead` and `GroupHead` decide what follows.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from torchmuster.core import proc
from torchmuster.core.files.disk import Backlog, DiskWriter
from torchmuster.core.model.codec import event_line, utc_now
from torchmuster.core.model.events import RecordEvent, fields_of
from torchmuster.core.model.lease import SILENT_S, OwnClock
from torchmuster.core.net import messages
from torchmuster.core.net.channel import Channel, ChannelClosedError, Role

SAY_EVERY_S = 5.0
_OWNER_STALLED_S = 30.0
_LOOK_AGAIN_S = 0.1
_TURN_S = 0.1
_MAX_UNSENT_OUTPUT_BYTES = 1 << 20


class HeadAgent(Protocol):
    """An agent as its head sees it; `heard_at` is the time of its last message."""

    heard_at: float


AgentT = TypeVar("AgentT", bound=HeadAgent)


class Outlet:
    """Sends every line to an owner, in order, over successive connections. Sending never blocks.

    Args:
        backlog: Holds what has not been sent yet.
    """

    def __init__(self, backlog: Backlog) -> None:
        self.channel: Channel | None = None
        self._backlog = backlog
        self._rest = b""  # the first part of a line that was read from the backlog
        self._ready: deque[bytes] = deque()
        self._catching_up: asyncio.Task[None] | None = None

    def attach(self, channel: Channel | None) -> None:
        """Send over this connection from now on; None: keep new messages in the backlog."""
        self.channel = channel
        self._catch_up_soon()

    def send(self, message: messages.Message) -> None:
        """Send a message after all earlier ones."""
        channel, is_behind = self.channel, self._has_more or self._catching_up is not None
        if channel is None or is_behind or channel.unsent_bytes > _MAX_UNSENT_OUTPUT_BYTES:
            payload = messages.encode(message)
            self._backlog.put(b"%d %s\n" % (len(payload), payload))
            self._catch_up_soon()
        else:
            channel.send_nowait(message)

    @property
    def _has_more(self) -> bool:
        return bool(self._ready) or not self._backlog.is_empty

    def _catch_up_soon(self) -> None:
        if self.channel is not None and self._catching_up is None:
            self._catching_up = asyncio.create_task(self._catch_up())

    async def _catch_up(self) -> None:
        while (channel := self.channel) is not None and self._has_more:
            if not self._ready:
                self._unpack(await asyncio.to_thread(self._backlog.take))
            try:
                while self._ready and channel is self.channel:
                    await channel.send_bytes(self._ready[0])
                    self._ready.popleft()
            except OSError:  # the connection has ended; there may be another one
                self.channel = None if channel is self.channel else self.channel
        self._catching_up = None

    def _unpack(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            size, _, payload = line.partition(b" ")
            if size.isdigit() and int(size) == len(payload):  # else the disk got full in its middle
                self._ready.append(payload)

    @property
    def progress(self) -> tuple[int, ...]:
        """Return numbers that change while the owner reads."""
        unsent = self.channel.unsent_bytes if self.channel is not None else 0
        return self._backlog.position, len(self._ready), unsent


@dataclass(slots=True)
class HeadClient:
    """A client that watches or commands, over its own connection.

    Attributes:
        left_out: Lines that were not sent since the last output that was.
        outlet: Sends every line; set for an owner that wants all.
    """

    channel: Channel
    owner: bool = False
    left_out: int = 0
    outlet: Outlet | None = None

    def send(self, message: messages.Message) -> None:
        """Send a message, in the order of the calls."""
        if self.outlet is not None:
            self.outlet.send(message)
        else:
            self.channel.send_nowait(message)


class Head(ABC, Generic[AgentT]):
    """The base class of heads.

    Args:
        disk: Writes the record.
        record: The path of the record.

    Attributes:
        inbox: What has come over connections, each with how to handle it.
    """

    def __init__(self, disk: DiskWriter, record: str) -> None:
        self.disk = disk
        self.clock = OwnClock()  # a pause of the whole machine ends no lease and no limit
        self.inbox: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
        self.own_ids = (proc.boot_id(), proc.network_id())
        self._record = record
        self._watchers: list[HeadClient] = []

    # What subclasses define.

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Return whether nothing is left to decide."""

    @abstractmethod
    def patience_s(self) -> float:
        """Return in how many seconds something is due even if no message comes."""

    @abstractmethod
    def advance(self) -> None:
        """Decide what the time demands."""

    @abstractmethod
    def take_call(self, hello: messages.Message, channel: Channel) -> AgentT | None:
        """Admit an agent, or refuse it with a reason."""

    @abstractmethod
    def take_word(self, agent: AgentT, message: messages.Message) -> None:
        """Handle an agent's message."""

    @abstractmethod
    def take_loss(self, agent: AgentT, channel: Channel, why: str) -> None:
        """Handle the end of an agent's connection."""

    @abstractmethod
    def take_request(self, client: HeadClient, message: messages.Message) -> None:
        """Handle a client's request."""

    def client_gone(self, client: HeadClient) -> None:
        """Handle the end of a client's connection."""
        self._watchers = [one for one in self._watchers if one is not client]

    # Connections.

    async def serve(self, channel: Channel) -> None:
        """Serve one authenticated connection until it ends."""
        if channel.role is Role.AGENT:
            await self._serve_agent(channel)
        elif channel.role is Role.CLIENT and not channel.is_open:
            await self._serve_client(
                channel
            )  # a client may run commands, so it needs the run's key

    async def _serve_agent(self, channel: Channel) -> None:
        try:
            async with asyncio.timeout(SILENT_S):
                hello = await channel.receive()
        except (ChannelClosedError, TimeoutError):
            return
        joined: asyncio.Future[AgentT | None] = asyncio.get_running_loop().create_future()
        self.inbox.put_nowait(lambda: joined.set_result(self.take_call(hello, channel)))
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
                    self.inbox.put_nowait(partial(self.take_word, agent, message))
        except ChannelClosedError as error:
            why = f"its agent has gone ({error})"
        finally:
            self.inbox.put_nowait(partial(self.take_loss, agent, channel, why))

    async def _serve_client(self, channel: Channel) -> None:
        client = HeadClient(channel)
        try:
            while True:
                message = await channel.receive()
                if isinstance(message, messages.Ping):
                    channel.send_nowait(messages.Pong(number=message.number))
                else:
                    self.inbox.put_nowait(partial(self.take_request, client, message))
        except ChannelClosedError:
            pass
        finally:
            self.inbox.put_nowait(partial(self.client_gone, client))

    # The one loop.

    async def run(self) -> None:
        """Handle what comes and do what is due, until the run is over."""
        while not self.is_over:
            await self.take_next(self.patience_s())
            turn_ends_at = time.monotonic() + _TURN_S
            while not self.inbox.empty() and time.monotonic() < turn_ends_at:
                self.inbox.get_nowait()()
            self.advance()
            if not self.inbox.empty():
                await asyncio.sleep(0)  # however full the inbox is, let pings be answered

    async def take_next(self, within_s: float) -> bool:
        """Handle the next item of the inbox, if it comes in time; return whether one came."""
        try:
            async with asyncio.timeout(max(within_s, 0.0)):
                handle = await self.inbox.get()
        except TimeoutError:
            return False
        handle()
        return True

    async def wait_for_reader(self, outlet: Outlet) -> None:
        """Wait until the owner has read everything and disconnected, or has stalled for 30 s."""
        seen, seen_at = outlet.progress, time.monotonic()
        while outlet.channel is not None and time.monotonic() - seen_at < _OWNER_STALLED_S:
            if seen != outlet.progress:
                seen, seen_at = outlet.progress, time.monotonic()
            await self.take_next(_LOOK_AGAIN_S)

    # What goes out.

    def event(self, event: RecordEvent) -> messages.Event:
        """Write an event to the record and send it to all watching clients."""
        now, name, fields = utc_now(), event.name, fields_of(event)
        self.disk.append(self._record, event_line(now, name, fields).encode())
        message = messages.Event(name=name, time=now, fields=fields)
        for client in self._watchers:
            client.send(message)
        return message

    def watch(self, client: HeadClient, *, owner: bool) -> None:
        """Send a client all events from now on."""
        client.owner = owner
        if client not in self._watchers:
            self._watchers.append(client)

    def show(self, output: messages.AnyOutput) -> None:
        """Send output to the watching clients; for a slow one, only count its lines."""
        for client in self._watchers:
            unsent = client.channel.unsent_bytes
            if client.outlet is None and unsent > _MAX_UNSENT_OUTPUT_BYTES:
                client.left_out += output.dropped_lines + (output.text.count("\n") or 1)
                continue
            left_out, client.left_out = client.left_out + output.dropped_lines, 0
            client.send(replace(output, dropped_lines=left_out))
