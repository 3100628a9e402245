"""A barrier that works without a workflow: rank 0 listens, the other ranks call it.

Messages are read only after the handshake has proved that the caller has the key, so a port scan or an HTTP
probe changes nothing. A rank whose connection ends is missing again and may come back; a caller with
wrong values (its rank is taken or out of range, another number of nodes) is refused without effect on others. When
all have arrived, rank 0 tells them and waits until each has confirmed it, so that no rank is left waiting.
"""

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from torchmuster.errors import BarrierError, BarrierTimeoutError, UsageError
from torchmuster.model.display.text import MAX_NAMES, name_missing, say_missing
from torchmuster.net import listener
from torchmuster.net.address import bind
from torchmuster.net.channel import Channel, ChannelClosedError, connect
from torchmuster.net.handshake import HandshakeError, Reason, Role
from torchmuster.net.messages import (
    BarrierAnswer,
    BarrierJoin,
    BarrierPassed,
    BarrierState,
    Ping,
)

DEFAULT_PORT = 12344
STATUS_S = 5.0
RETRY_S = 1.0
# Both sides speak every 5 s; who is silent for three of these has gone without a word.
_SILENCE_S = 15.0
_FIRST_WORD_S = 5.0
_FAREWELL_S = 5.0
_MAX_REFUSALS_TOLD = 32

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoneBarrier:
    """The parameters of a barrier, and this rank.

    Attributes:
        host: Where rank 0 is; rank 0 itself needs none.
        key: The common key of all ranks.
    """

    num_nodes: int
    rank: int
    key: bytes
    host: str = ""
    port: int = DEFAULT_PORT
    name: str = "default"
    timeout_s: float = 600.0


def wait_at_lone_barrier(barrier: LoneBarrier, say: Say) -> None:
    """Wait until all ranks have arrived; `say` is called with a line every 5 s.

    Raises:
        BarrierTimeoutError: The limit has passed; the message names who is missing.
        BarrierError: This rank was refused, or has another key.
        UsageError: Rank 0 can't listen on the port, or the host is no name of one.
    """
    if barrier.num_nodes == 1:
        return
    wait = _listen(barrier, say) if barrier.rank == 0 else _Guest(barrier, say).wait()
    asyncio.run(wait)


async def _listen(barrier: LoneBarrier, say: Say) -> None:
    try:
        listening = _bind(barrier.port)
    except OSError as error:
        raise UsageError(
            f"rank 0 can't listen on port {barrier.port}",
            why=error.strerror,
            fix="give all ranks another --port",
        ) from error
    host = _Host(barrier, say)
    door = listener.Listener(listening, (barrier.key, None), host.serve, host.turn_away)
    serving = asyncio.create_task(door.serve())
    try:
        await host.wait()
    finally:
        serving.cancel()
        await asyncio.wait([serving])


def _bind(port: int) -> socket.socket:
    """Listen on all addresses, of both families where the machine has both."""
    try:
        return bind("::", port)
    except OSError:
        return bind("0.0.0.0", port)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seat:
    channel: Channel
    incarnation: str


