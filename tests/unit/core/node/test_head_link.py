"""The connection of an agent to its head: who is called, what ends it, and what a lease is worth."""

import asyncio
import contextlib
import json
import os

import pytest

from kit.ports import reserve_port
from kit.waiting import wait_until_async
from torchmuster.core import proc
from torchmuster.core.files.claims import Claims
from torchmuster.core.net import messages
from torchmuster.core.net.address import bind
from torchmuster.core.net.channel import Role
from torchmuster.core.net.listener import Listener
from torchmuster.core.node import head_link
from torchmuster.core.node.head_link import AgentRefusedError, HeadLink
from torchmuster.core.node.options import HeadPlace
from torchmuster.errors import HeadLostError, JoinTimeoutError
from unit.core.net.loopback import SECRET

HELLO = messages.Notice(text="hello")
GIVEN = {"run_id": "r", "node": "n1", "tee": "0", "head_pid": 1, "boot_id": "", "network_id": ""}
WELCOME = messages.Welcome(**GIVEN)


class Doorman:
    """A head that answers every ping, unless it is told to be deaf."""

    def __init__(self, secret=SECRET):
        self.listener = Listener(bind("127.0.0.1", 0), (secret, None), self.serve, self.refuse)
        self.heard = []
        self.deaf = False
        self.channels = asyncio.Queue()

    def refuse(self, peer, error):
        """Nothing is noted."""

    async def serve(self, channel):
        assert channel.role is Role.AGENT
        self.channels.put_nowait(channel)
        while True:
            message = await channel.receive()
            self.heard.append(message)
            if isinstance(message, messages.Ping) and not self.deaf:
                channel.send_nowait(messages.Pong(number=message.number))

    def link(self, **given):
        return link_to(("127.0.0.1", self.listener.port), **{"join_timeout_s": 5.0, **given})


def link_to(address, say=lambda text: None, **given):
    """Return the link of an agent that was told this address."""
    return HeadLink(HeadPlace(**{"addresses": (address,), "secret": SECRET, **given}), say)


def nobody():
    """Return an address where nobody listens."""
    return ("127.0.0.1", reserve_port())


@contextlib.asynccontextmanager
async def met():
    doorman = Doorman()
    serving = asyncio.create_task(doorman.listener.serve())
    await asyncio.sleep(0)  # it closes its socket when it has begun
    try:
        yield doorman
    finally:
        serving.cancel()


async def take_all(message):
    return not isinstance(message, messages.Goodbye)


async def test_the_hello_comes_first_and_pings_follow(monkeypatch):
    monkeypatch.setattr(head_link, "PING_EVERY_S", 0.01)

    async with met() as doorman:
        link = doorman.link()
        channel = await link.call()
        talking = asyncio.create_task(link.converse(channel, HELLO, take_all))
        head = await doorman.channels.get()
        await wait_until_async(lambda: len(doorman.heard) >= 3, "two pings")
        head.send_nowait(messages.Goodbye(exit_code=0))
        assert await talking is None
        await channel.close()
        first, *rest = doorman.heard
    assert first == HELLO
    assert [message.number for message in rest] == list(range(1, len(rest) + 1))


async def test_the_end_of_the_connection_is_told_with_its_reason_and_it_can_stand_again():
    async with met() as doorman:
        link = doorman.link()
        talking = asyncio.create_task(link.converse(await link.call(), HELLO, take_all))
        (await doorman.channels.get()).abort()
        why = await talking
        assert link.channel is None
        link.send(HELLO)  # nobody hears it, and nothing breaks
        again = await link.call()
        again.abort()
        assert why


async def test_a_head_with_another_key_refuses_at_once():
    async with met() as doorman:
        with pytest.raises(AgentRefusedError) as refused:
            await doorman.link(secret=b"x" * 32).call()
        error = refused.value
    assert "refused this agent" in error.what
    assert "secret_file" in error.fix


def test_a_head_that_never_listens_is_called_until_the_limit_and_said(monkeypatch):
    monkeypatch.setattr(head_link, "SAY_EVERY_S", 1.05)  # the first sentence comes a second earlier
    said = []
    with pytest.raises(JoinTimeoutError) as late:
        asyncio.run(link_to(nobody(), said.append, join_timeout_s=0.7).call())
    assert "could not be reached within 1 s" in late.value.what
    assert said[0].startswith("waiting for the head at 127.0.0.1:")


async def test_silence_ends_the_lease_and_the_connection_but_not_before_a_lease_has_passed(
    monkeypatch,
):
    monkeypatch.setattr(head_link, "PING_EVERY_S", 0.01)
    now = [100.0]

    async with met() as doorman:
        doorman.deaf = True
        link = doorman.link()
        link.clock = lambda: now[0]
        link.lease = FakeLease(now)
        link._called_at = now[0]
        talking = asyncio.create_task(link.converse(await link.call(), HELLO, take_all))
        await wait_until_async(lambda: doorman.heard, "the hello")
        now[0] += head_link.LEASE_S - 1
        assert link.silent_s() is None
        link.end_silent()
        assert link.channel is not None
        now[0] += 2
        assert link.silent_s() == head_link.LEASE_S + 1
        link.end_silent()
        assert await talking


async def test_a_head_that_runs_on_this_machine_is_slow_not_gone():
    async with met() as doorman:
        link = doorman.link()
        now = [head_link.LEASE_S + 1]
        link.lease = FakeLease(now, since=0.0)
        link.clock = lambda: now[0]
        assert link.silent_s() is not None
        here = {"boot_id": proc.boot_id(), "network_id": proc.network_id()}
        link.welcome(messages.Welcome(**{**GIVEN, **here, "head_pid": os.getpid()}))
        assert link.silent_s() is None


