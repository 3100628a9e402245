"""Sessions over the nodes of a real Slurm: inside a job of `salloc`, and as a job of their own."""

import json
import os
import re
import signal
import sys

import pytest

from kit import sessions_page as page
from kit.command import MUSTER
from kit.records import newest_run
from kit.venvs import make_venv
from kit.waiting import wait_until

SCRIPT = """
import os, sys, model, torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
host = os.uname().nodename
os.write(1, f"answer {model.ANSWER} sum {int(ones.item())} rank {dist.get_rank()} on {host}\\n".encode())
if sys.argv[1:] == ["wait"]:
    import signal
    signal.pause()
dist.destroy_process_group()
"""
OTHER = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
os.write(1, f"other {dist.get_world_size()} {os.environ.get('MINE')}\\n".encode())
dist.destroy_process_group()
"""
SHOW = """
import os, sys
names = ("LOADED", "LD_LIBRARY_PATH", "FROM_SITE", "MINE")
said = [f"rank {os.environ['RANK']} prefix {sys.prefix}", *(f"{n}={os.environ.get(n)}" for n in names)]
os.write(1, " ".join([*said, os.environ["MUSTER_SCRATCH"], "\\n"]).encode())
"""
SITE = """
[engines.here]
kind = "slurm"
scratch = "{folder}/scratch"
setup = ["unset PYTHONPATH", "source '{folder}/own/bin/activate'", "export LOADED=yes LD_LIBRARY_PATH=/of/site"]
[engines.here.environment]
FROM_SITE = "theirs"
"""


class HeldJob:
    """A job of `salloc` whose shell, on the login node, waits until the test ends it."""

    def __init__(self, login):
        self.login = login
        login.script(SCRIPT)
        self.write("model.py", "ANSWER = 0\n")
        self.write("other.py", OTHER)
        tell = 'env -0 > shell.new && mv shell.new shell && read -r _; echo "shell ends"'
        words = ["salloc", "-N2", "--ntasks-per-node=1", "bash", "-c", tell]
        self.shell = login.popen(words, stdin=-1, stdout=-3)
        told = login.folder / "shell"
        wait_until(told.exists, "the job")
        lines = told.read_bytes().decode().split("\0")
        every = dict(line.partition("=")[::2] for line in lines if line)
        self.env = {k: v for k, v in every.items() if k.startswith("SLURM_")}
        self.job = self.env["SLURM_JOB_ID"]

    def write(self, name, text):
        """Save a file of the project."""
        (self.login.folder / name).write_text(text)

    def muster(self, *words, **more):
        """Type a command in the job's shell, to its end."""
        return self.login(*words, **self.env, MUSTER_PROGRESS="off", **more)

    def begin(self, *words):
        """Start a command and leave it alone."""
        env = self.login.env | self.env | {"MUSTER_PROGRESS": "off"}
        options = {"stdin": -3, "stdout": -1, "stderr": -2, "text": True}
        return self.login.popen([*MUSTER, *words], env=env, **options)

    def begin_to_wait(self):
        """Start the script in the session, where it waits."""
        client = self.begin("run", "--session", "main", "--tee", "all", "train.py", "wait")
        wait_until(lambda: "sum 2" in client.stdout.readline(), "the first line")
        return client

    def end(self):
        """End the shell, and with it the job."""
        self.shell.stdin.close()
        self.shell.wait(30)

    def run_of(self, script):
        """Return the newest run directory of a script."""
        return newest_run(self.login.folder / "home", script)


@pytest.fixture
def held(login):
    """A job with two nodes."""
    made = HeldJob(login)
    yield made
    if made.shell.poll() is None:
        made.end()


def _ours(lab, node, word):
    return [pid for pid, words in lab.commands_on(node).items() if word in b"\0".join(words)]


def _wait_for_the_end_on(lab, *nodes):
    for node in nodes:
        wait_until(lambda node=node: not _ours(lab, node, b"torchmuster"), f"the end on {node}")


