import asyncio
import contextlib
import datetime as dt
import socket
import struct
import threading
from collections import deque

import pytest

from kit.waiting import wait_until_async
from kit.work import rss_bytes
from torchmuster.core.net import channel
from torchmuster.core.net import listener as listening_side
from torchmuster.core.net.address import bind
from torchmuster.core.net.channel import Role, connect
from unit.core.net.loopback import SECRET, Doorman, listening, raw_connection

GARBAGE = [b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", b"MUSTERCH" + b"\xff" * 200, b"MUSTER"]


@pytest.fixture
def patient(monkeypatch):
    """Let strangers keep their seats longer than any test takes: who gets in did not wait for their time to be up."""
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(channel, "CONNECT_TIMEOUT_S", 3600.0)


def throw_garbage(port, number):
    """Open connections one after the other; half of them end with a reset."""
    for i in range(number):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            if i % 2:
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            with contextlib.suppress(OSError):
                connection.sendall(GARBAGE[i % len(GARBAGE)])


async def watch_strangers(listener, seen):
    while True:
        seen.append(listener.num_strangers)
        await asyncio.sleep(0)


async def call_honestly(listener):
    agent = await connect("127.0.0.1", listener.port, Role.AGENT, SECRET)
    await agent.close()


@pytest.mark.usefixtures("patient")
async def test_an_honest_agent_gets_through_a_flood_of_garbage_in_bounded_memory():
    async with listening() as (listener, doorman):
        seen = []
        watching = asyncio.create_task(watch_strangers(listener, seen))
        before = rss_bytes()
        floods = [
            threading.Thread(target=throw_garbage, args=(listener.port, 5000)) for _ in range(2)
        ]
        for flood in floods:
            flood.start()
        num_calls = 0
        while any(flood.is_alive() for flood in floods):
            await call_honestly(listener)
            num_calls += 1
        grown = rss_bytes() - before
        watching.cancel()

        assert num_calls, "the flood was over before anyone called"
        assert max(seen) <= listening_side.MAX_SILENT + 256 + listening_side.MAX_STRANGERS
        assert grown < 32 << 20
        assert doorman.channels.qsize() == num_calls


@pytest.mark.usefixtures("patient")
async def test_a_hundred_half_open_connections_do_not_hold_the_door():
    async with listening() as (listener, doorman):
        with contextlib.ExitStack() as half_open:
            for i in range(100):
                connection = socket.create_connection(("127.0.0.1", listener.port))
                half_open.enter_context(connection)
                connection.sendall(b"MUSTERCH"[: i % 9])
            seen = []
            watching = asyncio.create_task(watch_strangers(listener, seen))

            await call_honestly(listener)
            assert max(seen) >= 100
            assert doorman.channels.qsize() == 1
            watching.cancel()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("flood_from", ["127.0.0.2", "127.0.0.1"])
async def test_a_flood_of_silent_connections_keeps_no_honest_agent_out(flood_from):
    async with listening() as (listener, doorman):
        over = threading.Event()
        counts = []
        flood = threading.Thread(
            target=call_and_say_nothing, args=(listener.port, flood_from, over, counts)
        )
        flood.start()
        try:
            await wait_until_async(
                lambda: counts and counts[-1] >= 2 * listening_side.MAX_SILENT,
                "all seats to be taken",
            )
            for _ in range(5):
                await call_honestly(listener)
        finally:
            over.set()
            flood.join()
        assert doorman.channels.qsize() == 5


def call_and_say_nothing(port, address, over, counts):
    """Open a thousand silent connections a second, or as many as the machine can."""
    held = deque()
    try:
        while not over.wait(0.001):
            held.append(socket.create_connection(("127.0.0.1", port), source_address=(address, 0)))
            counts.append(len(counts) + 1)
            if len(held) > 400:  # descriptors of this process
                held.popleft().close()
    finally:
        for connection in held:
            connection.close()


async def test_a_stranger_who_says_nothing_is_dropped_by_himself(monkeypatch):
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 0.05)

    async with listening() as (listener, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()


async def test_authenticated_connections_take_no_stranger_s_seat():
    async with listening() as (listener, doorman):
        agents = [
            await connect("127.0.0.1", listener.port, Role.AGENT, SECRET)
            for _ in range(listening_side.MAX_STRANGERS + 6)
        ]
        for _ in agents:
            await doorman.channels.get()

        assert listener.num_strangers == 0
        for agent in agents:
            agent.abort()


@pytest.mark.usefixtures("patient")
async def test_a_crowd_of_honest_agents_is_served_to_the_last(monkeypatch):
    monkeypatch.setattr(listening_side, "_FAIR_TIME_S", 3600.0)  # nobody is cut off for being slow

    async with listening() as (listener, doorman):
        calls = [
            connect("127.0.0.1", listener.port, Role.AGENT, SECRET)
            for _ in range(2 * listening_side.MAX_STRANGERS)
        ]
        agents = await asyncio.gather(*calls)

        for _ in agents:
            await doorman.channels.get()
        assert doorman.refused.empty()
        for agent in agents:
            agent.abort()


async def test_the_end_of_the_listener_closes_every_connection():
    async with listening() as (listener, doorman):
        agent = await connect("127.0.0.1", listener.port, Role.AGENT, SECRET)
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        await doorman.channels.get()
        port = listener.port

    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    agent.abort()
    with pytest.raises(ConnectionRefusedError):
        await connect("127.0.0.1", port, Role.AGENT, SECRET)


def test_a_port_that_is_taken_can_t_be_bound():
    with bind("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", first.getsockname()[1])


def test_an_address_of_another_machine_can_t_be_bound():
    with pytest.raises(OSError, match="assign"):
        bind("192.0.2.1", 0)


# Who leaves first and who is served next, by address.


def seats(*callers):
    found = listening_side.Seats()
    for now, (caller, address) in enumerate(callers):
        found.take(caller, address, float(now))
    return found


def test_the_oldest_caller_of_the_greediest_address_leaves_first():
    found = seats(("honest", "n2"), ("a", "flood"), ("b", "flood"))
    assert found.oldest_of_the_crowd() == ("a", 1.0)


def test_the_address_with_the_fewest_callers_is_served_first():
    found = seats(("a", "flood"), ("b", "flood"), ("honest", "n2"))
    assert found.next_in_turn() == "honest"


def test_callers_of_one_address_are_served_in_order():
    found = seats(("a", "n1"), ("b", "n1"), ("c", "n1"))
    order = []
    while len(found):
        order.append(found.next_in_turn())
        found.leave(order[-1])
    assert order == ["a", "b", "c"]


def test_who_leaves_says_from_where_he_called_and_leaves_once():
    found = seats(("a", "n1"))
    assert found.leave("a") == "n1"
    assert found.leave("a") is None
    assert len(found) == 0


# Callers of torch's store.


@contextlib.asynccontextmanager
async def store():
    """Answer each byte that comes behind a store's call with the next one; yield the address."""

    async def serve(reader, writer):
        if await reader.readexactly(len(listening_side.STORE_CALL)) == listening_side.STORE_CALL:
            while got := await reader.read(1):
                writer.write(bytes([got[0] + 1]))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[:2]


@contextlib.asynccontextmanager
async def head(where, said=None, most=None):
    """Serve as the head; yield its port."""
    said = [] if said is None else said
    doorman = Doorman()
    relay = listening_side.StoreRelay(where, said.append, most)
    listener = listening_side.Listener(
        bind("127.0.0.1", 0), (SECRET, None), doorman.serve, doorman.refuse, relay
    )
    serving = asyncio.create_task(listener.serve())
    try:
        yield listener.port
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_a_caller_of_torchs_store_is_passed_on_to_it_and_its_end_too():
    async with (
        store() as address,
        head(lambda: address) as port,
        raw_connection(port) as (reader, writer),
    ):
        writer.write(listening_side.STORE_CALL + b"a")
        assert await reader.readexactly(1) == b"b"
        writer.write(b"c")
        assert await reader.readexactly(1) == b"d"
        writer.write_eof()
        assert await reader.read() == b""


async def test_agents_get_through_beside_it():
    async with store() as address, head(lambda: address) as port:
        agent = await connect("127.0.0.1", port, Role.AGENT, SECRET)
        await agent.close()


@pytest.mark.parametrize("has_gone", [False, True], ids=["no attempt runs", "the store has gone"])
async def test_a_caller_is_sent_away_while_there_is_no_store(has_gone):
    async with store() as address:
        pass
    async with (
        head(lambda: address if has_gone else None) as port,
        raw_connection(port) as (reader, writer),
    ):
        writer.write(listening_side.STORE_CALL)
        assert await reader.read() == b""


async def test_the_number_of_callers_is_bounded_and_the_first_too_many_is_said_once():
    said = []
    async with (
        store() as address,
        head(lambda: address, said, most=1) as port,
        raw_connection(port) as (reader, writer),
    ):
        writer.write(listening_side.STORE_CALL + b"a")
        assert await reader.readexactly(1) == b"b"
        for _ in range(2):
            async with raw_connection(port) as (second, words):
                words.write(listening_side.STORE_CALL)
                assert await second.read() == b""
    assert len(said) == 1
    assert "more than 1 connections" in said[0]


def test_torchs_own_client_says_these_bytes_first():
    """The magic number is torch's and may change: this is what the installed one says."""
    torch = pytest.importorskip("torch", reason="it is torch's client")
    listening = socket.create_server(("127.0.0.1", 0))
    said = []

    def hear():
        connection, _ = listening.accept()
        with connection:
            said.append(connection.recv(len(listening_side.STORE_CALL), socket.MSG_WAITALL))
        listening.close()

    thread = threading.Thread(target=hear)
    thread.start()
    port, limit = listening.getsockname()[1], dt.timedelta(seconds=1)
    with pytest.raises(RuntimeError):
        torch.distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    thread.join()
    assert said == [listening_side.STORE_CALL]
