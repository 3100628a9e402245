"""An owner's connection to its heads: what is repeated, when a head counts as ended, and when it is killed."""

import asyncio
import signal

import pytest

from kit.waiting import run, wait_until_async
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.lease import OwnClock
from torchmuster.core.model.owner_policy import OwnerPolicy, RestartBudget
from torchmuster.core.model.verdict import AT_ONCE, StopCause
from torchmuster.core.net import messages
from torchmuster.core.net.address import write_secret
from torchmuster.core.owner import parts
from torchmuster.core.owner.parts import HeadFollower, Stops
from unit.core.net.loopback import SECRET, listening

WATCH = messages.Watch(owner=True)
LAST = messages.Event(name="run_ended", time="t")
WARNING = messages.Forward(signum=int(signal.SIGUSR1), last="the time is over")


class Owner:
    """Follows heads that are served by the test."""

    def __init__(self, tmp_path):
        write_secret(str(tmp_path / "secret"), SECRET)
        self.now, self.state = 1000.0, "S"
        self.heard, self.said, self.kills = [], [], 0
        self.stops = Stops()
        policy = OwnerPolicy("n1", RestartBudget(0), self.stops.requests, grace_s=30.0)
        self.ends = asyncio.Event()
        self.head = HeadFollower(
            RunDir(str(tmp_path)),
            policy=policy,
            stops=self.stops,
            state=lambda: self.state,
            kill=self._kill,
            hear=self._hear,
            say=self.said.append,
            clock=OwnClock(lambda: self.now),
        )

    def _kill(self):
        self.kills += 1

    def _hear(self, message):
        self.heard.append(message)
        return message != LAST

    async def _ended(self):
        await self.ends.wait()
        return "signal 9"

    def follow(self, listener):
        self.ends = asyncio.Event()
        return asyncio.create_task(self.head.follow(("127.0.0.1", listener.port), self._ended))


async def begin(doorman, number):
    """Return the next connection, and the first messages on it but for pings."""
    channel = await doorman.channels.get()
    return channel, [await hear(channel) for _ in range(number)]


async def hear(channel):
    while isinstance(message := await channel.receive(), messages.Ping):
        pass
    return message


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr(parts, "_LOOK_EVERY_S", 0.01)


async def test_the_conversation_ends_when_enough_was_heard(tmp_path):
    owner = Owner(tmp_path)
    async with listening() as (listener, doorman):
        following = owner.follow(listener)
        channel, first = await begin(doorman, 1)
        for message in (messages.Pong(number=0), LAST):
            channel.send_nowait(message)

        assert await following is None
        assert first == [WATCH]
        assert owner.heard == [LAST], "the echo of a ping is no news"


async def test_a_stop_is_the_first_word_of_each_connection(tmp_path):
    owner = Owner(tmp_path)
    async with listening() as (listener, doorman):
        following = owner.follow(listener)
        channel, _ = await begin(doorman, 1)
        owner.stops.requests.ask(int(signal.SIGTERM), 1.0)
        owner.head.send_stop()
        stop = await hear(channel)
        channel.abort()

        assert (await begin(doorman, 2))[1] == [WATCH, stop]
        following.cancel()


async def test_what_is_repeated_reaches_each_head_once(tmp_path):
    owner = Owner(tmp_path)
    async with listening() as (listener, doorman):
        following = owner.follow(listener)
        channel, _ = await begin(doorman, 1)
        owner.head.repeat(WARNING)
        assert await hear(channel) == WARNING
        channel.abort()
        channel, again = await begin(doorman, 1)
        assert again == [WATCH]
        owner.head.send(messages.Forward(signum=1))
        assert await hear(channel) == messages.Forward(signum=1), "nothing lies between"

        owner.ends.set()
        channel.abort()
        assert await following == "signal 9"
        following = owner.follow(listener)
        assert (await begin(doorman, 2))[1] == [WATCH, WARNING]
        following.cancel()


