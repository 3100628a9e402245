"""Sessions on real hosts of ssh that share nothing: the code that was saved runs, and a kill leaves nothing behind."""

import json
import os
import signal
import sys

import pytest

from kit import sessions_page as page
from kit.records import newest_run
from kit.venvs import make_venv
from kit.waiting import wait_until

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
SHOW = """\
import os, sys, torch
rank, names = os.environ["RANK"], ("LOADED", "LD_LIBRARY_PATH", "FROM_SITE", "GONE")
said = [f"rank {rank} prefix {sys.prefix}", *(f"{name}={os.environ.get(name)}" for name in names)]
os.write(1, " ".join([*said, os.environ["MUSTER_SCRATCH"], os.environ["PATH"], "\\n"]).encode())
"""
SITE = """\
[engines.lab]
kind = "ssh"
hosts = ["a", "b"]
scratch = "$HOME/scratch"
setup = [
    'source "$HOME/env/bin/activate"',
    "export LOADED=yes LD_LIBRARY_PATH=/of/site",
    "unset GONE",
]
[engines.lab.environment]
FROM_SITE = "theirs"
GONE = "not yet"
"""


def begin(hosts):
    """Make two hosts, and the code."""
    hosts.add_all("a", "b")
    (hosts.code / "train.py").write_text(SCRIPT)
    (hosts.code / "model.py").write_text("ANSWER = 0\n")


@pytest.fixture
def held(hosts):
    """Two hosts, and a session on them that ends with the test."""
    begin(hosts)
    words = ("start", "--hosts", "a,b", "--nproc-per-node", "2", "--python", sys.executable)
    _, said = hosts.must(*words, command="session", MUSTER_PROGRESS="off")
    assert "2 nodes of ssh: a, b" in said
    yield hosts
    _, said = hosts.must("end", command="session")
    result = json.loads((newest_run(hosts.home, "session") / "result.json").read_text())
    assert (result["state"], result["exit_code"]) == ("succeeded", 0)  # as on this machine
    hosts.wait_for_the_end_on("a")


def test_edited_code_runs_on_hosts_that_share_nothing(held):
    for answer in (0, 1):
        (held.code / "model.py").write_text(f"ANSWER = {answer}\n")
        out, said = held.must("--session", "main", "train.py")
        assert f"answer {answer} of 4" in out
        assert "host-a/home/.muster/runs/" in out
        assert "imports its modules again" not in said
    run = newest_run(held.home, "train")
    assert json.loads((run / "result.json").read_text())["state"] == "succeeded"
    assert json.loads((run / "plan.json").read_text())["session"] == "main"
    assert "answer 1" in held.run(run.name, command="logs")[1]


def test_killed_clients_and_doors_leave_the_session(held):
    client = held.start("--session", "main", "train.py", "wait", MUSTER_PROGRESS="off")
    wait_until(lambda: "answer" in client.stdout.readline(), "the first line")
    client.kill()
    client.communicate(timeout=180)
    out, said = held.must("--session", "main", "train.py")
    assert "answer 0 of 4" in out, said

    door = held.folder / "host-b/home/.muster/runs"
    (place,) = door.glob("*-session-*/doors/1.json")
    old = json.loads(place.read_text())["pid"]
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: json.loads(place.read_text())["pid"] != old, "the door to open again")
    out, said = held.must("--session", "main", "train.py")
    assert "answer 0 of 4" in out, said


def test_dev_runs_saved_code_on_hosts_and_ends_its_session(hosts):
    begin(hosts)
    words = ("--hosts", "a,b", "--nproc-per-node", "2", "--python", sys.executable)
    said = hosts.folder / "said"
    with said.open("wb") as file:
        dev = hosts.start(*words, "train.py", command="dev", stderr=file, MUSTER_PROGRESS="off")
    with dev:
        wait_until(lambda: "waiting for a change" in said.read_text(), "the first run", 90)
        assert "answer 0 of 4" in dev.stdout.readline()
        out, _ = hosts.must("list", "--json", command="session")
        (listed,) = json.loads(out)
        assert (listed["where"], listed["name"]) == ("ssh: a, b", "dev-my-code")
        (hosts.code / "model.py").write_text("ANSWER = 1\n")
        wait_until(lambda: "saved model.py" in said.read_text(), "the second run", 90)
        assert "answer 1 of 4" in dev.stdout.readline()
        dev.send_signal(signal.SIGINT)
        dev.communicate(timeout=180)
    hosts.wait_for_the_end_on("a", "b")


