"""An owner's connection to its heads, its standard input, and what it writes."""

import asyncio
import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kit.command import ran
from kit.waiting import run, wait_until, wait_until_async
from torchmuster.core.files import disk
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.events import NoticeEvent
from torchmuster.core.model.lease import OwnClock
from torchmuster.core.model.owner_policy import OwnerPolicy, RestartBudget
from torchmuster.core.model.verdict import AT_ONCE, StopCause
from torchmuster.core.net import messages
from torchmuster.core.net.address import write_secret
from torchmuster.core.owner import parts
from torchmuster.core.owner.parts import HeadFollower, RecordWriter, Stops
from torchmuster.core.owner.record import read_lines
from unit.core.net.loopback import SECRET, listening

# What is repeated to a head, when it counts as ended, and when it is killed.


WATCH = messages.Watch(owner=True)
LAST, NOTICE = (messages.Event(name=name, time="t") for name in ("run_ended", "notice"))
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


async def begin(doorman, number=1):
    """Return the next connection, and the first messages on it but for pings."""
    channel = await doorman.channels.get()
    return channel, [await hear(channel) for _ in range(number)]


async def hear(channel):
    while isinstance(message := await channel.receive(), messages.Ping):
        pass
    return message


@pytest.fixture
def owner(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_LOOK_EVERY_S", 0.01)
    return Owner(tmp_path)


async def test_the_conversation_ends_when_enough_was_heard(owner):
    async with listening() as (listener, doorman):
        following = owner.follow(listener)
        channel, first = await begin(doorman)
        for message in (messages.Pong(number=0), LAST):
            channel.send_nowait(message)

        assert await following is None
        assert first == [WATCH]
        assert owner.heard == [LAST], "the echo of a ping is no news"


async def test_a_stop_is_the_first_word_of_each_connection(owner):
    async with listening() as (listener, doorman):
        following = owner.follow(listener)
        channel, _ = await begin(doorman)
        owner.stops.requests.ask(int(signal.SIGTERM), 1.0)
        owner.head.send_stop()
        stop = await hear(channel)
        channel.abort()

        assert (await begin(doorman, 2))[1] == [WATCH, stop]
        following.cancel()


async def test_what_is_repeated_reaches_each_head_once(owner):
    async with listening() as (listener, doorman):
        following = owner.follow(listener)
        channel, _ = await begin(doorman)
        owner.head.repeat(WARNING)
        assert await hear(channel) == WARNING
        channel.abort()
        channel, again = await begin(doorman)
        assert again == [WATCH]
        owner.head.send(messages.Forward(signum=1))
        assert await hear(channel) == messages.Forward(signum=1), "nothing lies between"

        owner.ends.set()
        channel.abort()
        assert await following == "signal 9"
        following = owner.follow(listener)
        assert (await begin(doorman, 2))[1] == [WATCH, WARNING]
        following.cancel()


async def test_the_last_words_of_a_head_that_has_ended_are_heard(owner):
    async with listening() as (listener, doorman):
        following = owner.follow(listener)
        channel, _ = await begin(doorman)
        owner.ends.set()
        await asyncio.sleep(0)
        channel.send_nowait(NOTICE)
        await channel.close()

        assert await following == "signal 9"
        assert owner.heard == [NOTICE]
        assert owner.kills == 0


async def test_a_head_that_stands_still_is_killed(owner):
    owner.state = "T"
    async with listening() as (listener, doorman):
        following = owner.follow(listener)
        channel, _ = await begin(doorman)
        channel.send_nowait(NOTICE)
        await wait_until_async(lambda: owner.heard, "a first word")

        def another_second():
            owner.now += 1.0
            return following.done()

        await wait_until_async(another_second, "the end of the silence")
        assert "was silent for" in await following
        assert owner.kills == 1
        assert "has been silent for 5 s" in owner.said[0]


async def test_what_a_listener_can_not_take_is_not_swallowed(owner):
    async with listening() as (listener, doorman):
        owner.head.hear = lambda message: 1 / 0
        following = owner.follow(listener)
        channel, _ = await begin(doorman)
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


# Standard input of a run, from terminals of all kinds.


ASK = "from torchmuster.core.owner.parts import _is_in_background; print(_is_in_background())"


@pytest.fixture
def terminal():
    ends = pty.openpty()
    yield ends[1]
    for fd in ends:
        os.close(fd)


def test_a_terminal_that_does_not_control_us_may_be_read(terminal):
    """As in a session of its own, started from a terminal: asking for its foreground group is an error."""
    done = ran([sys.executable, "-c", ASK], stdin=terminal, start_new_session=True)

    assert (done.stdout, done.stderr) == ("False\n", "")


# What an owner writes: in order, to the last line, and without waiting for a file system that stands still.


AT_ONCE_S = 5.0  # on a machine that is busy with other things
FULL = "No space left on device"


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return RunDir(str(folder))


def write(run_dir, texts, then=lambda record: None):
    """Let a writer take notices with these texts, and what `then(record)` gives it; return what was said to the user."""
    said = []

    async def go():
        async with RecordWriter(run_dir, said.append) as record:
            for text in texts:
                record.event(NoticeEvent(text=text))
            then(record)

    asyncio.run(go())
    return said


def texts_of(lines):
    return [event["text"] for event in lines]


def read_json(path):
    with open(path) as file:
        return json.load(file)


def test_all_is_written_in_its_order_before_the_owner_ends(run_dir):
    texts = [str(number) for number in range(1000)]

    def then(record):
        record.replace(run_dir.result, {"state": "done"}, mode=0o600)

    assert write(run_dir, texts, then) == []
    assert texts_of(read_lines(run_dir.events)) == texts
    assert read_json(run_dir.result) == {"state": "done"}
    assert os.stat(run_dir.result).st_mode & 0o777 == 0o600


def test_what_an_earlier_owner_has_written_stays(run_dir):
    for _ in range(2):
        write(run_dir, ["again"])
    assert texts_of(read_lines(run_dir.events)) == ["again", "again"]


def test_a_file_system_that_stands_still_keeps_nobody_waiting(run_dir, monkeypatch):
    monkeypatch.setattr(parts, "LAST_WRITES_S", 0.2)
    os.mkfifo(run_dir.events)  # it can't be opened until somebody reads
    started = time.monotonic()

    def then(record):
        record.replace(run_dir.head, {"port": 1})
        assert time.monotonic() - started < AT_ONCE_S

    (said,) = write(run_dir, ["counted"] * 100, then)
    assert said == (
        f"files in {run_dir.path} can't be written, so other commands may not find this run"
        " or see all of it: the file system took more than 0 s"
    )
    with open(run_dir.events) as late:  # the thread ends its work
        assert len(late.readlines()) == 100


def test_a_slow_file_system_gets_its_time_at_the_end(run_dir):
    os.mkfifo(run_dir.events)
    read = []

    def read_slowly():
        with open(run_dir.events) as pipe:  # a view refuses a pipe
            read.extend(json.loads(line) for line in pipe)

    reader = threading.Thread(target=read_slowly)

    def then(_):
        asyncio.get_running_loop().call_later(0.1, reader.start)

    assert write(run_dir, ["first", "last"], then) == []
    reader.join(AT_ONCE_S)
    assert texts_of(read) == ["first", "last"]


def test_a_full_disk_is_told_once_for_each_reason(run_dir):
    os.symlink("/dev/full", run_dir.events)
    os.mkdir(run_dir.result)

    full, in_the_way = write(
        run_dir, ["counted"] * 3, lambda record: record.replace(run_dir.result, {})
    )
    assert full.endswith(FULL)
    assert in_the_way.endswith("result.json: Is a directory")


@pytest.fixture
def small_disk(tmp_path):
    """Return the folder of a file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("only root makes a file system that can be filled")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_others_have_filled_has_room_for_the_result(small_disk):
    run_dir = RunDir(str(small_disk / "run"))
    os.mkdir(run_dir.path)

    def fill(record):
        room = Path(run_dir.room)
        wait_until(lambda: room.exists() and room.stat().st_size, "its room", AT_ONCE_S)
        fd = os.open(small_disk / "others", os.O_WRONLY | os.O_CREAT)
        with contextlib.suppress(OSError):
            while os.write(fd, bytes(1024)):
                pass
        os.close(fd)
        record.replace(run_dir.result, {"state": "done", "words": "x" * 20_000})

    assert write(run_dir, [], fill) == []
    assert read_json(run_dir.result)["state"] == "done"
    assert not os.path.exists(run_dir.room)


def test_what_the_queue_has_no_room_for_is_told(run_dir, monkeypatch):
    monkeypatch.setattr(disk, "MAX_WAITING_BYTES", 1)

    (said,) = write(run_dir, ["too long"])
    assert said.endswith("the disk was too slow")