async def test_the_last_words_of_a_head_that_has_ended_are_heard(tmp_path):
    owner = Owner(tmp_path)
    async with listening() as (listener, doorman):
        following = owner.follow(listener)
        channel, _ = await begin(doorman, 1)
        owner.ends.set()
        await asyncio.sleep(0)
        channel.send_nowait(messages.Event(name="notice", time="t"))
        await channel.close()

        assert await following == "signal 9"
        assert [message.name for message in owner.heard] == ["notice"]
        assert owner.kills == 0


async def test_a_head_that_stands_still_is_killed(tmp_path):
    owner = Owner(tmp_path)
    owner.state = "T"
    async with listening() as (listener, doorman):
        following = owner.follow(listener)
        channel, _ = await begin(doorman, 1)
        channel.send_nowait(messages.Event(name="notice", time="t"))
        await wait_until_async(lambda: owner.heard, "a first word")

        def another_second():
            owner.now += 1.0
            return following.done()

        await wait_until_async(another_second, "the end of the silence")
        assert "was silent for" in await following
        assert owner.kills == 1
        assert "has been silent for 5 s" in owner.said[0]


async def test_what_a_listener_can_not_take_is_not_swallowed(tmp_path):
    owner = Owner(tmp_path)
    async with listening() as (listener, doorman):
        owner.head.hear = lambda message: 1 / 0
        following = owner.follow(listener)
        channel, _ = await begin(doorman, 1)
        channel.send_nowait(LAST)
        with pytest.raises(ZeroDivisionError):
            await following


@pytest.mark.parametrize(
    ("first", "second", "after_s", "may_save", "is_at_once"),
    [
        (signal.SIGTERM, signal.SIGTERM, 4.0, False, False),  # a wrapper, and the group
        (signal.SIGTERM, signal.SIGTERM, 6.0, False, True),
        (signal.SIGTERM, signal.SIGTERM, 60.0, True, False),
        (signal.SIGHUP, signal.SIGHUP, 60.0, True, False),  # the kernel, and the shell
        (signal.SIGINT, signal.SIGTERM, 4.0, False, False),
        (signal.SIGTERM, signal.SIGINT, 0.3, False, False),
        (signal.SIGINT, signal.SIGINT, 0.3, False, False),  # one key
        (signal.SIGINT, signal.SIGINT, 0.6, True, True),
        (signal.SIGTERM, signal.SIGINT, 0.6, True, True),
        (signal.SIGTERM, AT_ONCE, 0.0, True, True),
    ],
)
def test_a_stop_that_comes_twice_is_one_and_no_sigterm_cuts_a_save_short(
    first, second, after_s, may_save, is_at_once
):
    now, taken = [0.0], []

    def judge(signum):
        return StopCause.USER if signum == signal.SIGINT else StopCause.TIME

    async def check():
        stops = Stops(judge, lambda: may_save, clock=lambda: now[0])
        assert stops.message() is None
        stops.listen(lambda: taken.append(stops.message()))
        signal.raise_signal(first)
        await wait_until_async(lambda: len(taken) == 1, "the first signal")
        now[0] += after_s
        signal.raise_signal(second)
        signal.raise_signal(AT_ONCE)  # after it: no test can wait for what does not happen
        await wait_until_async(lambda: len(taken) == 2 + is_at_once, "the end of the signals")

    run(check())
    assert [stop.at_once for stop in taken] == [False, True, True][: len(taken)]
    by = second if is_at_once and second != AT_ONCE else first
    assert [stop.signum for stop in taken[:2]] == [first, by]
    assert [stop.cause for stop in taken[:2]] == [judge(first), judge(by)]


def test_a_background_job_of_a_shell_asks_its_workers_by_a_signal_that_they_do_not_ignore():
    async def check():
        stops = Stops()
        stops.listen(lambda: None)
        stops._take(int(signal.SIGINT), lambda: None)
        stop = stops.message()
        assert (stop.signum, stop.cause) == (signal.SIGTERM, StopCause.USER)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run(check())
    finally:
        signal.signal(signal.SIGINT, before)
