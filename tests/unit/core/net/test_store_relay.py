import asyncio
import contextlib

from torchmuster.core.net.address import bind
from torchmuster.core.net.channel import Role, connect
from torchmuster.core.net.listener import STORE_CALL, Listener, StoreRelay
from unit.core.net.loopback import SECRET, Doorman, raw_connection


@contextlib.asynccontextmanager
async def store():
    """Answer each byte that comes behind a store's call with the next one; yield the address."""

    async def serve(reader, writer):
        if await reader.readexactly(len(STORE_CALL)) == STORE_CALL:
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
    relay = StoreRelay(where, said.append, most)
    listener = Listener(bind("127.0.0.1", 0), (SECRET, None), doorman.serve, doorman.refuse, relay)
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
        writer.write(STORE_CALL + b"a")
        assert await reader.readexactly(1) == b"b"
        writer.write(b"c")
        assert await reader.readexactly(1) == b"d"
        writer.write_eof()
        assert await reader.read() == b""


async def test_agents_get_through_beside_it():
    async with store() as address, head(lambda: address) as port:
        agent = await connect("127.0.0.1", port, Role.AGENT, SECRET)
        await agent.close()


async def test_a_caller_is_sent_away_while_no_attempt_runs():
    async with head(lambda: None) as port, raw_connection(port) as (reader, writer):
        writer.write(STORE_CALL)
        assert await reader.read() == b""


async def test_a_store_that_has_gone_ends_the_call():
    async with store() as address:
        pass
    async with head(lambda: address) as port, raw_connection(port) as (reader, writer):
        writer.write(STORE_CALL)
        assert await reader.read() == b""


async def test_the_number_of_callers_is_bounded_and_the_first_too_many_is_said_once():
    said = []
    async with (
        store() as address,
        head(lambda: address, said, most=1) as port,
        raw_connection(port) as (reader, writer),
    ):
        writer.write(STORE_CALL + b"a")
        assert await reader.readexactly(1) == b"b"
        for _ in range(2):
            async with raw_connection(port) as (second, words):
                words.write(STORE_CALL)
                assert await second.read() == b""
    assert len(said) == 1
    assert "more than 1 connections" in said[0]


def test_torchs_own_client_says_these_bytes_first():
    """The magic number is torch's and may change: this is what the installed one says."""
    import datetime as dt
    import socket
    import threading

    import pytest

    torch = pytest.importorskip("torch", reason="it is torch's client")
    listening = socket.create_server(("127.0.0.1", 0))
    said = []

    def hear():
        connection, _ = listening.accept()
        with connection:
            said.append(connection.recv(len(STORE_CALL), socket.MSG_WAITALL))
        listening.close()

    thread = threading.Thread(target=hear)
    thread.start()
    with pytest.raises(RuntimeError):
        torch.distributed.TCPStore(
            "127.0.0.1",
            listening.getsockname()[1],
            is_master=False,
            timeout=dt.timedelta(seconds=1),
        )
    thread.join()
    assert said == [STORE_CALL]
