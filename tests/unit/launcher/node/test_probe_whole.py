"""Calls of the matrix: what passes, and a connection through which large packets don't come."""

import asyncio

import pytest

from kit.waiting import wait_until_async
from torchmuster.launcher.net import part_messages
from torchmuster.launcher.node import probe
from torchmuster.launcher.node.probe import NetworkProbe

SECRET = bytes(32)
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
