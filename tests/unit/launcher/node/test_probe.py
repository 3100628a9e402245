"""Probes between agents of one machine, on real connections."""

import asyncio
import contextlib

import pytest

from kit.waiting import wait_until_async
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


@contextlib.asynccontextmanager
async def nodes(*secrets):
    made = [Node(secret) for secret in secrets]
    try:
        yield made
    finally:
        for node in made:
            node.probe.close()
        await asyncio.sleep(0)


def order(node, *targets, connect_s=2.0):
    return part_messages.ProbeNetwork(survey=7, node=node, targets=targets, connect_s=connect_s)


def target(node, port, *, measure=False, candidate=0, address="127.0.0.1"):
    return part_messages.ProbeTarget(
        candidate=candidate, node=node, address=address, port=port, measure=measure
    )


async def test_a_node_that_is_reached_is_measured():
    async with nodes(SECRET, SECRET) as (one, other):
        other.probe.begin(order(1))
        one.probe.begin(order(0, target(1, other.port, measure=True)))

        said = await one.said.get()

        assert said.candidates == (0,)
        (result,) = said.results
        assert result.why is None
        assert 0 < result.latency_s < 0.5
        assert result.bytes_per_s > 1e6


async def test_a_node_that_is_reached_without_measuring_needs_no_result():
    async with nodes(SECRET, SECRET) as (one, other):
        other.probe.begin(order(1))
        one.probe.begin(order(0, target(1, other.port)))

        assert (await one.said.get()).results == ()


async def test_a_node_with_another_secret_is_not_reached():
    async with nodes(SECRET, b"x" * 32) as (one, other):
        other.probe.begin(order(1))
        one.probe.begin(order(0, target(1, other.port)))

        (result,) = (await one.said.get()).results

        assert result.why == "the other side has another secret"


async def test_another_node_at_the_address_is_not_the_one_that_was_meant():
    async with nodes(SECRET, SECRET) as (one, other):
        other.probe.begin(order(2))
        one.probe.begin(order(0, target(1, other.port)))

        (result,) = (await one.said.get()).results

        assert result.why == "another node has that address"


async def test_a_black_hole_costs_the_limit_and_delays_no_other_candidate():
    async with nodes(SECRET, SECRET) as (one, other):
        # `other` has not been told who it is yet, so it takes calls and answers none.
        here = target(0, one.port, candidate=1)
        one.probe.begin(order(0, target(1, other.port), here, connect_s=0.3))

        assert (await one.said.get()).candidates == (1,)
        (result,) = (await one.said.get()).results
        assert result.why == "no answer within 0.3 s"


async def test_a_port_that_nobody_has_is_said_in_the_kernels_words():
    async with nodes(SECRET, SECRET) as (one, other):
        port = other.port
        other.probe.close()
        await asyncio.gather(*other.probe._tasks, return_exceptions=True)
        one.probe.begin(order(0, target(1, port)))

        (result,) = (await one.said.get()).results

        assert result.why is not None
        assert "refused" in result.why


async def test_more_bytes_than_the_limit_end_the_connection():
    async with nodes(SECRET) as (one,):
        one.probe.begin(order(0))
        channel = await connect("127.0.0.1", one.port, Role.PROBE, SECRET)
        channel.send_nowait(part_messages.ProbeBulk(size_bytes=MAX_BULK_BYTES + 1))

        with pytest.raises(ChannelClosedError):
            await channel.receive()
        channel.abort()


async def test_the_bytes_of_one_caller_are_counted_over_all_that_it_sends():
    async with nodes(SECRET) as (one,):
        one.probe.begin(order(0))
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
        one.probe.begin(order(0))
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


LIMIT_S = 90.0


async def call(port, measured):
    """Let a node call one port and return its result."""
    done = asyncio.Event()
    found = []

    def take(message):
        found.extend(message.results)
        done.set()

    caller = NetworkProbe(1, (SECRET, None), take)
    target = part_messages.ProbeTarget(
        candidate=1, node=1, address="127.0.0.1", port=port, measure=True
    )
    order = part_messages.ProbeNetwork(
        survey=1, node=0, targets=(target,), connect_s=5.0, bulk_bytes=measured
    )
    caller.begin(order)
    async with asyncio.timeout(LIMIT_S):
        await done.wait()
    caller.close()
    return found[0]


def answering():
    answerer = NetworkProbe(1, (SECRET, None), lambda message: None)
    ports = answerer.open()
    empty = part_messages.ProbeNetwork(survey=1, node=1, targets=(), connect_s=1.0)
    answerer.begin(empty)
    return answerer, ports[0]


async def test_a_good_pair_has_latency_and_bandwidth():
    answerer, port = answering()
    result = await call(port, 1 << 20)
    answerer.close()
    assert (result.why, result.stalled) == (None, False)
    assert result.latency_s > 0
    assert result.bytes_per_s > 0


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

    answerer, port = answering()
    tasks = []

    def connected(reader, writer):
        tasks.append(asyncio.ensure_future(swallow(reader, writer, port)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    result = await call(server.sockets[0].getsockname()[1], 1 << 20)
    server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    answerer.close()
    await asyncio.sleep(0)
    assert result.stalled
    assert "64 KiB did not arrive within 1 s" in result.why
    assert result.bytes_per_s is None


@pytest.mark.parametrize("measured", [None, 1 << 16])
async def test_nobody_there_is_refused(measured):
    answerer, port = answering()
    answerer.close()
    await wait_until_async(lambda: not answerer._tasks, "the end of its listeners")
    result = await call(port, measured)
    assert result.why
    assert not result.stalled
