import asyncio
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.net import messages
from torchmuster.core.net.channel import (
    MAX_FRAME_BYTES,
    MAX_UNSENT_BYTES,
    ChannelClosedError,
    Role,
    connect,
)
from unit.core.net.loopback import SECRET, channel_and_wire, frames_of, listening

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
        agent = await connect("127.0.0.1", listener.port, Role.AGENT, SECRET)
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

            with pytest.raises(ChannelClosedError) as caught:
                await channel.receive()

            in_length = bit < 32
            # The parser's own complaint is another one: "no message of ours".
            assert in_length or str(caught.value) == NOT_AUTHENTIC

    asyncio.run(check())


async def test_what_is_authentic_but_no_message_is_refused_by_the_parser():
    async with channel_and_wire() as (channel, wire, frames):
        bad = messages.Notice(text="x", level=3)
        wire.sendall(frames(bad)[0])

        with pytest.raises(ChannelClosedError, match="level: expected str, got int"):
            await channel.receive()


@pytest.mark.parametrize(
    "order", [[1], [0, 0], [1, 0], [0, 2]], ids=["lost first", "replayed", "swapped", "skipped"]
)
async def test_frames_out_of_their_order_are_refused(order):
    async with channel_and_wire() as (channel, wire, frames):
        made = frames(*PINGS)
        wire.sendall(b"".join(made[i] for i in order))

        with pytest.raises(ChannelClosedError, match=NOT_AUTHENTIC):
            await receive_all(channel, len(order))


async def test_a_frame_of_another_conversation_is_refused():
    async with channel_and_wire() as (channel, wire, _):
        wire.sendall(FRAME)

        with pytest.raises(ChannelClosedError, match=NOT_AUTHENTIC):
            await channel.receive()


async def test_our_own_frame_can_t_be_sent_back_to_us():
    async with channel_and_wire() as (channel, wire, _):
        channel.send_nowait(PINGS[0])
        wire.setblocking(False)
        sent = await asyncio.get_running_loop().sock_recv(wire, 4096)
        wire.sendall(sent)

        with pytest.raises(ChannelClosedError, match=NOT_AUTHENTIC):
            await channel.receive()


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 1 << 30, (1 << 32) - 1])
async def test_a_header_of_a_giant_frame_closes_the_connection_without_memory(length):
    async with channel_and_wire() as (channel, wire, _):
        wire.sendall(length.to_bytes(4, "big") + b"x" * 4096)
        tracemalloc.start()
        try:
            with pytest.raises(ChannelClosedError, match=f"a frame claims {length} bytes"):
                await channel.receive()
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert peak_bytes < 1 << 20


async def test_a_frame_that_is_too_large_is_never_sent():
    async with channel_and_wire() as (channel, wire, frames):
        with pytest.raises(ValueError, match="Notice has"):
            channel.send_nowait(messages.Notice(text="x" * MAX_FRAME_BYTES))

        wire.sendall(frames(PINGS[0])[0])
        assert await channel.receive() == PINGS[0]  # and the channel goes on


async def test_a_connection_cut_in_a_frame_has_ended():
    async with channel_and_wire() as (channel, wire, frames):
        wire.sendall(frames(PINGS[0])[0][:-1])
        wire.shutdown(1)

        with pytest.raises(ChannelClosedError, match="the other side closed the connection"):
            await channel.receive()


async def test_a_peer_that_takes_nothing_loses_the_connection():
    notice = messages.Notice(text="x" * (1 << 19))

    async with channel_and_wire() as (channel, wire, _):
        for _ in range(2 * MAX_UNSENT_BYTES // (1 << 19)):
            channel.send_nowait(notice)

        assert channel.unsent_bytes == 0
        with pytest.raises(ChannelClosedError):
            await channel.receive()
        wire.setblocking(False)


async def test_what_was_queued_is_sent_before_the_channel_closes():
    async with listening() as (listener, doorman):
        agent = await connect("127.0.0.1", listener.port, Role.AGENT, SECRET)
        agent.send_nowait(PINGS[0])
        await agent.close()
        coordinator = await doorman.channels.get()

        assert await coordinator.receive() == PINGS[0]
        with pytest.raises(ChannelClosedError):
            await coordinator.receive()
