"""A node's side of the network survey: answer other nodes' probes, and probe their ports.

Every connection is authenticated with the run's secret before anything is read. The answering side
accepts at most 4 MiB and 3 s from a caller. The port is open until the head ends the survey, for 10
s at most.
"""

import asyncio
import contextlib
import os
import random
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from torchmuster.core.net import listener, messages
from torchmuster.core.net.address import bind
from torchmuster.core.net.channel import Channel, ChannelClosedError, HandshakeError, Role
from torchmuster.core.node.head_link import connect_by_either
from torchmuster.launcher.model.network import PairResult
from torchmuster.launcher.net import part_messages

MAX_BULK_BYTES = 4 << 20  # from one caller; the calling side stays within it and within 30 ms
ANSWER_FOR_S = 3.0
OPEN_FOR_S = 10.0
NUM_ECHOES = 5
_FIRST_BULK_BYTES = 64 << 10
_MAX_ROUND_BYTES = (MAX_BULK_BYTES - _FIRST_BULK_BYTES) // 2
_BULK_S = 0.012
_MEASURE_FOR_S = 0.3
_STALLED_AFTER_S = (1.2, 2.8)  # with 64 KiB in flight; for the first try, and for the second
_AT_ONCE = 32

Send = Callable[[messages.Message], None]


class NetworkProbe:
    """One node's part in one survey."""

    def __init__(self, survey: int, secrets: tuple[bytes, bytes | None], send: Send) -> None:
        self.survey = survey
        self._secrets = secrets
        self._send = send
        self._node: int | None = None
        self._known = asyncio.Event()  # set once the head has sent our number
        self._tasks: set[asyncio.Task[None]] = set()
        self._call_limit = asyncio.Semaphore(_AT_ONCE)
        self._measuring = asyncio.Lock()

    def open(self) -> tuple[int, ...]:
        """Listen on a random port for IPv4 and, where possible, one for IPv6; return the ports."""
        ports = []
        for host in ("0.0.0.0", "::"):
            try:
                listening = bind(host, 0)
            except OSError:
                continue
            server = listener.Listener(listening, self._secrets, self._answer, _ignore)
            ports.append(server.port)
            serving = self._start(server.serve())
            # A task that is cancelled before its first step does not close the socket.
            serving.add_done_callback(partial(_close, listening))
        asyncio.get_running_loop().call_later(OPEN_FOR_S, self.close)
        return tuple(ports)

    def close(self) -> None:
        """End all calls and close the ports."""
        for task in list(self._tasks):
            task.cancel()

    def begin(self, order: part_messages.ProbeNetwork) -> None:
        """Probe the targets; send each candidate's results when they are complete."""
        self._node = order.node
        self._known.set()
        self._start(self._probe(order))

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # The answering side.

    async def _answer(self, channel: Channel) -> None:
        if channel.role is not Role.PROBE:
            return
        try:
            async with asyncio.timeout(ANSWER_FOR_S):
                await self._known.wait()
                await self._answer_all(channel)
        except (ChannelClosedError, TimeoutError):
            return
        finally:
            channel.abort()

    async def _answer_all(self, channel: Channel) -> None:
        left_bytes = MAX_BULK_BYTES
        while True:
            message = await channel.receive()
            match message:
                case part_messages.ProbeCall():
                    own = part_messages.ProbeCall(survey=self.survey, node=self._node or 0)
                    channel.send_nowait(own)
                case messages.Ping(number=number):
                    channel.send_nowait(messages.Pong(number=number))
                case part_messages.ProbeBulk(size_bytes=size_bytes) if 0 < size_bytes <= left_bytes:
                    left_bytes -= size_bytes
                    dropped = channel.drop_raw(size_bytes)
                    channel.send_nowait(messages.Pong(number=0))
                    await asyncio.wait({dropped})
                    if dropped.cancelled():
                        return
                    channel.send_nowait(messages.Pong(number=size_bytes))
                case _:
                    return

    # The calling side.

    async def _probe(self, order: part_messages.ProbeNetwork) -> None:
        targets = list(order.targets)
        random.shuffle(targets)  # so that not all nodes call the same one first
        targets.sort(key=lambda target: not target.measure)
        left = Counter(target.candidate for target in targets)
        found: dict[int, list[PairResult]] = {candidate: [] for candidate in left}
        for ended in asyncio.as_completed([self._probe_one(order, target) for target in targets]):
            result = await ended
            if result.why is not None or result.latency_s is not None:
                found[result.candidate].append(result)
            left[result.candidate] -= 1
            if not left[result.candidate]:
                self._report(result.candidate, found[result.candidate])

    def _report(self, candidate: int, found: list[PairResult]) -> None:
        """Send the results of a candidate network, whose calls have all ended."""
        self._send(
            part_messages.ProbeResults(
                survey=self.survey, candidates=(candidate,), results=tuple(found)
            )
        )

    async def _probe_one(
        self, order: part_messages.ProbeNetwork, target: part_messages.ProbeTarget
    ) -> PairResult:
        result = PairResult(candidate=target.candidate, source=order.node, target=target.node)
        async with self._call_limit:
            try:
                async with asyncio.timeout(order.connect_s):
                    channel = await self._reach(target)
            except TimeoutError:
                return replace(result, why=f"no answer within {order.connect_s:g} s")
            except (HandshakeError, ChannelClosedError) as error:
                return replace(result, why=str(error))
            except OSError as error:
                why = os.strerror(error.errno) if error.errno else str(error)
                return replace(result, why=why.lower())
        try:
            if target.measure and order.bulk_bytes is not None:
                measured = await self._measure_whole(channel, result, order.bulk_bytes, 0)
                if measured.why is not None:
                    measured = await self._measure_again(target, measured, order)
                result = measured
            elif target.measure:
                # Measure one network at a time, or each would get half.
                async with self._measuring:
                    result = await _measure(channel, result, _MEASURE_FOR_S, _next_round, 2)
        finally:
            channel.abort()
        return result

    async def _reach(self, target: part_messages.ProbeTarget) -> Channel:
        """Return a channel to the very node that was meant.

        Raises:
            ChannelClosedError: Another node answered at that address.
        """
        channel = await connect_by_either(target.address, target.port, Role.PROBE, self._secrets)
        meant = part_messages.ProbeCall(survey=self.survey, node=target.node)
        answer = None
        try:
            channel.send_nowait(meant)
            answer = await channel.receive()
        finally:
            if answer != meant:
                channel.abort()
        if answer != meant:
            raise ChannelClosedError("another node has that address")
        return channel

    async def _measure_again(
        self,
        target: part_messages.ProbeTarget,
        first: PairResult,
        order: part_messages.ProbeNetwork,
    ) -> PairResult:
        """Measure over a new connection; return the first result if none can be made."""
        fresh = PairResult(candidate=first.candidate, source=first.source, target=first.target)
        try:
            async with asyncio.timeout(order.connect_s):
                channel = await self._reach(target)
        except (TimeoutError, HandshakeError, ChannelClosedError, OSError):
            return first
        try:
            return await self._measure_whole(channel, fresh, order.bulk_bytes or 0, 1)
        finally:
            channel.abort()

    async def _measure_whole(
        self, channel: Channel, result: PairResult, bulk_bytes: int, again: int
    ) -> PairResult:
        """Add latency and bandwidth; report bytes that do not arrive as a finding of their own."""
        limit_s = _STALLED_AFTER_S[again]
        left_bytes = min(bulk_bytes, MAX_BULK_BYTES) - _FIRST_BULK_BYTES
        # A second try takes no lock: a stalled connection must not hold up the others.
        async with self._measuring if not again else contextlib.nullcontext():
            result = await _measure(channel, result, limit_s, lambda _: left_bytes, 1)
        if result.bytes_per_s is not None:
            return result  # the rest may take its time on a slow link
        has_echoed = result.latency_s is not None
        size = f"{_FIRST_BULK_BYTES >> 10} KiB" if has_echoed else "one byte"
        why = f"the connection was made, then {size} did not arrive within {limit_s:g} s"
        return replace(result, stalled=has_echoed, why=why)