class FakeLease:
    """A lease by a clock that the test sets."""

    def __init__(self, now, since=None):
        self._now = now
        self._since = now[0] if since is None else since
        self._number = 0

    def ping(self):
        self._number += 1
        return self._number

    def renew(self, number):
        self._since = self._now[0]

    def age_s(self):
        return self._now[0] - self._since


async def test_a_name_that_never_resolves_is_the_reason_in_words():
    with pytest.raises(JoinTimeoutError) as late:
        await link_to(("no-such-pod.invalid", 29500), join_timeout_s=0.1).call()
    error = late.value
    assert error.what == "the head at no-such-pod.invalid:29500 could not be reached within 0 s"
    assert error.why == "its name is not known here"


def write_moved(path, *addresses):
    path.write_text(json.dumps([f"127.0.0.1:{port}" for port in addresses]))


async def test_an_agent_that_was_welcomed_finds_the_head_in_a_lost_ones_place(tmp_path):
    moved = tmp_path / "moved.json"

    async with met() as successor:
        link = link_to(nobody(), join_timeout_s=10.0, file=str(moved))
        link.welcome(WELCOME)  # by a head that has gone since
        calling = asyncio.create_task(link.call())
        await asyncio.sleep(0.2)
        assert not calling.done()
        write_moved(moved, successor.listener.port)
        (await calling).abort()


async def test_an_agent_whose_head_fell_before_it_could_join_finds_the_next_one(tmp_path):
    moved = tmp_path / "moved.json"

    async with met() as successor:
        lost = nobody()
        link = link_to(lost, join_timeout_s=30.0, file=str(moved))
        write_moved(moved, reserve_port())  # of the past, where nobody is any more
        calling = asyncio.create_task(link.call())
        await wait_until_async(lambda: len(link._addresses) == 2, "the look")
        assert link._addresses[0] == lost, "its own head is called still"
        write_moved(moved, successor.listener.port)
        (await calling).abort()


async def test_an_agent_waits_no_longer_where_the_owner_says_that_no_head_follows(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(head_link, "_HEAD_GONE_S", 0.1)
    moved = tmp_path / "moved.json"

    link = link_to(nobody(), join_timeout_s=60.0, file=str(moved))
    link.welcome(WELCOME)
    calling = asyncio.create_task(link.call())
    await asyncio.sleep(0.5)
    assert not calling.done(), "one may follow"
    write_moved(moved)
    with pytest.raises(HeadLostError):
        await asyncio.wait_for(calling, 10)


async def test_a_head_that_was_given_up_by_the_owner_loses_its_agents_though_it_lives(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(head_link, "_LOOK_EVERY_S", 0.0)
    moved = tmp_path / "moved.json"

    async with met() as old:
        link = old.link(file=str(moved))
        talking = asyncio.create_task(link.converse(await link.call(), HELLO, take_all))
        await wait_until_async(lambda: link.channel is not None, "the conversation")
        link.look_for_successor()
        write_moved(moved, 1)
        link.look_for_successor()  # it was not welcomed: nothing of the past stands in its way
        assert not talking.done()
        link.welcome(WELCOME)
        link.look_for_successor()
        assert await talking


@pytest.mark.parametrize("text", ["", "{", "5", '"x"', '["no port"]', '[["a", 1]]', "[]"])
async def test_a_file_of_addresses_that_is_no_such_thing_changes_nothing(tmp_path, text):
    (tmp_path / "moved.json").write_text(text)

    async with met() as doorman:
        link = doorman.link(file=str(tmp_path / "moved.json"))
        link.welcome(WELCOME)
        link.look_for_successor()
        (await link.call()).abort()


NOWHERE = ("192.0.2.1", 9)  # 192.0.2.0/24 is nobody's (RFC 5737)


async def test_a_link_turns_to_another_head_while_it_still_calls_the_lost_one():
    """A machine without power does not even refuse: each call to it takes five seconds."""

    async with met() as doorman:
        link = doorman.link(addresses=(NOWHERE,))
        calling = asyncio.create_task(link.call())
        await asyncio.wait({calling}, timeout=0.2)
        assert not calling.done()
        address = ("127.0.0.1", doorman.listener.port)
        link.turn_to((address,), (address,))
        (await asyncio.wait_for(calling, 2)).abort()


async def test_a_link_that_is_cancelled_while_it_calls_ends():
    async with met() as doorman:
        link = doorman.link(addresses=(NOWHERE,))
        calling = asyncio.create_task(link.call())
        await asyncio.wait({calling}, timeout=0.1)
        calling.cancel()
        await asyncio.wait({calling}, timeout=2)
        assert calling.cancelled()


async def test_a_link_follows_the_head_of_the_highest_term_only(tmp_path):
    claims = Claims(str(tmp_path))

    async with met() as doorman:
        link = doorman.link(file=str(tmp_path / "moved.json"), heirs=claims.folder)
        link.welcome(WELCOME)
        here = (("127.0.0.1", doorman.listener.port),)
        claims.announce(3, ["192.0.2.3:3"])
        link.look_for_successor()
        claims.announce(7, [f"127.0.0.1:{doorman.listener.port}"])
        link.look_for_successor()
        (await asyncio.wait_for(link.call(), 2)).abort()
        claims.announce(5, ["192.0.2.5:5"])  # by a node that stood still since its claim
        link.turn_to(here, here, 9)
        claims.announce(8, ["192.0.2.8:8"])
        link.look_for_successor()
        (await asyncio.wait_for(link.call(), 2)).abort()
