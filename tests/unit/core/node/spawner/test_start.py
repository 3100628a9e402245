"""The desk where a wrapper's Python calls."""

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest

from kit.values import program
from kit.waiting import wait_until_async
from torchmuster.core.model.codec import decode
from torchmuster.core.model.plan import ScriptKind
from torchmuster.core.node.setup import make_socket_folder
from torchmuster.core.node.spawner import start
from torchmuster.core.node.spawner.messages import InterpreterReady, SpawnerEvent, TorchFound


@pytest.fixture
def folder():
    path = make_socket_folder()
    yield path
    for name in os.listdir(path):
        os.unlink(os.path.join(path, name))
    os.rmdir(path)


@pytest.mark.parametrize(
    ("word", "is_python"),
    [
        (sys.executable, True),
        ("/usr/bin/python3.12", True),
        ("python3.13t", True),
        ("pypy3", True),
        ("python3-dbg", True),
        ("uv", False),
        ("/opt/conda/bin/conda", False),
        ("apptainer", False),
        ("python-wrapper.sh", False),
    ],
)
def test_only_python_itself_inherits_the_socket(word, is_python):
    assert start.is_interpreter(word) is is_python


def test_a_caller_is_taken_once_and_its_pid_is_the_kernels_word(folder):
    desk = start.SpawnerServer(folder, b"{}")
    assert desk.accept() is None
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with caller:
        caller.connect(desk.path)
        connection, pid = desk.accept()
        connection.close()
    desk.close()

    assert pid == os.getpid()
    assert not os.path.exists(desk.path)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to call as another user")
def test_another_users_call_is_closed_unread(folder):
    desk = start.SpawnerServer(folder, b"{}")
    os.chmod(folder, 0o755)
    os.chmod(desk.path, 0o777)
    pid = os.fork()
    if pid == 0:
        said = "no end of file"
        try:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(desk.path)
                said = stranger.recv(10).decode()
        except OSError as error:
            said = repr(error)
        finally:  # this copy of the test must go no further
            os.write(2, said.encode())
            os._exit(1 if said else 0)
    try:
        while not (os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            assert desk.accept() is None
    finally:
        desk.close()
    assert os.waitpid(pid, 0)[1] == 0


def begin(folder, tmp_path, text):
    """Start a wrapper with these lines of shell; return its link and a queue of what the link says."""
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f"#!/bin/sh\n{text}\n")
    wrapper.chmod(0o755)
    command = program("true", kind=ScriptKind.COMMAND, python=(str(wrapper),), cwd=str(tmp_path))
    heard = asyncio.Queue()
    started = start.start_spawner(command, os.environ, os.path.join(folder, "agent.sock"))
    link = start.make_link(*started, heard.put_nowait, lambda: heard.put_nowait(None))
    assert isinstance(link, start.WrappedLink)
    link.open()
    return link, heard


async def test_a_wrappers_python_calls_and_is_told_what_to_run(folder, tmp_path):
    link, heard = begin(folder, tmp_path, f'"{sys.executable}" "$@"; exit $?')
    async with asyncio.timeout(60.0):
        found, event = await heard.get(), await heard.get()
    assert isinstance(found, TorchFound)  # what its interpreter has, before it imports
    pid, wrapper = link.pid, link._child.pid
    link.close()
    await wait_until_async(lambda: link.exit_status() is not None, "the wrapper's end")
    assert isinstance(event, InterpreterReady)
    assert pid != wrapper
    assert not [name for name in os.listdir(folder) if name.endswith(".sock")]


async def test_a_wrapper_that_ends_before_is_noticed_with_its_last_words(folder, tmp_path):
    link, heard = begin(folder, tmp_path, "echo no such image >&2; exit 255")
    async with asyncio.timeout(60.0):
        assert await heard.get() is None
    assert link.said == "no such image"
    assert "ended before its Python had started" in link.last_words()["what"]
    assert link.exit_status() == 255


def test_a_python_inherits_its_socket_as_ever(folder, tmp_path):
    command = program("true", kind=ScriptKind.COMMAND, python=(sys.executable,), cwd=str(tmp_path))
    child, control = start.start_spawner(command, os.environ, os.path.join(folder, "agent.sock"))
    link = start.make_link(child, control, print, print)
    control.setblocking(True)
    events = [decode(control.recv(1 << 16), SpawnerEvent) for _ in range(2)]
    control.close()

    assert type(link) is start.SpawnerLink
    assert [type(event) for event in events] == [TorchFound, InterpreterReady]
    assert child.wait(30.0) is not None
    assert Path(folder).exists()
