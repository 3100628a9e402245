"""Sessions on real hosts of ssh that share nothing: the code that was saved runs, and a kill leaves nothing behind."""

import json
import os
import signal
import sys

import pytest

from kit.waiting import wait_until
from ssh.hosts import processes_with

SCRIPT = """\
import os, sys, model, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    print("answer", model.ANSWER, "of", dist.get_world_size(), "in", os.getcwd(), flush=True)
if sys.argv[1:] == ["wait"]:
    import signal
    signal.pause()
dist.destroy_process_group()
"""


@pytest.fixture
def held(hosts):
    """Two hosts, and a session on them that ends with the test."""
    for name in ("a", "b"):
        hosts.add(name)
    (hosts.code / "train.py").write_text(SCRIPT)
    (hosts.code / "model.py").write_text("ANSWER = 0\n")
    words = ("start", "--hosts", "a,b", "--nproc-per-node", "2", "--python", sys.executable)
    code, _, said = hosts.run(*words, command="session", MUSTER_PROGRESS="off")
    assert code == 0, said
    assert "2 nodes of ssh: a, b" in said
    yield hosts
    code, _, said = hosts.run("end", command="session")
    assert code == 0, said
    wait_until(lambda: not processes_with(str(hosts.folder) + "/host-a/home/.muster"), "the end")


def test_edited_code_runs_on_hosts_that_share_nothing(held):
    for answer in (0, 1):
        (held.code / "model.py").write_text(f"ANSWER = {answer}\n")
        code, out, said = held.run("--session", "main", "train.py")
        assert code == 0, said
        assert f"answer {answer} of 4" in out
        assert "host-a/home/.muster/runs/" in out
        assert "imports its modules again" not in said
    run = max((held.home / "runs").glob("*-train-*"))
    assert json.loads((run / "result.json").read_text())["state"] == "succeeded"
    assert json.loads((run / "plan.json").read_text())["session"] == "main"
    assert "answer 1" in held.run(run.name, command="logs")[1]


def test_killed_clients_and_doors_leave_the_session(held):
    client = held.start("--session", "main", "train.py", "wait", MUSTER_PROGRESS="off")
    wait_until(lambda: "answer" in client.stdout.readline(), "the first line")
    client.kill()
    client.communicate(timeout=60)
    code, out, said = held.run("--session", "main", "train.py")
    assert (code, "answer 0 of 4" in out) == (0, True), said

    door = held.folder / "host-b/home/.muster/runs"
    (place,) = door.glob("*-session-*/doors/1.json")
    old = json.loads(place.read_text())["pid"]
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: json.loads(place.read_text())["pid"] != old, "the door to open again")
    code, out, said = held.run("--session", "main", "train.py")
    assert (code, "answer 0 of 4" in out) == (0, True), said


def test_an_idle_session_frees_all_of_its_hosts(hosts):
    for name in ("a", "b"):
        hosts.add(name)
    words = ("start", "--hosts", "a,b", "--idle", "20s", "--python", sys.executable)
    code, _, said = hosts.run(*words, command="session", MUSTER_PROGRESS="off")
    assert code == 0, said
    (session,) = (hosts.home / "runs").glob("*-session-*")
    wait_until((session / "result.json").exists, "the session to end")
    for name in ("a", "b"):
        mine = str(hosts.folder / f"host-{name}/home/.muster")
        wait_until(lambda mine=mine: not processes_with(mine), f"the end on {name}")
