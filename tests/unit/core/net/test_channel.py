"""Frames on a connection, the handshake before them, and the race of addresses."""

import asyncio
import contextlib
import os
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchmuster.core.net import channel as net_channel
from torchmuster.core.net import messages
from unit.core.net.loopback import (
    PUBLIC,
    SECRET,
    answering,
    channel_and_wire,
    frames_of,
    listening,
    raw_connection,
)

PINGS = [messages.Ping(number=number) for number in range(4)]
NOT_AUTHENTIC = "a frame failed its authentication"


async def receive_all(channel, number):
    return [await channel.receive() for _ in range(number)]


async def test_messages_arrive_whole_and_in_order():
    async with channel_and_wire() as (channel, wire, frames):
        wire.sendall(b"".join(frames(*PINGS)))

        assert await receive_all(channel, len(PINGS)) == PINGS


async def test_a_frame_may_arrive_byte_by_byte():
    async with channel_and_wire() as (channel, wire, frames):
        receiving = asyncio.create_task(channel.receive())
        for byte in frames(PINGS[0])[0]:
            wire.sendall(bytes([byte]))
            await asyncio.sleep(0)

        assert await receiving == PINGS[0]


async def test_a_large_message_is_carried():
    text = "ü" * (1 << 16)
    output = messages.Output(rank=0, attempt=0, stream=1, text=text)

    async with listening() as (listener, doorman):
        agent = await net_channel.connect(
            "127.0.0.1", listener.port, net_channel.Role.AGENT, SECRET
        )
        agent.send_nowait(output)

        assert await (await doorman.channels.get()).receive() == output
        await agent.close()


FRAME = frames_of(b"k" * 32, [messages.Notice(text="all is well")])[0]


