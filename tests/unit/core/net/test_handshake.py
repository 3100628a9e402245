import asyncio
import contextlib
import os

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchmuster.core.net import channel, messages
from torchmuster.core.net.channel import HandshakeError, Reason, Role, connect
from unit.core.net.loopback import PUBLIC, SECRET, answering, listening, raw_connection

HELLO_BYTES = 44
PING = messages.Ping(number=7)


def hello(*, version=channel.VERSION, role=Role.AGENT, key=0):
    return b"MUSTERCH" + version.to_bytes(2, "big") + bytes([role, key]) + os.urandom(32)


async def test_the_right_secret_opens_a_channel_both_ways():
    async with listening() as (listener, doorman):
        agent = await connect("127.0.0.1", listener.port, Role.AGENT, SECRET)
        coordinator = await doorman.channels.get()
        agent.send_nowait(PING)
        coordinator.send_nowait(messages.Pong(number=7))

        assert await coordinator.receive() == PING
        assert await agent.receive() == messages.Pong(number=7)
        assert coordinator.role is Role.AGENT
        assert not coordinator.is_open
        await agent.close()


async def test_the_caller_s_role_is_known_to_the_called_side():
    async with listening() as (listener, doorman):
        client = await connect("127.0.0.1", listener.port, Role.CLIENT, SECRET)

        assert (await doorman.channels.get()).role is Role.CLIENT
        await client.close()


async def test_another_secret_is_refused():
    async with listening() as (listener, doorman):
        with pytest.raises(HandshakeError) as caught:
            await connect("127.0.0.1", listener.port, Role.AGENT, b"x" * 32)

        assert caught.value.reason is Reason.WRONG_SECRET
        assert doorman.channels.empty()


async def test_a_caller_who_can_t_prove_the_secret_is_turned_away_with_the_reason():
    async with listening() as (listener, doorman), raw_connection(listener.port) as (r, w):
        w.write(hello())
        await r.readexactly(HELLO_BYTES + 32)
        w.write(bytes(32))

        assert (await r.readexactly(33))[0] == Reason.WRONG_SECRET
        assert await r.read() == b""
        assert await doorman.refused.get() is Reason.WRONG_SECRET


@pytest.mark.parametrize(
    ("version", "reason"),
    [(channel.VERSION, Reason.WRONG_SECRET), (9, Reason.OTHER_VERSION)],
    ids=["that can't prove the secret", "of another version"],
)
async def test_a_server_is_not_believed(version, reason):
    async def impostor(reader, writer):
        await reader.readexactly(HELLO_BYTES)
        writer.write(hello(version=version, role=0) + bytes(32))
        await reader.read()

    async with answering(impostor) as port:
        with pytest.raises(HandshakeError) as caught:
            await connect("127.0.0.1", port, Role.AGENT, SECRET)

    assert caught.value.reason is reason


async def test_a_caller_of_another_version_is_told_so():
    async with listening() as (listener, doorman), raw_connection(listener.port) as (r, w):
        w.write(hello(version=channel.VERSION + 1))
        answer = await r.readexactly(HELLO_BYTES + 32)

        assert answer[10] == Reason.OTHER_VERSION
        assert await r.read() == b""
        assert await doorman.refused.get() is Reason.OTHER_VERSION


async def test_what_is_not_muster_gets_not_a_byte():
    async with listening() as (listener, doorman), raw_connection(listener.port) as (r, w):
        w.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")

        with contextlib.suppress(ConnectionResetError):  # when bytes were left unread
            assert await r.read() == b""
        assert await doorman.refused.get() is Reason.NOT_MUSTER


async def test_a_server_that_is_not_muster_is_known_as_such():
    async def web(reader, writer):
        await reader.readexactly(HELLO_BYTES)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n" + bytes(100))
        await reader.read()

    async with answering(web) as port:
        with pytest.raises(HandshakeError) as caught:
            await connect("127.0.0.1", port, Role.AGENT, SECRET)

    assert caught.value.reason is Reason.NOT_MUSTER


class _Recorder:
    """A writer that keeps what it passes on."""

    def __init__(self, writer):
        self.writer = writer
        self.said = b""

    def write(self, data):
        self.said += data
        self.writer.write(data)