def test_two_scripts_and_an_edit_run_on_the_nodes_of_a_job(held, slurm_lab):
    begun = held.muster("session", "start", "--nproc-per-node", "2")
    assert begun.returncode == 0, begun.stderr
    assert f"2 nodes of job {held.job} of slurm: n1, n2" in begun.stderr

    first = held.muster("run", "--session", "main", "--tee", "all", "train.py")
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("answer 0 sum 4") == 4
    assert {f"on n{node}" in first.stdout for node in (1, 2)} == {True}
    held.write("model.py", "ANSWER = 1\n")
    second = held.muster("run", "--session", "main", "--tee", "all", "train.py")
    assert second.stdout.count("answer 1 sum 4") == 4, second.stderr
    other = held.muster("run", "--session", "main", "other.py", MINE="of the shell")
    assert "other 4 of the shell" in other.stdout, other.stderr
    assert "imports its modules again" not in other.stderr, "no import has read it"

    run = held.run_of("train")
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["session"], plan["engine"], plan["job_id"]) == ("main", "slurm", held.job)
    assert plan["node_names"] == ["n1", "n2"]
    assert "answer 1" in held.muster("logs", run.name).stdout
    (listed,) = json.loads(held.muster("session", "list", "--json").stdout)
    assert listed["door"]["num_runs"] == 3
    assert listed["where"] == f"job {held.job} of slurm: n1, n2"

    wide = held.muster("run", "--session", "main", "--nodes", "3", "train.py")
    assert wide.returncode == 2
    assert "the session main has 2 nodes" in wide.stderr
    assert held.muster("session", "end").returncode == 0
    _wait_for_the_end_on(slurm_lab, "n1", "n2")
    assert held.shell.poll() is None  # the job is the user's


@pytest.mark.lab
def test_a_run_is_cancelled_and_a_killed_client_leaves_the_session(held, slurm_lab):
    assert held.muster("session", "start").returncode == 0
    client = held.begin_to_wait()
    run = held.run_of("train").name
    busy = held.muster("run", "--session", "main", "train.py")
    assert busy.returncode == 2
    assert "error: the session main is busy" in busy.stderr
    assert held.muster("cancel", run).returncode == 0
    client.communicate(timeout=180)
    assert client.returncode != 0

    killed = held.begin_to_wait()
    os.kill(_client_of(slurm_lab), signal.SIGKILL)
    killed.communicate(timeout=180)
    again = held.muster("run", "--session", "main", "train.py")
    assert again.returncode == 0, again.stderr
    assert "answer 0 sum 2" in again.stdout


def _client_of(lab):
    words = [sys.executable, "-m", "torchmuster", "run", "--session"]
    mark = "\0".join(words).encode()
    return wait_until(lambda: _ours(lab, "login", mark), "the client")[-1]


def test_the_end_of_the_job_is_the_end_of_its_session(held):
    assert held.muster("session", "start").returncode == 0
    held.end()

    def refused():  # at first its nodes may not answer, before its end is known
        done = held.muster("run", "--session", "main", "train.py")
        return done if "error: the session main has ended" in done.stderr else None

    done = wait_until(refused, "the end of the session", 60.0)
    assert done.returncode in (4, 5), done.stderr
    assert "muster session start --name main" in done.stderr


def test_a_node_that_dies_with_a_run_ends_the_job_and_its_session(held, slurm_lab):
    assert held.muster("session", "start").returncode == 0
    client = held.begin_to_wait()
    slurm_lab.kill_node("n2")
    client.communicate(timeout=120)
    assert client.returncode != 0
    _wait_for_the_end_on(slurm_lab, "n1")
    done = held.muster("run", "--session", "main", "train.py")
    assert done.returncode in (4, 5), done.stderr
    assert "error: the session main has ended" in done.stderr