@given(st.integers(0, len(FRAME) * 8 - 1))
def test_any_flipped_bit_closes_the_channel_before_anything_is_parsed(bit):
    async def check():
        async with channel_and_wire() as (channel, wire, frames):
            frame = bytearray(frames(messages.Notice(text="all is well"))[0])
            frame[bit // 8] ^= 1 << bit % 8
            wire.sendall(frame)
            wire.shutdown(1)

            with pytest.raises(net_channel.ChannelClosedError) as caught:
                await channel.receive()

            in_length = bit < 32
            # The parser's own complaint is another one: "no message of ours".
            assert in_length or str(caught.value) == NOT_AUTHENTIC

    asyncio.run(check())


async def test_what_is_authentic_but_no_message_is_refused_by_the_parser():
    async with channel_and_wire() as (channel, wire, frames):
        bad = messages.Notice(text="x", level=3)
        wire.sendall(frames(bad)[0])

        with pytest.raises(net_channel.ChannelClosedError, match="level: expected str, got int"):
            await channel.receive()


@pytest.mark.parametrize(
    "order", [[1], [0, 0], [1, 0], [0, 2]], ids=["lost first", "replayed", "swapped", "skipped"]
)
async def test_frames_out_of_their_order_are_refused(order):
    async with channel_and_wire() as (channel, wire, frames):
        made = frames(*PINGS)
        wire.sendall(b"".join(made[i] for i in order))

        with pytest.raises(net_channel.ChannelClosedError, match=NOT_AUTHENTIC):
            await receive_all(channel, len(order))


async def test_a_frame_of_another_conversation_is_refused():
    async with channel_and_wire() as (channel, wire, _):
        wire.sendall(FRAME)

        with pytest.raises(net_channel.ChannelClosedError, match=NOT_AUTHENTIC):
            await channel.receive()


async def test_our_own_frame_can_t_be_sent_back_to_us():
    async with channel_and_wire() as (channel, wire, _):
        channel.send_nowait(PINGS[0])
        wire.setblocking(False)
        sent = await asyncio.get_running_loop().sock_recv(wire, 4096)
        wire.sendall(sent)

        with pytest.raises(net_channel.ChannelClosedError, match=NOT_AUTHENTIC):
            await channel.receive()


@pytest.mark.parametrize("length", [net_channel.MAX_FRAME_BYTES + 1, 1 << 30, (1 << 32) - 1])
async def test_a_header_of_a_giant_frame_closes_the_connection_without_memory(length):
    async with channel_and_wire() as (channel, wire, _):
        wire.sendall(length.to_bytes(4, "big") + b"x" * 4096)
        tracemalloc.start()
        try:
            with pytest.raises(
                net_channel.ChannelClosedError, match=f"a frame claims {length} bytes"
            ):
                await channel.receive()
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert peak_bytes < 1 << 20


async def test_a_frame_that_is_too_large_is_never_sent():
    async with channel_and_wire() as (channel, wire, frames):
        with pytest.raises(ValueError, match="Notice has"):
            channel.send_nowait(messages.Notice(text="x" * net_channel.MAX_FRAME_BYTES))

        wire.sendall(frames(PINGS[0])[0])
        assert await channel.receive() == PINGS[0]  # and the channel goes on


async def test_a_connection_cut_in_a_frame_has_ended():
    async with channel_and_wire() as (channel, wire, frames):
        wire.sendall(frames(PINGS[0])[0][:-1])
        wire.shutdown(1)

        with pytest.raises(
            net_channel.ChannelClosedError, match="the other side closed the connection"
        ):
            await channel.receive()


async def test_a_peer_that_takes_nothing_loses_the_connection():
    notice = messages.Notice(text="x" * (1 << 19))

    async with channel_and_wire() as (channel, _, _):
        for _ in range(2 * net_channel.MAX_UNSENT_BYTES // (1 << 19)):
            channel.send_nowait(notice)

        assert channel.unsent_bytes == 0
        with pytest.raises(net_channel.ChannelClosedError):
            await channel.receive()


async def test_what_was_queued_is_sent_before_the_channel_closes():
    async with listening() as (listener, doorman):
        agent = await net_channel.connect(
            "127.0.0.1", listener.port, net_channel.Role.AGENT, SECRET
        )
        agent.send_nowait(PINGS[0])
        await agent.close()
        coordinator = await doorman.channels.get()

        assert await coordinator.receive() == PINGS[0]
        with pytest.raises(net_channel.ChannelClosedError):
            await coordinator.receive()


# The handshake.


HELLO_BYTES = 44
PING = messages.Ping(number=7)


def hello(*, version=net_channel.VERSION, role=net_channel.Role.AGENT, key=0):
    return b"MUSTERCH" + version.to_bytes(2, "big") + bytes([role, key]) + os.urandom(32)


@pytest.mark.parametrize("role", [net_channel.Role.AGENT, net_channel.Role.CLIENT])
async def test_the_right_secret_opens_a_channel_both_ways_whose_role_is_the_caller_s(role):
    async with listening() as (listener, doorman):
        agent = await net_channel.connect("127.0.0.1", listener.port, role, SECRET)
        coordinator = await doorman.channels.get()
        agent.send_nowait(PING)
        coordinator.send_nowait(messages.Pong(number=7))

        assert await coordinator.receive() == PING
        assert await agent.receive() == messages.Pong(number=7)
        assert coordinator.role is role
        assert not coordinator.is_open
        await agent.close()


@pytest.mark.parametrize(
    ("secrets", "key", "is_open"),
    [
        ((SECRET, None), b"x" * 32, False),
        ((SECRET, None), PUBLIC, True),
        ((SECRET, PUBLIC), PUBLIC, False),
    ],
    ids=["another secret", "the public key where it is not allowed", "it in place of the secret"],
)
async def test_a_caller_with_another_key_is_refused(secrets, key, is_open):
    async with listening(secrets) as (listener, doorman):
        with pytest.raises(net_channel.HandshakeError) as caught:
            await net_channel.connect(
                "127.0.0.1", listener.port, net_channel.Role.AGENT, key, is_open=is_open
            )

        assert caught.value.reason is net_channel.Reason.WRONG_SECRET
        assert await doorman.refused.get() is net_channel.Reason.WRONG_SECRET
        assert doorman.channels.empty()


@pytest.mark.parametrize("sends_back", [False, True], ids=["zeros", "the server's own"])
async def test_a_caller_whose_proof_is_none_is_turned_away_with_the_reason(sends_back):
    async with listening() as (listener, doorman), raw_connection(listener.port) as (r, w):
        w.write(hello())
        answer = await r.readexactly(HELLO_BYTES + 32)
        w.write(answer[HELLO_BYTES:] if sends_back else bytes(32))

        assert (await r.readexactly(33))[0] == net_channel.Reason.WRONG_SECRET
        assert await r.read() == b""
        assert await doorman.refused.get() is net_channel.Reason.WRONG_SECRET
        assert doorman.channels.empty()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (hello(role=0) + bytes(32), net_channel.Reason.WRONG_SECRET),
        (hello(role=0, version=9) + bytes(32), net_channel.Reason.OTHER_VERSION),
        (b"HTTP/1.1 400 Bad Request\r\n" + bytes(100), net_channel.Reason.NOT_MUSTER),
    ],
    ids=["that can't prove the secret", "of another version", "that is not muster"],
)
async def test_a_server_is_not_believed(answer, reason):
    async def impostor(reader, writer):
        await reader.readexactly(HELLO_BYTES)
        writer.write(answer)
        await reader.read()

    async with answering(impostor) as port:
        with pytest.raises(net_channel.HandshakeError) as caught:
            await net_channel.connect("127.0.0.1", port, net_channel.Role.AGENT, SECRET)

    assert caught.value.reason is reason