class _Host:
    """Rank 0: knows which ranks have arrived."""

    def __init__(self, barrier: LoneBarrier, say: Say) -> None:
        self._barrier = barrier
        self._say = say
        self._seats: dict[int, _Seat] = {}
        self._heard: set[int] = set()  # ranks that know that the barrier is full
        self._full = asyncio.Event()
        self._all_heard = asyncio.Event()
        self._turned_away: set[tuple[str, Reason]] = set()
        self._deadline_s = time.monotonic() + barrier.timeout_s

    async def wait(self) -> None:
        while not self._full.is_set():
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                await self._give_up()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(STATUS_S, left_s)):
                    await self._full.wait()
                    break
            self._tell_progress()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await self._all_heard.wait()
                return
        lost = sorted(set(range(1, self._barrier.num_nodes)) - self._heard)
        names = name_missing([f"rank {rank}" for rank in lost], len(lost))
        self._say(f"all ranks came, but {names} left before they could be answered")

    async def serve(self, channel: Channel) -> None:
        try:
            async with asyncio.timeout(_FIRST_WORD_S):
                join = await channel.receive()
        except (ChannelClosedError, TimeoutError):
            return
        if not isinstance(join, BarrierJoin):
            return
        problem = self._problem(join)
        if problem is not None:
            self._say(f"refused {channel.peer_address}: {problem}")
            channel.send_nowait(_answer(BarrierState.FAILED, what=problem))
            await channel.close()
        elif join.rank not in self._heard:  # who has heard comes for the next round: not yet
            await self._keep(channel, join)

    def turn_away(self, peer: str, error: HandshakeError) -> None:
        """Report callers of muster with another key or version; ignore scans and probes."""
        known = (peer, error.reason)
        worth = error.reason in (Reason.WRONG_SECRET, Reason.OTHER_VERSION)
        if worth and known not in self._turned_away and len(self._turned_away) < _MAX_REFUSALS_TOLD:
            self._turned_away.add(known)
            self._say(f"refused {peer}: {error}")

    def _problem(self, join: BarrierJoin) -> str | None:
        ours = self._barrier
        if join.name != ours.name:
            return f"it calls the barrier `{join.name[:64]}`, rank 0 waits at `{ours.name}`"
        if join.num_nodes != ours.num_nodes:
            return (
                f"rank {join.rank} waits for {join.num_nodes} nodes, rank 0 for {ours.num_nodes}:"
                " all ranks need the same --num-nodes"
            )
        if not 1 <= join.rank < ours.num_nodes:
            return f"rank {join.rank} is not among the ranks 1 to {ours.num_nodes - 1} that rank 0 waits for"
        seat = self._seats.get(join.rank)
        if seat is not None and seat.incarnation != join.incarnation:
            return f"rank {join.rank} has joined already, from {seat.channel.peer_address}"
        return None

    async def _keep(self, channel: Channel, join: BarrierJoin) -> None:
        before = self._seats.get(join.rank)
        if before is not None:  # it came back before we saw that its old connection had ended
            before.channel.abort()
        seat = _Seat(channel=channel, incarnation=join.incarnation)
        self._seats[join.rank] = seat
        self._tell_change(channel)
        try:
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    message = await channel.receive()
                if isinstance(message, BarrierPassed):
                    self._note_heard(join.rank)
                    return
        except (ChannelClosedError, TimeoutError):
            return
        finally:
            if self._seats.get(join.rank) is seat:
                del self._seats[join.rank]

    def _note_heard(self, rank: int) -> None:
        if self._full.is_set():
            self._heard.add(rank)
        if len(self._heard) == self._barrier.num_nodes - 1:
            self._all_heard.set()

    def _tell_change(self, newcomer: Channel) -> None:
        """Tell a new caller the state, or all callers that the barrier is full."""
        if not self._full.is_set() and len(self._seats) == self._barrier.num_nodes - 1:
            self._full.set()
            self._send_all(_answer(BarrierState.RELEASED))
        elif self._full.is_set():
            newcomer.send_nowait(_answer(BarrierState.RELEASED))
        else:
            newcomer.send_nowait(_answer(BarrierState.WAITING, what=self._sentence()))

    def _tell_progress(self) -> None:
        sentence = self._sentence()
        self._send_all(_answer(BarrierState.WAITING, what=sentence))
        self._say(f"{sentence}; {max(0.0, self._deadline_s - time.monotonic()):.0f} s left")

    async def _give_up(self) -> None:
        what = f"the barrier was not full within {self._barrier.timeout_s:g} s"
        error = BarrierTimeoutError(f"{what}: missing {self._missing()}", why=self._sentence())
        self._send_all(
            BarrierAnswer(
                caller_id="",
                kind=BarrierState.FAILED,
                what=f"rank 0 gave up: {error.what}",
                why=error.why,
                timed_out=True,
            )
        )
        await asyncio.gather(*[seat.channel.close() for seat in self._seats.values()])
        raise error

    def _send_all(self, answer: BarrierAnswer) -> None:
        for seat in self._seats.values():
            seat.channel.send_nowait(answer)

    def _sentence(self) -> str:
        return say_missing(len(self._seats) + 1, self._barrier.num_nodes, self._missing())

    def _missing(self) -> str:
        num_missing = self._barrier.num_nodes - 1 - len(self._seats)
        absent = (rank for rank in range(1, self._barrier.num_nodes) if rank not in self._seats)
        names = [f"rank {rank}" for rank, _ in zip(absent, range(MAX_NAMES), strict=False)]
        return name_missing(names, num_missing)


