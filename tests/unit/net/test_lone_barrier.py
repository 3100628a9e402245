import asyncio
import os
import socket

import pytest

from kit.ports import reserve_port
from kit.waiting import wait_until_async
from torchmuster.errors import BarrierError, BarrierTimeoutError, UsageError
from torchmuster.net import lone_barrier
from torchmuster.net.channel import connect
from torchmuster.net.handshake import Role
from torchmuster.net.lone_barrier import LoneBarrier, _Guest, _listen, wait_at_lone_barrier
from torchmuster.net.messages import BarrierJoin, BarrierPassed, BarrierState
from unit.net.loopback import SECRET, run

GARBAGE = [b"", b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", b"MUSTERCH" + b"\xff" * 200, b"1\n"]


class Nodes:
    """Ranks of one barrier on the loopback interface, each with what it said."""

    def __init__(self, num_nodes):
        self.port = reserve_port()
        self.num_nodes = num_nodes
        self.said = []
        self._channels = []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        for channel in self._channels:
            channel.abort()
        for _ in range(3):
            await asyncio.sleep(0)

    def place(self, rank, **changes):
        given = {"num_nodes": self.num_nodes, "key": SECRET, "timeout_s": 60.0}
        there = {"host": "127.0.0.1", "port": self.port}
        return LoneBarrier(rank=rank, **{**given, **there, **changes})

    def start(self, rank, **changes):
        place = self.place(rank, **changes)
        say = self.said.append
        wait = _listen(place, say) if rank == 0 else _Guest(place, say).wait()
        return asyncio.create_task(wait)

    async def call(self, rank, *, incarnation="x", num_nodes=None):
        """Join as a caller whose every word the test decides."""
        channel = None
        while channel is None:
            try:
                channel = await connect("127.0.0.1", self.port, Role.CLIENT, SECRET)
            except ConnectionRefusedError:
                await asyncio.sleep(lone_barrier.RETRY_S)  # as every guest does
        self._channels.append(channel)
        channel.send_nowait(
            BarrierJoin(
                name="default",
                rank=rank,
                num_nodes=num_nodes or self.num_nodes,
                incarnation=incarnation,
            )
        )
        return channel, await channel.receive()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lone_barrier, "RETRY_S", 0.02)


def test_all_ranks_leave_when_the_last_has_come_in_any_order():
    async def check():
        for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
            async with Nodes(3) as nodes:
                waits = [nodes.start(rank) for rank in order]
                await asyncio.gather(*waits)

    run(check())


def test_one_node_waits_for_nobody_and_needs_no_port():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        barrier = LoneBarrier(num_nodes=1, rank=0, key=b"", port=port)

        assert wait_at_lone_barrier(barrier, lambda line: None) is None


def test_a_port_scan_a_probe_and_another_key_disturb_nobody():
    async def check():
        async with Nodes(2) as nodes:
            first = nodes.start(0)
            await nodes.call(1, num_nodes=9)  # refused, but rank 0 listens now
            for data in GARBAGE * 4:
                with socket.create_connection(("127.0.0.1", nodes.port)) as stranger:
                    stranger.sendall(data)
                    await asyncio.sleep(0)
            with pytest.raises(BarrierError, match="have no common key"):
                await nodes.start(1, key=b"o" * 32)
            assert not first.done()
            await asyncio.gather(first, nodes.start(1))
            assert len([line for line in nodes.said if "has another secret" in line]) == 1

    run(check())


@pytest.mark.parametrize(
    ("rank", "num_nodes", "sentence"),
    [
        (3, 3, "rank 3 is not among the ranks 1 to 2 that rank 0 waits for"),
        (0, 3, "rank 0 is not among the ranks 1 to 2 that rank 0 waits for"),
        (-1, 3, "rank -1 is not among"),
        (1, 4, "rank 1 waits for 4 nodes, rank 0 for 3"),
        (2, 3, "rank 2 has joined already, from "),
    ],
)
def test_a_caller_that_can_t_be_right_is_refused_alone(rank, num_nodes, sentence):
    async def check():
        async with Nodes(3) as nodes:
            host = nodes.start(0)
            kept, answer = await nodes.call(2, incarnation="first")
            assert answer.kind is BarrierState.WAITING
            _, refusal = await nodes.call(rank, incarnation="second", num_nodes=num_nodes)
            assert refusal.kind is BarrierState.FAILED
            assert sentence in refusal.what
            assert any(sentence in line for line in nodes.said)
            other = nodes.start(1)
            assert (await kept.receive()).kind is BarrierState.RELEASED
            kept.send_nowait(BarrierPassed())
            await asyncio.gather(host, other)

    run(check())


def test_a_refused_rank_raises_what_rank_0_said():
    async def check():
        async with Nodes(3) as nodes:
            host = nodes.start(0)
            with pytest.raises(
                BarrierError, match="rank 1 waits for 2 nodes, rank 0 for 3"
            ) as caught:
                await nodes.start(1, num_nodes=2)
            assert caught.value.exit_code == 12
            await asyncio.gather(host, nodes.start(1), nodes.start(2))

    run(check())


def test_a_barrier_of_another_name_is_refused():
    async def check():
        async with Nodes(2) as nodes:
            host = nodes.start(0)
            with pytest.raises(
                BarrierError, match="calls the barrier `y`, rank 0 waits at `default`"
            ):
                await nodes.start(1, name="y")
            await asyncio.gather(host, nodes.start(1))

    run(check())


