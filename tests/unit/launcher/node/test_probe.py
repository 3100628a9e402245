"""Probes between agents of one machine, on real connections."""

import asyncio
import contextlib

import pytest

from torchmuster.core.net import messages
from torchmuster.core.net.channel import ChannelClosedError, HandshakeError, Reason, Role, connect
from torchmuster.launcher.net import part_messages
from torchmuster.launcher.node import probe
from torchmuster.launcher.node.probe import MAX_BULK_BYTES, NetworkProbe
from unit.core.net.loopback import SECRET


class Node:
    """One probe, and what it reports."""

    def __init__(self, secret=SECRET):
        self.said = asyncio.Queue()
        self.probe = NetworkProbe(7, (secret, None), self.said.put_nowait)
        self.port = self.probe.open()[0]

    def begin(self, number, *targets, connect_s=5.0, **given):
        """Be told one's number, and whom to call."""
        order = {"survey": 7, "node": number, "targets": targets, "connect_s": connect_s}
        self.probe.begin(part_messages.ProbeNetwork(**order, **given))

    async def call(self, port, *, measure=False, **given):
        """Call node 1 at a port, as node 0; return the results."""
        self.begin(0, target(1, port, measure=measure), **given)
        said = await self.said.get()
        assert said.candidates == (0,)
        return said.results


@contextlib.asynccontextmanager
async def nodes(*secrets):
    made = [Node(secret) for secret in secrets]
    try:
        yield made
    finally:
        for node in made:
            node.probe.close()
        await asyncio.sleep(0)


def target(node, port, *, measure=False, candidate=0):
    return part_messages.ProbeTarget(
        candidate=candidate, node=node, address="127.0.0.1", port=port, measure=measure
    )


@pytest.mark.parametrize("bulk_bytes", [None, 1 << 20])
async def test_a_node_that_is_reached_is_measured(bulk_bytes):
    async with nodes(SECRET, SECRET) as (one, other):
        other.begin(1)
        (result,) = await one.call(other.port, measure=True, bulk_bytes=bulk_bytes)

        assert (result.why, result.stalled) == (None, False)
        assert 0 < result.latency_s < 0.5
        assert result.bytes_per_s > 1e6


async def test_a_node_that_is_reached_without_measuring_needs_no_result():
    async with nodes(SECRET, SECRET) as (one, other):
        other.begin(1)

        assert await one.call(other.port) == ()


@pytest.mark.parametrize(
    ("secret", "number", "why"),
    [
        pytest.param(b"x" * 32, 1, "the other side has another secret", id="another secret"),
        pytest.param(SECRET, 2, "another node has that address", id="another node"),
    ],
)
async def test_a_node_that_was_not_meant_is_not_reached(secret, number, why):
    async with nodes(SECRET, secret) as (one, other):
        other.begin(number)
        (result,) = await one.call(other.port)

        assert result.why == why


async def test_a_black_hole_costs_the_limit_and_delays_no_other_candidate():
    async with nodes(SECRET, SECRET) as (one, other):
        # `other` has not been told who it is yet, so it takes calls and answers none.
        one.begin(0, target(1, other.port), target(0, one.port, candidate=1), connect_s=0.3)

        assert (await one.said.get()).candidates == (1,)
        (result,) = (await one.said.get()).results
        assert result.why == "no answer within 0.3 s"


@pytest.mark.parametrize("given", [{}, {"measure": True}, {"measure": True, "bulk_bytes": 1 << 16}])
async def test_a_port_that_nobody_has_is_said_in_the_kernels_words(given):
    async with nodes(SECRET, SECRET) as (one, other):
        other.probe.close()
        await asyncio.gather(*other.probe._tasks, return_exceptions=True)
        (result,) = await one.call(other.port, **given)

        assert "refused" in result.why
        assert not result.stalled


async def test_more_bytes_than_the_limit_in_all_end_the_connection():
    async with nodes(SECRET) as (one,):
        one.begin(0)
        channel = await connect("127.0.0.1", one.port, Role.PROBE, SECRET)
        for size_bytes in (MAX_BULK_BYTES - 1, 1):
            channel.send_nowait(part_messages.ProbeBulk(size_bytes=size_bytes))
            assert await channel.receive() == messages.Pong(number=0)
            await channel.send_raw(size_bytes)
            assert await channel.receive() == messages.Pong(number=size_bytes)
        channel.send_nowait(part_messages.ProbeBulk(size_bytes=1))

        with pytest.raises(ChannelClosedError):
            await channel.receive()
        channel.abort()


async def test_a_caller_without_the_secret_is_not_answered():
    async with nodes(SECRET) as (one,):
        one.begin(0)
        with pytest.raises(HandshakeError) as refused:
            await connect("127.0.0.1", one.port, Role.PROBE, b"x" * 32)

        assert refused.value.reason is Reason.WRONG_SECRET


async def test_after_its_end_the_port_is_closed():
    async with nodes(SECRET) as (one,):
        tasks = list(one.probe._tasks)
        one.probe.close()
        await asyncio.gather(*tasks, return_exceptions=True)

        with pytest.raises(ConnectionRefusedError):
            await connect("127.0.0.1", one.port, Role.PROBE, SECRET)


async def swallow(reader, writer, port):
    """Pass small packets on and drop what follows a large one, as a black hole does."""
    there, back = await asyncio.open_connection("127.0.0.1", port)

    async def one_way(source, sink, limit):
        while data := await source.read(1 << 16):
            if len(data) > limit:
                continue
            sink.write(data)
            await sink.drain()

    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(one_way(reader, back, 1200))
            both.create_task(one_way(there, writer, 1200))
    except* OSError:
        pass
    finally:
        back.close()
        writer.close()


async def test_a_connection_that_swallows_large_packets_is_told_apart(monkeypatch):
    monkeypatch.setattr(probe, "_STALLED_AFTER_S", (0.5, 1.0))
    tasks = []

    async with nodes(SECRET, SECRET) as (one, other):
        other.begin(1)

        def connected(reader, writer):
            tasks.append(asyncio.ensure_future(swallow(reader, writer, other.port)))

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        (result,) = await one.call(port, measure=True, bulk_bytes=1 << 20)
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    assert result.stalled
    assert "64 KiB did not arrive within 1 s" in result.why
    assert result.bytes_per_s is None