class _Guest:
    """Another rank: connects to rank 0 until it is released."""

    def __init__(self, barrier: LoneBarrier, say: Say) -> None:
        self._barrier = barrier
        self._say = say
        self._incarnation = secrets.token_hex(8)
        self._state = f"calling rank 0 at {barrier.host}:{barrier.port}"
        self._deadline_s = time.monotonic() + barrier.timeout_s

    async def wait(self) -> None:
        telling = asyncio.create_task(self._tell())
        try:
            async with asyncio.timeout(self._barrier.timeout_s):
                while not await self._try():
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            what = f"the barrier was not full within {self._barrier.timeout_s:g} s"
            raise BarrierTimeoutError(f"{what}: {self._state}") from None
        finally:
            telling.cancel()
            await asyncio.wait([telling])

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(STATUS_S)
            left_s = max(0.0, self._deadline_s - time.monotonic())
            self._say(f"{self._state}; {left_s:.0f} s left")

    async def _try(self) -> bool:
        """Connect to rank 0 once and wait with it; False when there was no connection or it was lost."""
        there = f"rank 0 at {self._barrier.host}:{self._barrier.port}"
        try:
            channel = await connect(
                self._barrier.host, self._barrier.port, Role.CLIENT, self._barrier.key
            )
        except HandshakeError as error:
            self._state = f"{there} does not answer like muster: {error}"
            if error.reason in (Reason.WRONG_SECRET, Reason.OTHER_VERSION):
                raise _refused_key(there, error) from error
            return False
        except UnicodeError as error:
            raise UsageError(f"`{self._barrier.host}` is not a valid name of a host") from error
        except OSError as error:
            reason = error.strerror or str(error) or "no answer in 5 s"
            self._state = f"{there} can't be reached, trying again: {reason}"
            return False
        try:
            return await self._converse(channel)
        except ChannelClosedError as error:
            self._state = f"{there} is lost, trying again: {error}"
            return False
        finally:
            channel.abort()

    async def _converse(self, channel: Channel) -> bool:
        ours = self._barrier
        channel.send_nowait(
            BarrierJoin(
                name=ours.name,
                rank=ours.rank,
                num_nodes=ours.num_nodes,
                incarnation=self._incarnation,
            )
        )
        pinging = asyncio.create_task(_ping(channel))
        try:
            while True:
                answer = await _next_answer(channel)
                if answer.kind is BarrierState.RELEASED:
                    channel.send_nowait(BarrierPassed())
                    await channel.close()
                    return True
                if answer.kind is BarrierState.FAILED:
                    kind = BarrierTimeoutError if answer.timed_out else BarrierError
                    raise kind(answer.what, why=answer.why, where=f"rank {ours.rank}")
                self._state = answer.what
        finally:
            pinging.cancel()
            await asyncio.wait([pinging])


async def _ping(channel: Channel) -> None:
    number = 0
    while True:
        await asyncio.sleep(STATUS_S)
        channel.send_nowait(Ping(number=number))
        number += 1


async def _next_answer(channel: Channel) -> BarrierAnswer:
    try:
        async with asyncio.timeout(_SILENCE_S):
            message = await channel.receive()
    except TimeoutError:
        raise ChannelClosedError(f"no message from it for {_SILENCE_S:.0f} s") from None
    if not isinstance(message, BarrierAnswer):
        raise ChannelClosedError(f"it sent a {type(message).__name__}")
    return message


def _answer(kind: BarrierState, *, what: str = "") -> BarrierAnswer:
    return BarrierAnswer(caller_id="", kind=kind, what=what)


def _refused_key(there: str, error: HandshakeError) -> BarrierError:
    if error.reason is Reason.OTHER_VERSION:
        return BarrierError(f"{there} can't be understood", why=str(error))
    return BarrierError(
        f"{there} and this rank have no common key",
        why=str(error),
        fix="give all ranks a copy of the same file: --secret-file FILE",
    )
