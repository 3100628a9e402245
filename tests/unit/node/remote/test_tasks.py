"""A courier starts agents of its own workflow only, and tells when they have ended."""

import json
import os
import threading

import pytest

from torchmuster.net import frames
from torchmuster.net.frames import FrameReader, FrameWriter, Kind
from torchmuster.net.orders import place_order
from torchmuster.node.remote.tasks import CourierTasks

LIMIT_S = 20.0
TOKEN = "t" * 32


@pytest.fixture
def courier(tmp_path):
    """Return a courier's tasks and a reader of what it sends; the run's folder is `tmp_path`."""
    (tmp_path / "shared-token").write_text(TOKEN)
    (tmp_path / "secret").write_text("00")
    reading, writing = os.pipe2(os.O_CLOEXEC)
    writer = FrameWriter(writing)
    writer.start()
    tasks = CourierTasks(str(tmp_path / "no-root"), writer, dict(os.environ), lambda *_: None)
    yield tasks, FrameReader(reading)
    tasks.leave()
    writer.close()
    os.close(reading)


def set_up(courier, tmp_path, **more):
    """Offer the workflow; return the answer."""
    value = {
        "host": "n1",
        "run_dir": str(tmp_path),
        "token": TOKEN,
        "may_share": True,
        "folders": [],
        "lines": [],
        "environment": [],
        "origin": "muster.toml",
    }
    tasks, reader = courier
    tasks.set_up({**value, **more})
    return next_of(reader)


def next_of(reader):
    kind, payload = reader.read(LIMIT_S)
    return kind, frames.read_json(payload)


def node(tmp_path, **more):
    options = {"run_dir": str(tmp_path / "tasks" / "t"), "place": "1", "head": "127.0.0.1:1"}
    return {"id": 7, "kind": "node", "options": {**options, **more}, "gpus": None}


def test_a_run_directory_that_is_seen_lacks_nothing(courier, tmp_path):
    assert set_up(courier, tmp_path) == (Kind.PLACED, {"lacks": []})


@pytest.mark.parametrize(
    "more", [{"token": "x" * 32}, {"run_dir": "/nowhere"}, {"may_share": False}]
)
def test_a_run_directory_that_is_not_the_client_s_is_named(courier, tmp_path, more):
    run_dir = more.get("run_dir", str(tmp_path))
    assert set_up(courier, tmp_path, **more) == (Kind.PLACED, {"lacks": [run_dir]})


def test_a_folder_of_scripts_that_is_not_there_is_named(courier, tmp_path):
    kind, said = set_up(courier, tmp_path, folders=["/", "/nowhere/at all"])
    assert (kind, said["lacks"]) == (Kind.PLACED, ["/nowhere/at all"])


def test_a_failing_setup_line_is_told(courier, tmp_path):
    kind, said = set_up(courier, tmp_path, lines=["echo to the user >&2; exit 3"])
    assert kind == Kind.FAIL
    assert "to the user" in json.dumps(said)


@pytest.mark.parametrize(
    "more",
    [
        {"run_dir": "/etc"},
        {"run_dir": "DIR/../.."},
        {"head": "127.0.0.1:1 --place=3"},
        {"environment": "/etc/passwd"},
        {"place": "one"},
    ],
)
def test_an_agent_of_anything_else_is_refused(courier, tmp_path, more):
    set_up(courier, tmp_path)
    more = {key: text.replace("DIR", str(tmp_path)) for key, text in more.items()}
    tasks, reader = courier
    tasks.spawn(node(tmp_path, **more))
    kind, said = next_of(reader)
    assert (kind, said["id"], said["status"]) == (Kind.GONE, 7, 255)


def test_a_task_s_name_can_not_be_an_option(courier, tmp_path):
    set_up(courier, tmp_path)
    tasks, reader = courier
    options = {"group": "g", "task": "--run-dir=/", "attempt": "0"}
    tasks.spawn({"id": 1, "kind": "task", "options": options, "port": 1})
    assert "no name" in next_of(reader)[1]["why"]


def test_an_order_of_a_process_goes_to_the_client_and_its_end_comes_back(courier):
    tasks, reader = courier
    ended = []
    name = tasks._desk.name
    caller = threading.Thread(target=lambda: ended.append(place_order(name, {"host": "n2"})))
    caller.start()
    kind, said = next_of(reader)
    assert (kind, said["request"]) == (Kind.ASK, {"host": "n2"})
    tasks.answer({"id": said["id"], "status": 3, "why": "so"})
    caller.join(LIMIT_S)
    assert ended == [(3, "so")]