def test_the_hosts_of_the_page_hold_a_session(hosts):
    """Those of docs/sessions.md, with fewer workers."""
    start, on_slurm = page.commands(page.ELSEWHERE)
    assert on_slurm[3:5] == ["--on", "slurm"]  # in tests/cluster
    hosts.add_all("node1", "node2")
    page.write_files(hosts.code)
    words = ["2" if word == "8" else word for word in start[2:]]
    _, said = hosts.must(
        *words, "--python", sys.executable, command="session", MUSTER_PROGRESS="off"
    )
    assert "2 nodes of ssh: node1, node2" in said
    out, said = hosts.must("--session", "main", "train.py")
    assert "workers: 4" in out, said
    assert hosts.run("end", command="session")[0] == 0


def test_an_idle_session_frees_all_of_its_hosts(hosts):
    hosts.add_all("a", "b")
    words = ("start", "--hosts", "a,b", "--idle", "20s", "--python", sys.executable)
    hosts.must(*words, command="session", MUSTER_PROGRESS="off")
    (session,) = (hosts.home / "runs").glob("*-session-*")
    wait_until((session / "result.json").exists, "the session to end")
    hosts.wait_for_the_end_on("a", "b")


def test_the_site_s_interpreter_variables_and_scratch_hold_for_runs_in_its_session(hosts):
    homes = hosts.add_all("a", "b")
    for home in homes:
        make_venv(home / "env")
        (home / "scratch").mkdir()
    (hosts.code / "muster.toml").write_text(SITE)
    (hosts.code / "show.py").write_text(SHOW)
    _, said = hosts.must("start", "--on", "lab", command="session", MUSTER_PROGRESS="off")
    given = ("--env", "FROM_SITE=mine")
    for more, theirs in ((), "theirs"), (given, "mine"), ((), "theirs"):
        out, said = hosts.must("--session", "main", "--tee", "all", *more, "show.py")
        for rank, home in enumerate(homes):
            (line,) = [one for one in out.splitlines() if f"rank {rank} " in one]
            assert f"prefix {home}/env LOADED=yes LD_LIBRARY_PATH=/of/site" in line
            assert f"FROM_SITE={theirs} GONE=None {home}/scratch/" in line
            assert f" {home}/env/bin:" in line
        assert "does not exist" not in said
        assert "imports its modules again" not in said, "no import reads these"
    run = newest_run(hosts.home, "show").name
    assert hosts.run("end", command="session")[0] == 0
    out, said = hosts.must(run, command="restart")
    assert f"prefix {homes[0]}/env LOADED=yes LD_LIBRARY_PATH=/of/site FROM_SITE=theirs" in out


@pytest.mark.lab
def test_a_host_that_dies_with_a_run_ends_the_session_and_leaves_nothing_on_the_other(hosts):
    begin(hosts)
    words = ("start", "--hosts", "a,b", "--python", sys.executable)
    _, said = hosts.must(*words, command="session", MUSTER_PROGRESS="off")
    (session,) = (hosts.home / "runs").glob("*-session-*")
    client = hosts.start("--session", "main", "train.py", "wait", MUSTER_PROGRESS="off")
    wait_until(lambda: "answer" in client.stdout.readline(), "the first line")
    hosts.cut("b", for_good=True)
    _, said = client.communicate(timeout=120)
    assert client.returncode != 0
    assert "error: " in said
    wait_until((session / "result.json").exists, "the session to end", 300)
    hosts.wait_for_the_end_on("a")  # the host that lives
    code, _, said = hosts.run("--session", "main", "train.py")
    assert code in (4, 5)
    assert "error: the session main has ended" in said