def test_a_rank_whose_connection_ended_is_missing_until_it_comes_back():
    async def check():
        async with Nodes(3) as nodes:
            host = nodes.start(0)
            lost, _ = await nodes.call(1, incarnation="killed")
            lost.abort()
            second = nodes.start(2)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await asyncio.shield(host)
            await asyncio.gather(host, second, nodes.start(1))

    run(check())


def test_a_rank_that_calls_again_before_its_old_connection_ended_takes_its_place():
    async def check():
        async with Nodes(3) as nodes:
            host = nodes.start(0)
            await nodes.call(1, incarnation="same")
            new, answer = await nodes.call(1, incarnation="same")
            assert answer.what == "2 of 3 are here, missing: rank 2"
            other = nodes.start(2)
            assert (await new.receive()).kind is BarrierState.RELEASED
            new.send_nowait(BarrierPassed())
            await asyncio.gather(host, other)

    run(check())


def test_a_rank_that_lost_its_release_gets_it_again():
    async def check():
        async with Nodes(2) as nodes:
            host = nodes.start(0)
            lost, answer = await nodes.call(1, incarnation="same")
            assert answer.kind is BarrierState.RELEASED
            lost.abort()
            await nodes.start(1)
            await host

    run(check())


def test_rank_0_does_not_stay_for_a_rank_that_is_gone(monkeypatch):
    monkeypatch.setattr(lone_barrier, "_FAREWELL_S", 0.1)

    async def check():
        async with Nodes(2) as nodes:
            host = nodes.start(0)
            lost, _ = await nodes.call(1)
            lost.abort()
            await host
            assert nodes.said[-1] == "all ranks came, but rank 1 left before they could be answered"

    run(check())


def test_a_rank_that_has_heard_and_comes_again_waits_for_the_next_round():
    async def check():
        async with Nodes(3) as nodes:
            host = nodes.start(0)
            slow, _ = await nodes.call(1)
            await nodes.start(2)  # released, and goes on
            again = nodes.start(2)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await asyncio.shield(again)
            slow.send_nowait(BarrierPassed())
            await host
            await asyncio.gather(nodes.start(0), nodes.start(1), again)

    run(check())


def test_a_hundred_rounds_on_one_port_keep_in_step():
    num_rounds, num_nodes = 100, 3
    done = [0] * num_nodes

    async def check():
        async with Nodes(num_nodes) as nodes:

            async def work(rank):
                for number in range(num_rounds):
                    done[rank] = number + 1
                    await nodes.start(rank)
                    assert min(done) > number

            await asyncio.gather(*[work(rank) for rank in range(num_nodes)])

    run(check())
    assert done == [num_rounds] * num_nodes


def test_at_the_limit_rank_0_names_the_missing_to_all(monkeypatch):
    monkeypatch.setattr(lone_barrier, "STATUS_S", 0.05)

    async def check():
        async with Nodes(4) as nodes:
            other = nodes.start(1)
            with pytest.raises(BarrierTimeoutError, match=r"within 0\.4 s: missing rank 2, rank 3"):
                await nodes.start(0, timeout_s=0.4)
            with pytest.raises(
                BarrierTimeoutError, match=r"rank 0 gave up: .* missing rank 2, rank 3"
            ):
                await other
            told = [
                line for line in nodes.said if line.startswith("2 of 4 are here, missing: rank 2")
            ]
            assert told

    run(check())


def test_without_rank_0_the_others_try_until_the_limit_and_say_so(monkeypatch):
    monkeypatch.setattr(lone_barrier, "STATUS_S", 0.05)

    async def check():
        async with Nodes(2) as nodes:
            with pytest.raises(
                BarrierTimeoutError, match="can't be reached, trying again"
            ) as caught:
                await nodes.start(1, timeout_s=0.3)
            assert caught.value.exit_code == 6
            assert any("can't be reached, trying again" in line for line in nodes.said)

    run(check())


def test_when_rank_0_dies_the_others_find_the_next_one(monkeypatch):
    monkeypatch.setattr(lone_barrier, "STATUS_S", 0.02)

    async def check():
        async with Nodes(4) as nodes:
            first = nodes.start(0)
            others = [nodes.start(1), nodes.start(2)]
            await wait_until_async(lambda: any("3 of 4 are here" in line for line in nodes.said))
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await asyncio.gather(nodes.start(0), nodes.start(3), *others)

    run(check())


def test_a_host_that_has_no_address_is_tried_again_and_a_word_that_is_none_is_refused():
    async def check():
        async with Nodes(2) as nodes:
            with pytest.raises(BarrierTimeoutError, match="can't be reached"):
                await nodes.start(1, timeout_s=0.3, host="no-such-host.invalid")
            with pytest.raises(UsageError, match="is not a valid name of a host"):
                await nodes.start(1, host="x" * 300)

    run(check())


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"can't listen on port {port}") as caught:
            wait_at_lone_barrier(
                LoneBarrier(num_nodes=2, rank=0, key=SECRET, port=port), lambda line: None
            )
    assert caught.value.why == os.strerror(98)


def test_a_silent_rank_is_missing_again(monkeypatch):
    monkeypatch.setattr(lone_barrier, "_SILENCE_S", 0.1)
    monkeypatch.setattr(lone_barrier, "STATUS_S", 0.02)

    async def check():
        async with Nodes(3) as nodes:
            host = nodes.start(0)
            await nodes.call(1, incarnation="silent")
            nodes.said.clear()  # before it came, rank 0 was alone too
            await wait_until_async(lambda: any("1 of 3 is here" in line for line in nodes.said))
            await asyncio.gather(host, nodes.start(1), nodes.start(2))

    run(check())
