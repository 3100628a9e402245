"""The remote end of a session starts agents of its own run only, and tells when they have ended."""

import os
import sys
import threading

import pytest

from kit.values import run_plan
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.plan import ScriptKind
from torchmuster.launcher.net import remote_messages
from torchmuster.launcher.net.broker import request_agent
from torchmuster.launcher.node.remote.files import MARK_FILE, TOKEN_FILE, write_private
from torchmuster.launcher.node.remote.main import RemoteEnd, RemotePlace

LIMIT_S = 90.0
TOKEN = "t" * 32


@pytest.fixture
def remote(tmp_path):
    """Return a remote end and a reader of what it sends; the run's folder is `tmp_path`."""
    (tmp_path / "shared-token").write_text(f"{TOKEN}\n")
    (tmp_path / "secret").write_text("00")
    reading, writing = os.pipe2(os.O_CLOEXEC)
    writer = remote_messages.FrameWriter(writing)
    end = RemoteEnd(writer)
    yield end, remote_messages.FrameReader(reading)
    end.leave()
    writer.close()
    os.close(reading)


def ask(remote, message):
    end, reader = remote
    end.take(message)
    return reader.read(LIMIT_S)


def set_up(remote, tmp_path, **more):
    """Offer the workflow; return the answer."""
    fields = {"host": "n1", "run_dir": str(tmp_path), "token": TOKEN, "may_share": True}
    answer = ask(remote, remote_messages.SetUpTasks(**{**fields, **more}))
    if isinstance(answer, remote_messages.Placed):
        assert remote[1].read(LIMIT_S) == remote_messages.SetUpDone()
    return answer


def node(tmp_path, run_dir="tasks/t", heads=("127.0.0.1:1",)):
    return remote_messages.StartNode(
        agent_id=7, run_dir=str(tmp_path / run_dir), place=1, heads=heads
    )


def test_a_run_directory_that_is_seen_lacks_nothing(remote, tmp_path):
    assert set_up(remote, tmp_path) == remote_messages.Placed(run_dir=str(tmp_path))


@pytest.mark.parametrize(
    "more", [{"token": "x" * 32}, {"run_dir": "/nowhere"}, {"may_share": False}]
)
def test_a_run_directory_that_is_not_the_client_s_is_named(remote, tmp_path, more):
    run_dir = more.get("run_dir", str(tmp_path))
    assert set_up(remote, tmp_path, **more) == remote_messages.Placed(
        run_dir=run_dir, lacks=(run_dir,)
    )


def test_a_folder_of_scripts_that_is_not_there_is_named(remote, tmp_path):
    placed = set_up(remote, tmp_path, folders=("/", "/nowhere/at all"))
    assert placed.lacks == ("/nowhere/at all",)


def test_a_failing_setup_line_is_told(remote, tmp_path):
    failed = set_up(remote, tmp_path, lines=("echo to the user >&2; exit 3",))
    assert isinstance(failed, remote_messages.RemoteFailed)
    assert "to the user" in repr(failed)


@pytest.mark.parametrize(
    "more", [{"run_dir": "/etc"}, {"run_dir": "../.."}, {"heads": ("127.0.0.1:1 --place=3",)}]
)
def test_an_agent_of_anything_else_is_refused(remote, tmp_path, more):
    set_up(remote, tmp_path)
    ended = ask(remote, node(tmp_path, **more))
    assert (type(ended), ended.agent_id, ended.status) == (remote_messages.AgentEnded, 7, 255)


def test_an_agent_before_the_run_has_come_is_refused(remote, tmp_path):
    assert "has not come" in ask(remote, node(tmp_path)).why


def test_a_task_s_name_can_not_be_an_option(remote, tmp_path):
    set_up(remote, tmp_path)
    start = remote_messages.StartTask(
        agent_id=1, host="n1", group="g", task="--run-dir=/", attempt=0, port=1
    )
    assert "no name" in ask(remote, start).why


def test_a_request_of_a_process_goes_to_the_client_and_its_end_comes_back(remote):
    end, reader = remote
    ended = []
    request = remote_messages.encode(remote_messages.StartNode(place=1, host="n2")).decode()
    broker = end.agents.open_broker()
    caller = threading.Thread(target=lambda: ended.append(request_agent(broker, request)))
    caller.start()
    asked = reader.read(LIMIT_S)
    assert asked == remote_messages.StartNode(agent_id=asked.agent_id, place=1, host="n2")
    end.take(remote_messages.AgentEnded(agent_id=asked.agent_id, status=3, why="so"))
    caller.join(LIMIT_S)
    assert ended == [(3, "so")]


# Where a run lives on a host: whether a folder of the same path and token is the client's own tells its mark.


@pytest.fixture
def message(tmp_path, monkeypatch):
    """A set-up whose client's run directory has the path of the host's own, as the first pod's has in other pods."""
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    command = {"kind": ScriptKind.COMMAND, "target": "true", "python": (sys.executable,)}
    fields = {"plan": run_plan(**command, node_names=("n1",)), "run_dir": str(tmp_path / "runs/r")}
    fields |= {"token": TOKEN, "may_share": True, "secret": "cd" * 32, "script": None}
    return lambda mark: remote_messages.SetUpRun(**fields, code_root="/", mark=mark)


def test_own_folder_of_an_earlier_session_is_not_taken_for_the_clients(message):
    first = RemotePlace(message("of the client"))
    first.write_run()
    first.remove_secret()
    again = RemotePlace(message("of the client"))
    assert again.is_own
    again.write_run()
    assert os.path.exists(again.run_dir.secret)


def test_a_folder_with_the_clients_token_and_mark_is_shared(message, tmp_path):
    run_dir = RunDir(str(tmp_path / "runs" / "r"))
    os.makedirs(run_dir.path)
    write_private(os.path.join(run_dir.path, TOKEN_FILE), TOKEN)
    assert not RemotePlace(message("")).is_own
    write_private(os.path.join(run_dir.path, MARK_FILE), "m")
    assert not RemotePlace(message("m")).is_own