async def test_a_caller_of_another_version_is_told_so():
    async with listening() as (listener, doorman), raw_connection(listener.port) as (r, w):
        w.write(hello(version=net_channel.VERSION + 1))
        answer = await r.readexactly(HELLO_BYTES + 32)

        assert answer[10] == net_channel.Reason.OTHER_VERSION
        assert await r.read() == b""
        assert await doorman.refused.get() is net_channel.Reason.OTHER_VERSION


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"x" * 8])
async def test_what_is_not_muster_gets_not_a_byte(said):
    async with listening() as (listener, doorman), raw_connection(listener.port) as (r, w):
        w.write(said)

        with contextlib.suppress(ConnectionResetError):  # when bytes were left unread
            assert await r.read() == b""
        assert await doorman.refused.get() is net_channel.Reason.NOT_MUSTER


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
            await net_channel.shake_as_caller(reader, tape, net_channel.Role.AGENT, SECRET)
            await doorman.channels.get()
        async with raw_connection(listener.port) as (reader, writer):
            writer.write(tape.said)
            await reader.readexactly(HELLO_BYTES + 32)

            assert (await reader.readexactly(33))[0] == net_channel.Reason.WRONG_SECRET
            assert await doorman.refused.get() is net_channel.Reason.WRONG_SECRET
            assert doorman.channels.empty()


async def test_two_conversations_have_different_keys():
    async with listening() as (listener, _):
        sessions = []
        for _ in range(2):
            async with raw_connection(listener.port) as (reader, writer):
                sessions.append(
                    await net_channel.shake_as_caller(
                        reader, writer, net_channel.Role.AGENT, SECRET
                    )
                )

    keys = {key for s in sessions for key in (s.send_key, s.receive_key)}
    assert len(keys) == 4


async def test_a_channel_of_the_public_key_is_marked_as_open_on_both_sides():
    async with listening((SECRET, PUBLIC)) as (listener, doorman):
        agent = await net_channel.connect(
            "127.0.0.1", listener.port, net_channel.Role.AGENT, PUBLIC, is_open=True
        )

        assert agent.is_open
        assert (await doorman.channels.get()).is_open
        await agent.close()


@pytest.mark.parametrize("role", [0, max(net_channel.Role) + 1, 255])
async def test_an_unknown_role_is_refused_even_with_the_secret(role):
    async with listening() as (listener, doorman), raw_connection(listener.port) as (r, w):
        with pytest.raises(net_channel.HandshakeError):
            await net_channel.shake_as_caller(r, w, role, SECRET)

        assert doorman.channels.empty()


