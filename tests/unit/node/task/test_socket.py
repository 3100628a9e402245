import asyncio
import contextlib
import json
import os
import socket
import stat
import subprocess
import sys

import pytest

from torchmuster.errors import MusterError
from torchmuster.node.task import socket as task_socket
from torchmuster.node.task.socket import MAX_CALLS, MAX_REQUEST_BYTES, TaskSocket
from torchmuster.node.worker_socket import make_socket_folder

DEADLINE_S = 30.0


async def echo(call):
    await call.reply({"pid": call.pid, "heard": call.request})


async def settle():
    """Let the connections that were closed end before the loop does."""
    while asyncio.all_tasks() != {asyncio.current_task()}:
        await asyncio.sleep(0.001)
    for _ in range(3):
        await asyncio.sleep(0)


def conversation(check, commands=None, handler=echo):
    """Run a task's socket while the coroutine `check(path)` calls it."""
    path = os.path.join(make_socket_folder(), "task.sock")
    known = {os.getpid()} if commands is None else commands

    async def serve():
        agent = TaskSocket(path, lambda: known, handler)
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


async def say(path, data):
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
        return [json.loads(line) for line in said.splitlines()]

    return await asyncio.to_thread(call)


# Calls the socket in argv[1] and prints the answer.
CALLER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as agent:
    agent.connect(sys.argv[1])
    try:
        agent.sendall(b'{}' + chr(10).encode())
    except BrokenPipeError:
        pass
    print(agent.makefile().readline(), end="")
"""


def answer_to(path, *prefix, **options):
    done = subprocess.run(
        [*prefix, sys.executable, "-c", CALLER, path],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_process_is_heard_and_answered_and_only_its_user_can_reach_the_socket():
    async def check(path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
        return await say(path, b'{"a": 1}\n')

    assert conversation(check) == [{"pid": os.getpid(), "heard": {"a": 1}}]


@pytest.mark.parametrize("session", [False, True])
def test_a_child_of_a_child_of_the_command_is_believed_in_any_session(session):
    async def check(path):
        shell = ["sh", "-c", '"$@"; exit $?', "sh"]
        return await asyncio.to_thread(answer_to, path, *shell, start_new_session=session)

    assert conversation(check)["heard"] == {}


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
        command = subprocess.Popen(
            [sys.executable, "-c", ORPHAN, path], stdout=subprocess.PIPE, start_new_session=True
        )
        commands.add(command.pid)
        out, _ = command.communicate(timeout=DEADLINE_S)
        return command.pid, json.loads(out)

    pid, answer = conversation(lambda path: asyncio.to_thread(call, path), commands)

    assert answer["heard"] == {}
    assert answer["pid"] != pid


def test_a_stranger_of_our_own_user_is_told_so_and_not_read():
    calls = []

    async def note(call):
        calls.append(call)

    answers = conversation(lambda path: say(path, b'{"a": 1}\n'), {1 << 30}, note)

    assert [answer["kind"] for answer in answers] == ["failed"]
    assert "only to processes of the task's own command" in answers[0]["what"]
    assert calls == []


@pytest.mark.parametrize(
    "data", [b"{\n", b"[]\n", b"\xff\n", b"7\n", b"\n", b"[" * 30_000 + b"\n", b"null\n"]
)
def test_what_is_no_request_is_told_so_and_nothing_else_happens(data):
    async def check(path):
        answers = await say(path, data), await say(path, b'{"still": "here"}\n')
        return [one["what"] if "what" in one else one["heard"] for (one,) in answers]

    assert conversation(check) == [
        "the call is not one line with a JSON object",
        {"still": "here"},
    ]


def test_a_request_over_64_kib_is_refused():
    async def check(path):
        inside = await say(path, b'"' + b"x" * (MAX_REQUEST_BYTES - 3) + b'"\n')
        outside = await say(path, b'"' + b"x" * (MAX_REQUEST_BYTES + 9000) + b'"\n')
        return inside[0]["what"], outside[0]["what"]

    assert conversation(check) == (
        "the call is not one line with a JSON object",
        "the call is longer than 64 KiB",
    )


def test_who_says_nothing_loses_the_call(monkeypatch):
    monkeypatch.setattr(task_socket, "_REQUEST_TIMEOUT_S", 0.1)

    assert conversation(lambda path: say(path, b'{"a": ')) == []


def test_a_handler_s_error_reaches_the_process_with_its_parts():
    async def fail(call):
        raise MusterError("no such thing", where="here", why="because", fix="do that")

    (answer,) = conversation(lambda path: say(path, b"{}\n"), handler=fail)

    assert answer == {
        "kind": "failed",
        "what": "no such thing",
        "where": "here",
        "why": "because",
        "fix": "do that",
    }


def test_the_conversation_stays_open_and_the_end_of_the_process_is_seen():
    ended = []

    async def talk(call):
        for number in range(3):
            await call.reply({"number": number})
        await call.closed.wait()
        await call.reply({"nobody": "hears"})
        ended.append(call.pid)

    async def check(path):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"{}\nmore than was asked for\n")
        lines = [json.loads(await reader.readline()) for _ in range(3)]
        assert ended == []
        writer.transport.abort()
        while not ended:
            await asyncio.sleep(0.001)
        return lines

    assert conversation(check, handler=talk) == [{"number": number} for number in range(3)]
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
            writer.write(b"{}\n")
            writers.append(writer)
        while len(started) < MAX_CALLS:
            await asyncio.sleep(0.001)
        (refused,) = await say(path, b"{}\n")
        writers.pop().transport.abort()
        while len(started) == MAX_CALLS:  # until the agent has seen that one has gone
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b"{}\n")
            writers.append(writer)
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                await asyncio.wait_for(reader.readline(), 0.05)
        for one in writers:
            one.transport.abort()
        return refused["what"]

    assert conversation(check, handler=wait) == "256 calls of this task are open already"


def test_closing_the_socket_ends_the_calls_at_once():
    path = os.path.join(make_socket_folder(), "task.sock")

    async def wait(call):
        await call.closed.wait()

    async def check():
        agent = TaskSocket(path, lambda: {os.getpid()}, wait)
        await agent.open()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"{}\n")
        while not agent._writers:
            await asyncio.sleep(0.001)
        agent.close()
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.read() == b""
            writer.transport.abort()
            await settle()

    asyncio.run(check())


def test_a_process_that_takes_nothing_loses_the_call_and_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(task_socket, "_SEND_TIMEOUT_S", 0.1)
    lost = asyncio.Event()

    async def flood(call):
        while not call.closed.is_set():
            await call.reply({"text": "x" * 60_000})
        lost.set()

    async def check(path):
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.connect(path)
            deaf.sendall(b"{}\n")
            await lost.wait()

    conversation(check, handler=flood)
    assert lost.is_set()
