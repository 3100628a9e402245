"""The connection of an agent to its head, and the lease that comes with it.

The answer to a ping extends the lease, counted from the moment the ping was sent. So the lease ends
if the link is cut in either direction (`docs/design.md`, rule 13).
"""

import asyncio
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

from torchmuster.core import proc
from torchmuster.core.files.claims import Claims
from torchmuster.core.model.lease import (
    LEASE_S,
    PING_EVERY_S,
    Lease,
    OwnClock,
    is_given_up,
    large_packets_lost,
)
from torchmuster.core.model.text import span
from torchmuster.core.net import messages
from torchmuster.core.net.address import split_endpoint
from torchmuster.core.net.channel import (
    Channel,
    ChannelClosedError,
    HandshakeError,
    RaceError,
    Reason,
    Role,
    connect,
    race,
    worst_failure,
)
from torchmuster.core.node.options import HeadPlace
from torchmuster.errors import HeadLostError, JoinTimeoutError, MusterError

SAY_EVERY_S = 5.0
_RETRY_S = 0.1
_HEAD_GONE_S = 2.0
_HEAD_RETURNS_S = 20.0  # if the run's owner may start another one in its place
_MOST_FILE_BYTES = 64 << 10
_LOOK_EVERY_S = 2.0
_SECRET_FILE = "`--rdzv_conf secret_file=FILE`"


class AgentRefusedError(MusterError):
    """The head refuses this agent."""

    exit_code = 8