async def test_a_recorded_conversation_can_t_be_played_again():
    async with listening() as (listener, doorman):
        async with raw_connection(listener.port) as (reader, writer):
            tape = _Recorder(writer)
            await channel.shake_as_caller(reader, tape, Role.AGENT, SECRET)
            await doorman.channels.get()
        async with raw_connection(listener.port) as (reader, writer):
            writer.write(tape.said)
            await reader.readexactly(HELLO_BYTES + 32)

            assert (await reader.readexactly(33))[0] == Reason.WRONG_SECRET
            assert await doorman.refused.get() is Reason.WRONG_SECRET
            assert doorman.channels.empty()


async def test_a_server_s_own_proof_can_t_be_sent_back_to_it():
    async with listening() as (listener, doorman), raw_connection(listener.port) as (r, w):
        w.write(hello())
        answer = await r.readexactly(HELLO_BYTES + 32)
        w.write(answer[HELLO_BYTES:])

        assert (await r.readexactly(33))[0] == Reason.WRONG_SECRET
        assert doorman.channels.empty()


async def test_two_conversations_have_different_keys():
    async with listening() as (listener, _):
        sessions = []
        for _ in range(2):
            async with raw_connection(listener.port) as (reader, writer):
                sessions.append(await channel.shake_as_caller(reader, writer, Role.AGENT, SECRET))

    keys = {key for s in sessions for key in (s.send_key, s.receive_key)}
    assert len(keys) == 4


async def test_the_public_key_is_refused_unless_it_is_allowed():
    async with listening((SECRET, None)) as (listener, doorman):
        with pytest.raises(HandshakeError) as caught:
            await connect("127.0.0.1", listener.port, Role.AGENT, PUBLIC, is_open=True)

        assert caught.value.reason is Reason.WRONG_SECRET
        assert await doorman.refused.get() is Reason.WRONG_SECRET


async def test_a_channel_of_the_public_key_is_marked_as_open_on_both_sides():
    async with listening((SECRET, PUBLIC)) as (listener, doorman):
        agent = await connect("127.0.0.1", listener.port, Role.AGENT, PUBLIC, is_open=True)

        assert agent.is_open
        assert (await doorman.channels.get()).is_open
        await agent.close()


async def test_the_public_key_does_not_pass_for_the_secret():
    async with listening((SECRET, PUBLIC)) as (listener, _):
        with pytest.raises(HandshakeError):
            await connect("127.0.0.1", listener.port, Role.AGENT, PUBLIC)


@pytest.mark.parametrize("role", [0, max(channel.Role) + 1, 255])
async def test_an_unknown_role_is_refused_even_with_the_secret(role):
    async with listening() as (listener, doorman), raw_connection(listener.port) as (r, w):
        with pytest.raises(HandshakeError):
            await channel.shake_as_caller(r, w, role, SECRET)

        assert doorman.channels.empty()


class _Mouth:
    """A writer that forgets."""

    def write(self, data):
        pass


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: b"MUSTERCH" + tail))
@example(hello())
@example(hello(role=9))
@example(hello(key=1) + bytes(32))
@example(hello(key=255) + bytes(32))
@example(hello(version=0) + bytes(32))
def test_no_bytes_make_the_called_side_fail_in_another_way(data):
    async def check():
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        with pytest.raises(HandshakeError):
            await channel.shake_as_called(reader, _Mouth(), (SECRET, PUBLIC))

    asyncio.run(check())


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: b"MUSTERCH" + tail))
@example(hello(role=0) + bytes(65))
def test_no_bytes_make_the_calling_side_fail_in_another_way(data):
    async def check():
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        with pytest.raises(HandshakeError):
            await channel.shake_as_caller(reader, _Mouth(), Role.AGENT, SECRET)

    asyncio.run(check())


async def test_a_connection_that_the_network_loses_has_closed():
    reader = asyncio.StreamReader()
    reader.set_exception(OSError(113, "No route to host"))
    with pytest.raises(HandshakeError) as caught:
        await channel.shake_as_called(reader, _Mouth(), (SECRET, None))

    assert caught.value.reason is Reason.CLOSED