class _Mouth:
    """A writer that forgets."""

    def write(self, data):
        pass


BYTES = st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: b"MUSTERCH" + tail)


def refused(data, shake, *words):
    """Shake hands with somebody who says this and no more; it must fail."""

    async def check():
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        with pytest.raises(net_channel.HandshakeError):
            await shake(reader, _Mouth(), *words)

    asyncio.run(check())


@given(BYTES)
@example(hello())
@example(hello(role=9))
@example(hello(key=1) + bytes(32))
@example(hello(key=255) + bytes(32))
@example(hello(version=0) + bytes(32))
def test_no_bytes_make_the_called_side_fail_in_another_way(data):
    refused(data, net_channel.shake_as_called, (SECRET, PUBLIC))


@given(BYTES)
@example(hello(role=0) + bytes(65))
def test_no_bytes_make_the_calling_side_fail_in_another_way(data):
    refused(data, net_channel.shake_as_caller, net_channel.Role.AGENT, SECRET)


async def test_a_connection_that_the_network_loses_has_closed():
    reader = asyncio.StreamReader()
    reader.set_exception(OSError(113, "No route to host"))
    with pytest.raises(net_channel.HandshakeError) as caught:
        await net_channel.shake_as_called(reader, _Mouth(), (SECRET, None))

    assert caught.value.reason is net_channel.Reason.CLOSED


# The race of addresses.


GOOD, BAD, SILENT, STRANGER = ("good", 1), ("bad", 1), ("silent", 1), ("stranger", 1)
SOON_S = 0.01


class FakeChannel(net_channel.Channel):
    """A channel that has only a name."""

    def __init__(self, name):
        self.name = name

    def abort(self):
        """Nothing is open."""


class Calls:
    """Answers calls by the address's name; notes which were given up."""

    def __init__(self):
        self.given_up = []
        self.made = []

    async def __call__(self, host, port):
        self.made.append(host)
        if host.startswith("good"):
            return FakeChannel(host)
        if host == "refused":
            raise ConnectionRefusedError(111, "Connection refused")
        if host == "stranger":
            raise net_channel.HandshakeError(net_channel.Reason.WRONG_SECRET)
        if host == "bad":
            raise OSError(113, "No route to host")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up.append(host)
            raise


async def test_an_address_that_never_answers_costs_nothing():
    calls = Calls()

    channel, address = await net_channel.race([SILENT, GOOD], calls, stagger_s=SOON_S)

    assert (channel.name, address) == ("good", GOOD)
    assert calls.given_up == ["silent"]


@pytest.mark.parametrize(
    ("first", "stagger_s"),
    [([BAD], 3600.0), ([STRANGER, SILENT], SOON_S)],
    ids=["at once when all so far have failed", "in spite of a stranger on one address"],
)
async def test_the_next_is_called(first, stagger_s):
    channel, _ = await net_channel.race([*first, GOOD], Calls(), stagger_s=stagger_s)

    assert channel.name == "good"


async def test_a_winner_ends_the_calls():
    calls = Calls()

    await net_channel.race([GOOD, ("good2", 1)], calls, stagger_s=3600.0)

    assert calls.made == ["good"]


async def test_all_failures_are_told_and_the_one_that_says_most_is_found():
    with pytest.raises(net_channel.RaceError) as lost:
        await net_channel.race([BAD, STRANGER], Calls(), stagger_s=SOON_S)

    assert [address for address, _ in lost.value.failures] == [BAD, STRANGER]
    address, error = net_channel.worst_failure(lost.value, None)
    assert address == STRANGER
    assert error.reason is net_channel.Reason.WRONG_SECRET
    assert net_channel.worst_failure(lost.value, BAD)[0] == BAD


async def test_when_the_address_that_answered_before_refuses_nobody_else_is_waited_for():
    known = ("refused", 1)
    calls = Calls()

    with pytest.raises(net_channel.RaceError) as lost:
        await net_channel.race([known, SILENT], calls, stagger_s=SOON_S, decisive=known)

    assert isinstance(net_channel.worst_failure(lost.value, known)[1], ConnectionRefusedError)