def test_a_session_is_a_job_of_its_own(login, slurm_lab):
    login.script(SCRIPT)
    (login.folder / "model.py").write_text("ANSWER = 0\n")
    words = ("--on", "slurm", "--nodes", "2", "--nproc-per-node", "2", "--time", "20m")
    begun = login("session", "start", *words, MUSTER_PROGRESS="off")
    assert begun.returncode == 0, begun.stderr
    assert "is running on n1, n2" in begun.stderr

    done = login("run", "--session", "main", "--tee", "all", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("answer 0 sum 4") == 4
    ended = login("session", "end")
    assert ended.returncode == 0, ended.stderr
    wait_until(lambda: not slurm_lab.run(["squeue", "-h"]).stdout, "the end of the job")


def test_the_site_s_setup_holds_for_runs_in_its_session_whatever_the_login_node_has(
    login, slurm_lab
):
    make_venv(login.folder / "own")
    (login.folder / "scratch").mkdir()
    (login.folder / "muster.toml").write_text(SITE.format(folder=login.folder))
    (login.folder / "show.py").write_text(SHOW)
    begun = login("session", "start", "--on", "here", "--nodes", "2", "--time", "20m")
    assert begun.returncode == 0, begun.stderr
    theirs = {"LD_LIBRARY_PATH": "/of/login", "FROM_SITE": "mine"}
    for mine in ("1", None, None):
        done = login(
            *("run", "--session", "main", "--tee", "all", "show.py"),
            **theirs,
            **({"MINE": mine} if mine else {}),
        )
        assert done.returncode == 0, done.stderr
        for rank in (0, 1):
            (line,) = [one for one in done.stdout.splitlines() if f"rank {rank} " in one]
            assert f"prefix {login.folder}/own LOADED=yes LD_LIBRARY_PATH=/of/site" in line
            assert f"FROM_SITE=theirs MINE={mine} {login.folder}/scratch/" in line
    assert "imports its modules again" not in done.stderr
    assert login("session", "end").returncode == 0
    wait_until(lambda: not slurm_lab.run(["squeue", "-h"]).stdout, "the end of the job")


def test_dev_runs_saved_code_on_the_nodes_of_a_job_and_ends_its_session(held, slurm_lab):
    dev = held.begin("dev", "--nproc-per-node", "2", "--tee", "all", "train.py")
    seen = _read_until(dev.stdout, "waiting for a change")
    assert sum("answer 0 sum 4" in line for line in seen) == 4
    (listed,) = json.loads(held.muster("session", "list", "--json").stdout)
    assert listed["where"] == f"job {held.job} of slurm: n1, n2"
    assert listed["name"].startswith("dev-")
    held.write("model.py", "ANSWER = 1\n")
    seen = _read_until(dev.stdout, "saved model.py")
    assert sum("answer 1 sum 4" in line for line in seen) == 4
    mark = f"{sys.executable}\0-m\0torchmuster\0dev".encode()
    os.kill(min(_ours(slurm_lab, "login", mark)), signal.SIGINT)
    dev.communicate(timeout=180)
    _wait_for_the_end_on(slurm_lab, "n1", "n2")
    assert held.shell.poll() is None


def _read_until(lines, text):
    """Return the lines of a command up to one with this text."""
    seen = []
    for line in lines:
        seen.append(line)
        if text in line:
            return seen
    raise AssertionError(f"it ended without `{text}`: {''.join(seen)}")


# What docs/sessions.md shows, with fewer workers.


def _fewer(words):
    return ["2" if word == "8" else word for word in words[1:]]


def test_the_commands_of_the_page_work_in_a_job(held):
    salloc, start, run = page.commands(page.IN_A_JOB)
    assert salloc[:3] == ["salloc", "--nodes", "2"]
    page.write_files(held.login.folder)
    begun = held.muster(*_fewer(start))
    assert begun.returncode == 0, begun.stderr
    (pattern,) = page.shown(page.IN_A_JOB)
    assert re.search(pattern, begun.stderr), begun.stderr
    done = held.muster(*_fewer(run))
    assert (done.returncode, "workers: 4" in done.stdout) == (0, True), done.stderr


def test_the_job_of_the_page_holds_a_session(login):
    on_hosts, start = page.commands(page.ELSEWHERE)
    assert "--hosts" in on_hosts  # in tests/ssh
    page.write_files(login.folder)
    begun = login(*_fewer(start), MUSTER_PROGRESS="off")
    assert begun.returncode == 0, begun.stderr
    pending, *others = page.shown(page.ELSEWHERE)
    assert pending.endswith("pending")  # for a moment, which may be over
    for pattern in others:
        assert re.search(pattern, begun.stderr), (pattern, begun.stderr)
    done = login("run", "--session", "big", "train.py", MUSTER_PROGRESS="off")
    assert (done.returncode, "workers: 4" in done.stdout) == (0, True), done.stderr
    assert login("session", "end", "big").returncode == 0