class HeadLink:
    """One agent's connection to its head, which may be lost and made again.

    Args:
        place: Where the head is.
        say: Shows a sentence to the user at this node.

    Attributes:
        channel: The connection; None while there is none.
    """

    def __init__(self, place: HeadPlace, say: Callable[[str], None]) -> None:
        self.clock = OwnClock()
        self.lease = Lease(self.clock)
        self.channel: Channel | None = None
        self._place, self._say = place, say
        self._addresses = place.addresses
        self._known: tuple[str, int] | None = None  # the address that has answered
        self._moved_to = place.addresses
        self._claims = Claims(place.heirs) if place.heirs is not None else None
        self._term = -1  # the term of the head that is called, if announced
        self._gone_since: float | None = None
        self._race: asyncio.Future[tuple[Channel, tuple[str, int]]] | None = None
        # The run's owner may replace a lost head; an empty list in the file says that it won't.
        self._comes_back = place.file is not None
        self._look_at = 0.0
        self._head: tuple[int, tuple[str, str]] | None = None  # its process, kernel and network
        self._called_at = self.clock()
        # Of the connection that was silent.
        self._stuck_bytes, self._stuck_at = 0, 0.0

    # Calling.

    async def call(self) -> Channel:
        """Return a connection to the head; call repeatedly until it answers.

        Raises:
            AgentRefusedError: The head has another key or another version.
            HeadLostError: The head had welcomed this agent, and nothing listens there any more.
            JoinTimeoutError: The head can't be reached within the limit.
        """
        started = time.monotonic()
        self._gone_since = None
        say_at = started + SAY_EVERY_S - 1.0
        while True:
            calls = race(self._addresses, self._connect, decisive=self._known)
            self._race = race_on = asyncio.ensure_future(calls)
            try:
                channel, self._known = await race_on
            except asyncio.CancelledError:
                if self._race is race_on:
                    raise
                continue  # `turn_to`: there are better addresses
            except RaceError as lost:
                (host, port), error = worst_failure(lost, self._known)
            else:
                # From now on, try the address that answered first.
                rest = (one for one in self._addresses if one != self._known)
                self._addresses = (self._known, *rest)
                self._gone_since = None
                return channel
            if isinstance(error, HandshakeError):
                _judge_handshake(error, host, port)
            self.look_for_successor()
            now, problem = time.monotonic(), _describe_failure(error)
            refused = isinstance(error, ConnectionRefusedError)
            self._gone_since = (self._gone_since or now) if refused else None
            self._judge_wait(f"{host}:{port}", problem, now - started, self.gone_s)
            if now >= say_at:
                left_s = self._place.join_timeout_s - (now - started)
                self._say(
                    f"waiting for the head at {host}:{port} ({problem}); {span(left_s, whole=True)} left"
                )
                say_at = now + SAY_EVERY_S
            await asyncio.sleep(_RETRY_S if now - started < 5 else 4 * _RETRY_S)

    def look_for_successor(self) -> None:
        """Switch to the head that replaces a lost one, if the run's owner has announced it.

        An agent that was not welcomed yet calls both: its head may already be lost, or the
        announcement may be old.
        """
        is_new, is_connected = self._head is None, self.channel is not None
        if self._place.file is None or (is_new and is_connected):
            return
        if (is_new or is_connected) and self.clock() < self._look_at:
            return  # the file may be on a network file system, and there is no hurry
        self._look_at = self.clock() + _LOOK_EVERY_S
        try:
            with open(self._place.file) as file:
                found_addresses = json.loads(file.read(_MOST_FILE_BYTES))
        except (OSError, ValueError):
            found_addresses = None  # no successor is announced
        self._comes_back = found_addresses != []
        if self._claims is not None and found_addresses != []:
            found_addresses = self._addresses_by_term(self._claims)
        try:
            addresses = tuple(split_endpoint(word) for word in found_addresses or ())
        except (ValueError, TypeError, AttributeError, MusterError):
            return
        if addresses and addresses != self._moved_to:
            first = self._place.addresses if is_new else ()
            self.turn_to((*first, *addresses), addresses)

    def _addresses_by_term(self, claims: Claims) -> Any:
        """Return where the head of the newest term is; None if that term is not newer than ours."""
        try:
            found = claims.announced(fresh=self.channel is None)
        except OSError:
            return None
        if found is None or found[0] <= self._term:
            return None
        self._term, announced = found
        return announced

    @property
    def gone_s(self) -> float:
        """Return for how long the head's machine has refused calls: nothing listens there."""
        return time.monotonic() - self._gone_since if self._gone_since is not None else 0.0

    def turn_to(
        self,
        addresses: tuple[tuple[str, int], ...],
        announced: tuple[tuple[str, int], ...],
        term: int = -1,
    ) -> None:
        """Drop any call or connection and call the head at these addresses.

        `announced` is where other agents find that head, from this term on.
        """
        self._addresses, self._known, self._moved_to = addresses, None, announced
        self._term, self._gone_since = max(self._term, term), None
        self._stuck_bytes = 0  # they were for another machine
        if self.channel is not None:
            self.channel.abort()
        calls, self._race = self._race, None
        if calls is not None:
            calls.cancel()

    async def _connect(self, host: str, port: int) -> Channel:
        """Call the head with our key, else with the public one if that is allowed."""
        secrets = (self._place.secret, self._place.open_secret)
        channel = await connect_by_either(host, port, Role.AGENT, secrets)
        if channel.is_open:
            self._say(
                "this node has no common key with the head: the channel is not authenticated;"
                f" {_SECRET_FILE} names one"
            )
        return channel

    def _judge_wait(self, where: str, problem: str, waited_s: float, gone_s: float) -> None:
        returns_s = self._place.join_timeout_s if self._place.heirs is not None else _HEAD_RETURNS_S
        limit_s = returns_s if self._comes_back else _HEAD_GONE_S
        if self._head is not None and gone_s > limit_s:
            raise HeadLostError(
                "the head of this run has ended, so this node's workers were ended too",
                where=where,
                why=f"{problem} for {gone_s:.0f} s",
            )
        if waited_s > self._place.join_timeout_s:
            raise JoinTimeoutError(
                f"the head at {where} could not be reached within {self._place.join_timeout_s:.0f} s",
                why=problem,
                fix="start the same command on the head, or check the endpoint's address",
            )

    # Talking.

    async def converse(
        self,
        channel: Channel,
        hello: messages.Message,
        take: Callable[[messages.Message], Awaitable[bool]],
    ) -> str | None:
        """Greet the head and handle its messages.

        Args:
            channel: The connection, still unused.
            hello: The first message.
            take: Handles a message; returns whether to continue.

        Returns:
            Why the connection has ended; None if `take` has ended the conversation.
        """
        self.channel, self._called_at = channel, self.clock()
        channel.send_nowait(hello)
        pings = asyncio.create_task(self._ping(channel))
        try:
            while True:
                message = await channel.receive()
                if isinstance(message, messages.Pong):
                    self.lease.renew(message.number)
                elif not await take(message):
                    return None
        except ChannelClosedError as error:
            self._drop(channel)
            return str(error)
        except BaseException:
            self._drop(channel)
            raise
        finally:
            pings.cancel()

    def _drop(self, channel: Channel) -> None:
        self.channel = None
        channel.abort()

    async def _ping(self, channel: Channel) -> None:
        while True:
            channel.send_nowait(messages.Ping(number=self.lease.ping()))
            await asyncio.sleep(PING_EVERY_S)

    def send(self, message: messages.Message) -> None:
        """Send a message, if connected."""
        if self.channel is not None:
            self.channel.send_nowait(message)

    def welcome(self, welcome: messages.AnyWelcome) -> str | None:
        """Record which process is the head; return a problem of the path there, if one is known.

        The end of the last connection may have shown it.
        """
        self._head = welcome.head_pid, (welcome.boot_id, welcome.network_id)
        stuck = large_packets_lost(self._stuck_bytes, self.clock() - self._stuck_at)
        self._stuck_bytes = 0
        return stuck

    # The lease.

    def silent_s(self) -> float | None:
        """Return for how long the head has been silent if that ends the lease, else None.

        Call this once a second.
        """
        age_s = self.lease.age_s()
        state = None
        if self._head is not None and age_s > LEASE_S:
            state = proc.process_state_here(*self._head)
        return age_s if is_given_up(age_s, LEASE_S, state) else None

    def end_silent(self) -> None:
        """Close a connection that is older than a lease, when the lease has ended.

        A stalled head closes nothing, and calling it again has a time limit.
        """
        if self.channel is not None and self.clock() - self._called_at > LEASE_S:
            self._stuck_bytes, self._stuck_at = self.channel.unacknowledged_bytes, self.clock()
            self.channel.abort()


async def connect_by_either(
    host: str, port: int, role: Role, secrets: tuple[bytes, bytes | None]
) -> Channel:
    """Call with our key, else with the public one if that is allowed."""
    secret, public = secrets
    try:
        return await connect(host, port, role, secret)
    except HandshakeError as error:
        if error.reason is not Reason.WRONG_SECRET or public is None:
            raise
        return await connect(host, port, role, public, is_open=True)


def _judge_handshake(error: HandshakeError, host: str, port: int) -> None:
    if error.reason in (Reason.WRONG_SECRET, Reason.OTHER_VERSION):
        raise AgentRefusedError(
            f"the head at {host}:{port} refused this agent",
            why=str(error),
            fix=f"give all nodes the same `--rdzv-id` and the same key: {_SECRET_FILE}"
            if error.reason is Reason.WRONG_SECRET
            else "install the same version of torchmuster on all nodes",
        )


def _describe_failure(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, socket.gaierror):  # its error numbers are not those of `strerror`
        return "its name is not known here"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error)
