"""A project with a script, and sessions that end with their test."""

import json
import os
import signal
from pathlib import Path

import pytest

from kit.command import MUSTER, muster_env, run_muster, spawned
from kit.records import newest_run
from kit.waiting import wait_until
from torchmuster.core import proc

SCRIPT = """\
import os, sys
import model
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()  # torch waits for nobody at the end of init: a rank that leaves breaks one that still connects
if dist.get_rank() == 0:
    print("answer", model.ANSWER, "of", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""


class Place:
    """A project, a home, and the commands that are typed in it."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.home = self.folder / "home"
        self.project = self.folder / "project"
        self.project.mkdir()
        self.env = muster_env(self.home, MUSTER_PROGRESS="off")
        self.write("train.py", SCRIPT)
        self.write("model.py", "ANSWER = 0\n")

    def write(self, name, text):
        """Save a file of the project."""
        (self.project / name).write_text(text)

    def muster(self, *words, **more):
        """Run a command to its end."""
        return run_muster(*words, env={**self.env, **more}, cwd=self.project)

    def start(self, *words):
        """Start the session `main`."""
        done = self.muster("session", "start", *words)
        assert done.returncode == 0, done.stderr
        return self.session_dir()

    def session_dir(self):
        """Return the newest run directory of a session."""
        return newest_run(self.home, "session")

    def run(self, *words, **more):
        """Run the script in the session."""
        return self.muster("run", "--session", "main", *words, "train.py", **more)

    def doors(self):
        """Return the process of each door."""
        files = sorted((self.session_dir() / "doors").glob("*.json"))
        return [json.loads(file.read_text())["pid"] for file in files]

    def listed(self):
        """Return what `session list --json` says."""
        done = self.muster("session", "list", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def owner(self):
        """Return the process that owns the session."""
        return json.loads((self.session_dir() / "owner.json").read_text())["pid"]


@pytest.fixture
def place(tmp_path):
    """A project, whose sessions end with the test; no process of theirs is left."""
    made = Place(tmp_path)
    yield made
    for folder in (made.home / "runs").glob("*-session-*"):
        owner = json.loads((folder / "owner.json").read_text())["pid"]
        if proc.is_running(owner):
            os.kill(owner, signal.SIGKILL)
    wait_until(lambda: not processes_of(made), "all processes of the sessions to end")


def processes_of(place):
    """Return the living processes whose command line or variables name the home of this test."""
    mark, found = str(place.home).encode(), []
    for facts in proc.all_processes():
        try:
            words = Path(f"/proc/{facts.pid}/environ").read_bytes()
        except OSError:
            continue
        if mark in words and proc.is_running(facts.pid):
            found.append(facts.pid)
    return found


def begin(place):
    """Start a run in the session and return its client."""
    argv = [*MUSTER, "run", "--session", "main", "train.py"]
    return spawned(argv, env=place.env, cwd=place.project)


WAITING = """\
import os, pathlib, time, torch.distributed as dist
dist.init_process_group("gloo")
pathlib.Path(f"began-{os.environ['RANK']}").write_text(str(os.getpid()))
while not pathlib.Path("go").exists():
    time.sleep(0.02)
dist.destroy_process_group()
"""


def waiting_run(place, num_workers=2):
    """Begin a run that waits to be let go; return its client and its workers when all have met."""
    place.write("train.py", WAITING)
    client = begin(place)
    return client, workers_of(place, num_workers)


def workers_of(place, num_workers=2):
    """Wait for the workers of an attempt, and return their processes; their files are removed."""
    files = [place.project / f"began-{rank}" for rank in range(num_workers)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), "the workers")
    pids = [int(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return pids


def let_go(place, client):
    """Let a waiting run end well; return what its client has said."""
    (place.project / "go").touch()
    said, _ = client.communicate(timeout=180)
    assert client.returncode == 0, said
    return said
