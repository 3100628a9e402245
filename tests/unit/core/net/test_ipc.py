"""Calls over a Unix socket: the kernel says who called, everything is bounded, and odd callers are told so."""

import asyncio
import contextlib
import json
import os
import socket
import stat
import struct
import subprocess
import sys

import pytest

from kit.command import ran
from kit.waiting import wait_until_async
from torchmuster.core.model.codec import TypedMessage, encode
from torchmuster.core.net import ipc
from torchmuster.core.net.ipc import MAX_CALLS, MAX_FRAME_BYTES, CallFailed, IpcServer
from torchmuster.core.node.setup import make_socket_folder
from torchmuster.errors import MusterError

DEADLINE_S = 30.0


class Asked(TypedMessage):
    """What these tests say."""


class Ask(Asked):
    """A question."""

    text: str = ""


class Heard(Asked):
    """Its answer."""

    pid: int
    root: int
    text: str


def frame(payload):
    return struct.pack("!I", len(payload)) + payload


ASK = ipc.pack(Ask(text="a"))


async def echo(call):
    await call.reply(Heard(pid=call.pid, root=call.root, text=call.request.text))


async def settle():
    """Let the connections that were closed end before the loop does."""
    await wait_until_async(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    for _ in range(3):
        await asyncio.sleep(0)


def conversation(check, roots=None, handler=echo, **options):
    """Run a task's socket while the coroutine `check(path)` calls it."""
    path = os.path.join(make_socket_folder(), "task.sock")
    known = {os.getpid()} if roots is None else roots

    async def serve():
        find = known if callable(known) else lambda: known
        agent = IpcServer(path, find, Asked, handler, **options)
        await agent.open()
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await check(path)
        finally:
            agent.close()
            await settle()

    result = asyncio.run(serve())
    assert not os.path.exists(os.path.dirname(path))
    return result


def messages_in(data):
    """Return the messages of some frames, as plain values."""
    found = []
    while data:
        (length,) = struct.unpack_from("!I", data)
        found.append(json.loads(data[4 : 4 + length]))
        data = data[4 + length :]
    return found


async def say(path, data, *, raw=False):
    """Send bytes; return the answers until the agent hangs up, with unread bytes or without."""

    def call():
        said = b""
        with socket.socket(socket.AF_UNIX) as process:
            process.settimeout(DEADLINE_S)
            process.connect(path)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                process.sendall(data)
            with contextlib.suppress(ConnectionResetError):
                while part := process.recv(4096):
                    said += part
        return said if raw else messages_in(said)

    return await asyncio.to_thread(call)


# Calls the socket in argv[1] and prints the answer.
CALLER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as agent:
    agent.connect(sys.argv[1])
    try:
        agent.sendall(bytes.fromhex(sys.argv[2]))
    except BrokenPipeError:
        pass
    print(agent.makefile("rb").read()[4:].decode())
"""


def answer_to(path, *prefix, **options):
    words = [*prefix, sys.executable, "-c", CALLER, path, ASK.hex()]
    done = ran(words, limit_s=DEADLINE_S, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_process_is_heard_and_answered_and_only_its_user_can_reach_the_socket():
    async def check(path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
        return await say(path, ASK)

    heard = {"type": "Heard", "pid": os.getpid(), "root": os.getpid(), "text": "a"}
    assert conversation(check) == [heard]


@pytest.mark.parametrize("session", [False, True])
def test_a_child_of_a_child_of_the_command_is_believed_in_any_session(session):
    async def check(path):
        shell = ["sh", "-c", '"$@"; exit $?', "sh"]
        return await asyncio.to_thread(answer_to, path, *shell, start_new_session=session)

    assert conversation(check)["text"] == "a"


# The same, from a child that calls when its parent has gone; only the session says whose it is.
ORPHAN = f"""
import os
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    pass
{CALLER}
"""


def test_an_orphan_in_the_session_of_the_command_is_believed():
    commands = set()

    def call(path):
        words = [sys.executable, "-c", ORPHAN, path, ASK.hex()]
        command = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
        commands.add(command.pid)
        out, _ = command.communicate(timeout=DEADLINE_S)
        return command.pid, json.loads(out)

    pid, answer = conversation(lambda path: asyncio.to_thread(call, path), commands)

    assert answer["text"] == "a"
    assert answer["pid"] != pid == answer["root"]


def test_a_stranger_of_our_own_user_is_told_so_and_not_read():
    calls = []

    async def note(call):
        calls.append(call)

    (answer,) = conversation(lambda path: say(path, ASK), {1 << 30}, note)

    assert answer["what"] == "the agent answers only to processes that it has started"
    assert calls == []


def test_a_process_that_calls_before_its_start_has_been_told_is_heard():
    """A worker is forked first, and told of then: a script that fails at once may be quicker."""
    looks = iter([set(), set()])

    (answer,) = conversation(
        lambda path: say(path, ASK), lambda: next(looks, {os.getpid()}), unknown_s=DEADLINE_S
    )

    assert answer["text"] == "a"


@pytest.mark.parametrize(
    "payload", [b"{", b"[]", b"\xff", b"7", b"", b"[" * 30_000, b'{"type":"Ask","text":1}', b"{}"]
)
def test_what_is_no_request_is_told_so_and_nothing_else_happens(payload):
    odd = []

    async def check(path):
        answers = await say(path, frame(payload)), await say(path, frame(payload))
        return [*answers, await say(path, ASK)]

    answers = conversation(check, on_odd=odd.append)

    whats = [one.get("what", one.get("text")) for (one,) in answers]
    assert whats == ["the agent does not understand the call"] * 2 + ["a"]
    assert len(odd) == 1


def test_a_request_that_is_too_long_is_refused():
    async def check(path):
        return await say(path, struct.pack("!I", MAX_FRAME_BYTES + 1))

    assert conversation(check)[0]["what"] == "the call is longer than 256 KiB"
    with pytest.raises(MusterError, match="longer than 262144"):
        ipc.pack(Ask(text="x" * MAX_FRAME_BYTES))


def test_a_caller_of_an_older_version_is_told_so_in_its_own_words():
    said = conversation(lambda path: say(path, b'{"kind": "barrier", "name": "x"}\n', raw=True))

    answer = json.loads(said)
    assert (said[-1:], answer["kind"]) == (b"\n", "failed")
    assert "another version of torchmuster" in answer["what"]


@pytest.mark.parametrize("data", [b"", ASK[:3], ASK[:-1]])
def test_who_does_not_finish_its_call_loses_it(monkeypatch, data):
    monkeypatch.setattr(ipc, "_REQUEST_TIMEOUT_S", 0.1)

    assert conversation(lambda path: say(path, data)) == []


def test_a_handler_s_error_reaches_the_process_with_its_parts():
    async def fail(call):
        raise MusterError("no such thing", where="here", why="because", fix="do that")

    (answer,) = conversation(lambda path: say(path, ASK), handler=fail)

    sent = CallFailed(what="no such thing", where="here", why="because", fix="do that")
    assert answer == json.loads(encode(sent))


def test_the_conversation_stays_open_and_the_end_of_the_process_is_seen():
    ended = []

    async def talk(call):
        for number in range(3):
            await call.reply(Ask(text=str(number)))
        await call.closed.wait()
        await call.reply(Ask(text="nobody hears"))
        ended.append(call.pid)

    async def check(path):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(ASK + b"more than was asked for")
        sent = b"".join([ipc.pack(Ask(text=str(number))) for number in range(3)])
        data = await reader.readexactly(len(sent))
        assert ended == []
        writer.transport.abort()
        await wait_until_async(lambda: ended)
        return data == sent

    assert conversation(check, handler=talk)
    assert ended == [os.getpid()]


def test_at_most_256_calls_are_open_at_once():
    started = []

    async def wait(call):
        started.append(call)
        await call.closed.wait()

    async def check(path):
        writers = []
        for _ in range(MAX_CALLS):
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(ASK)
            writers.append(writer)
        await wait_until_async(lambda: len(started) == MAX_CALLS)
        (refused,) = await say(path, ASK)
        writers.pop().transport.abort()
        while len(started) == MAX_CALLS:  # until the agent has seen that one has gone
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(ASK)
            writers.append(writer)
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                await asyncio.wait_for(reader.read(1), 0.05)
        for one in writers:
            one.transport.abort()
        return refused["what"]

    assert conversation(check, handler=wait) == "256 calls of this agent are open already"


async def test_closing_the_socket_ends_the_calls_at_once():
    path = os.path.join(make_socket_folder(), "task.sock")

    async def wait(call):
        await call.closed.wait()

    agent = IpcServer(path, lambda: {os.getpid()}, Asked, wait)
    await agent.open()
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(ASK)
    await wait_until_async(lambda: agent._writers)
    agent.close()
    async with asyncio.timeout(DEADLINE_S):
        # A socket that is closed before the question has been read ends with a reset.
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.transport.abort()
        await settle()


async def test_the_end_of_the_agent_during_a_call_of_a_stranger_prints_nothing():
    path = os.path.join(make_socket_folder(), "task.sock")

    looks, said = [], []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: said.append(told))

    def find():
        return looks.append(1) or set()

    agent = IpcServer(path, find, Asked, echo, unknown_s=DEADLINE_S)
    await agent.open()
    before = asyncio.all_tasks()
    _, writer = await asyncio.open_unix_connection(path)
    await wait_until_async(lambda: looks)
    for task in asyncio.all_tasks() - before:
        task.cancel()  # as the end of the loop does
    writer.transport.abort()
    await settle()
    agent.close()
    await settle()
    assert not said


def test_a_process_that_takes_nothing_loses_the_call_and_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(ipc, "_SEND_TIMEOUT_S", 0.1)
    lost = asyncio.Event()

    async def flood(call):
        while not call.closed.is_set():
            await call.reply(Ask(text="x" * 60_000))
        lost.set()

    async def check(path):
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.connect(path)
            deaf.sendall(ASK)
            await lost.wait()

    conversation(check, handler=flood)
    assert lost.is_set()
