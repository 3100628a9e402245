import asyncio
import contextlib
import json
import os
import shutil
import socket
import stat
import struct

import pytest

from torchmuster.node.spawner import mainmodule
from torchmuster.node.worker_socket import WorkerSocket, make_socket_folder

DEADLINE_S = 30.0


def conversation(call, workers):
    """Run a worker socket while `call(path)` runs in a thread; return what the agent heard."""
    heard = []
    path = os.path.join(make_socket_folder(), "agent.sock")

    async def serve():
        known = workers if callable(workers) else lambda: workers
        agent = WorkerSocket(path, known, lambda pid, said: heard.append((pid, said)))
        await agent.open()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.to_thread(call, path)
            await asyncio.sleep(0)
        agent.close()

    asyncio.run(serve())
    assert not os.path.exists(os.path.dirname(path))
    return heard


def say(path, payload, length=None):
    """Send one message and return the agent's answer; empty when it hangs up."""
    with socket.socket(socket.AF_UNIX) as worker:
        worker.settimeout(DEADLINE_S)
        worker.connect(path)
        with contextlib.suppress(BrokenPipeError):
            worker.sendall(struct.pack("!I", len(payload) if length is None else length) + payload)
        worker.shutdown(socket.SHUT_WR) if length is not None else None
        try:
            return worker.recv(1)
        except ConnectionResetError:
            return b""


def test_a_worker_that_calls_before_its_start_has_been_told_is_heard():
    """It is forked first, and told of then: a script that fails at once may be quicker."""
    looks = iter([set(), set()])
    answers = []

    heard = conversation(
        lambda path: answers.append(say(path, json.dumps({"kind": "exception"}).encode())),
        lambda: next(looks, {os.getpid()}),
    )

    assert answers == [b"\1"]
    assert heard == [(os.getpid(), {"kind": "exception"})]


def test_only_we_can_enter_the_folder_and_its_name_fits_a_socket():
    folder = make_socket_folder()

    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert len(os.path.join(folder, "agent.sock")) < 108
    assert os.listdir(folder) == ["owner.json"]
    shutil.rmtree(folder)


def test_a_long_temporary_folder_is_not_used(monkeypatch, tmp_path):
    import tempfile

    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = make_socket_folder()

    assert len(folder) < 80
    assert os.listdir(long) == []
    assert os.listdir(folder) == ["owner.json"]
    shutil.rmtree(folder)


def test_a_worker_is_heard_and_answered():
    answers = []

    heard = conversation(lambda path: answers.append(say(path, b'{"a": 1}')), {os.getpid()})

    assert heard == [(os.getpid(), {"a": 1})]
    assert answers == [b"\1"]


def test_a_stranger_of_our_own_user_is_not_heard():
    answers = []

    heard = conversation(lambda path: answers.append(say(path, b'{"a": 1}')), {1})

    assert heard == []
    assert answers == [b""]


@pytest.mark.parametrize(
    ("payload", "length"),
    [(b"{", None), (b"\xff", None), (b"{}", 9), (b"", 1 << 30), (b"", 0xFFFFFFFF)],
)
def test_what_is_no_message_ends_the_call_and_nothing_else(payload, length):
    answers = []

    def call(path):
        answers.append(say(path, payload, length))
        answers.append(say(path, b'{"still": "here"}'))

    heard = conversation(call, {os.getpid()})

    assert heard == [(os.getpid(), {"still": "here"})]
    assert answers == [b"", b"\1"]


def task(path):
    return mainmodule.WorkerTask(kind="file", target="t.py", args=[], socket_path=path, forked=True)


def report_of(error):
    def fail():
        raise error

    def call(path):
        try:
            fail()
        except type(error) as raised:
            mainmodule._report(task(path), raised)

    ((_, report),) = conversation(call, {os.getpid()})
    return report


def test_an_exit_within_an_except_is_reported_with_what_was_handled():
    error = SystemExit(1)
    error.__context__ = ValueError("bad batch\nof 3")
    report = report_of(error)

    assert (report["kind"], report["handled"]) == ("exit", "ValueError: bad batch")
    assert report_of(ValueError("x"))["handled"] is None
    assert report_of(SystemExit(1))["handled"] is None


def test_an_exception_is_reported_with_type_message_and_line():
    report = report_of(ValueError("bad batch"))

    assert (report["kind"], report["type_name"]) == ("exception", "ValueError")
    assert report["message"] == "bad batch"
    assert report["where"].startswith(__file__)
    assert report["traceback"].endswith("ValueError: bad batch\n")


def test_an_exception_that_says_it_is_final_is_reported_as_final():
    error = ValueError("no good snapshot")
    error.muster_final = True

    assert report_of(error)["is_final"] is True
    assert report_of(ValueError("bad batch"))["is_final"] is False


class Silent(Exception):  # noqa: N818 - as a user may call it
    def __str__(self):
        raise RuntimeError("no words")


def test_an_exception_that_can_t_be_shown_is_reported_by_its_name():
    report = report_of(Silent())

    assert report["type_name"].endswith("Silent")
    assert "can't be shown" in report["traceback"]


@pytest.mark.parametrize("character", ["x", "ü", "数", "🔥", "\0"])
def test_a_giant_message_is_reported_in_part_and_never_lost(character):
    report = report_of(ValueError(character * 200_000))

    assert report["type_name"] == "ValueError"
    assert report["message"] == character * 8192
    assert character * 1000 in report["traceback"]
    assert len(json.dumps(report)) <= 256 << 10