async def _measure(
    channel: Channel,
    result: PairResult,
    limit_s: float,
    round_bytes: Callable[[float], int],
    num_rounds: int,
) -> PairResult:
    """Add latency and bandwidth, as far as they are known when the time is up.

    `round_bytes` says how much to send in each round after the first, at the rate so far; if there
    is nothing to send, that is 0 or less.
    """
    with contextlib.suppress(ChannelClosedError, TimeoutError, OSError):
        async with asyncio.timeout(limit_s):
            round_trip_s = await _echo(channel)
            result = replace(result, latency_s=round_trip_s / 2)
            rate = await _bulk(channel, _FIRST_BULK_BYTES, round_trip_s)
            result = replace(result, bytes_per_s=rate)
            # Keep the better of several: cores busy importing torch can slow one down.
            for _ in range(num_rounds):
                size_bytes = round_bytes(rate)
                if size_bytes > 0:
                    rate = max(rate, await _bulk(channel, size_bytes, round_trip_s))
                    result = replace(result, bytes_per_s=rate)
    return result


def _next_round(rate: float) -> int:
    """Return how many bytes a good measurement takes; 0 if the first round had as many."""
    size_bytes = min(int(rate * _BULK_S), _MAX_ROUND_BYTES)
    return size_bytes if size_bytes > _FIRST_BULK_BYTES else 0


def _close(listening: socket.socket, _: "asyncio.Task[None]") -> None:
    listening.close()


def _ignore(peer: str, error: HandshakeError) -> None:
    """Ignore a failed handshake: the caller reports a node that it does not reach."""


async def _echo(channel: Channel) -> float:
    loop = asyncio.get_running_loop()
    shortest_s = float("inf")
    for number in range(1, NUM_ECHOES + 1):
        sent_at = loop.time()
        channel.send_nowait(messages.Ping(number=number))
        await channel.receive()
        shortest_s = min(shortest_s, loop.time() - sent_at)
    return shortest_s


async def _bulk(channel: Channel, size_bytes: int, round_trip_s: float) -> float:
    """Send bytes, wait until the other side has acknowledged them all; return bytes/s."""
    loop = asyncio.get_running_loop()
    channel.send_nowait(part_messages.ProbeBulk(size_bytes=size_bytes))
    await channel.receive()
    began_at = loop.time()
    await channel.send_raw(size_bytes)
    await channel.receive()
    elapsed_s = loop.time() - began_at
    return size_bytes / max(elapsed_s - round_trip_s / 2, elapsed_s / 2, 1e-6)
