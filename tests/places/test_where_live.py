"""Cells of docs/where.md that are really started: what the page says of starts, ends, Ctrl-C and what is left."""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from cluster.netns import Nodes
from cluster.pbs import FakePbs
from cluster.slurm import INSIDE, FakeSlurm
from kit import missing
from kit.command import MUSTER, muster_env, run_muster, spawned
from kit.namespaces import why_no_networks
from kit.waiting import wait_until
from ssh import hosts as ssh
from sweeps.test_pods_live import Lab
from torchmuster.core import proc

# It needs no torch. What it writes says where it ran; it stays as long as it is held, and ends well after a stop.
SCRIPT = """
import json, os, signal, sys, time
folder, name = sys.argv[1:3]
name += os.environ.get("MUSTER_SWEEP_N", "")
rank = os.environ.get("RANK", "0")
def note(word, **what):
    with open(f"{folder}/new-{name}-{rank}", "w") as file:
        json.dump(what, file)
    os.replace(file.name, f"{folder}/{word}-{name}-{rank}")
def stop(signum, frame):
    note("stopped")
    os._exit(1)
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, stop)
above, pid = [], os.getpid()
while pid > 1:
    above.append(pid)
    with open(f"/proc/{pid}/stat") as file:
        pid = int(file.read().rpartition(")")[2].split()[1])
note("began", host=os.uname().nodename, above=above, variables=dict(os.environ))
while os.path.exists(f"{folder}/hold-{name}"):
    time.sleep(0.02)
if os.path.exists(f"{folder}/fail-{name}"):
    sys.exit(3)
"""
WORKFLOW = """
workflow:
  name: two
  groups:
  - name: first
    tasks:
    - name: maker
      command: [bash, -c, "echo 7 > {{output}}/n; exec PYTHON 'CODE/fit.py' 'MARKS' NAMEm"]
  - name: second
    tasks:
    - name: reader
      command: [bash, -c, "grep 7 {{input:0}}/n && exec PYTHON 'CODE/fit.py' 'MARKS' NAMEr"]
      inputs: [{task: maker}]
"""


class Place:
    """A column of the page: a project, what is typed for the place, and what the script has left."""

    on = ()

    def __init__(self, code, home, env):
        self.code, self.home, self.env = code, home, env
        self.folder = code.parent
        self.marks = code / "marks"
        self.marks.mkdir(parents=True)
        (code / "fit.py").write_text(SCRIPT)
        self.before = set()

    def close(self):
        """End what the place has of its own."""

    def is_there(self, said, name):
        """Say whether the script's words are of a process at this place."""
        raise NotImplementedError

    def __call__(self, *words):
        return run_muster(*words, env=self.env, cwd=self.code)

    def words(self, command, name, *more):
        """Return the words of a command at this place, whose run has this name."""
        if command == "submit":
            text = WORKFLOW.replace("NAME", name).replace("PYTHON", sys.executable)
            text = text.replace("CODE", str(self.code)).replace("MARKS", str(self.marks))
            (self.code / f"{name}.yaml").write_text(text)
            return command, f"{name}.yaml", *self.on, "--run-id", name, *more
        grid = ("--grid", "n=0:2", "--style", "env") if command == "sweep" else ()
        script = ("fit.py", *(["--"] if grid else []), str(self.marks), name)
        start = () if "--session" in self.on else ("--start", "fresh")
        return command, *self.on, "--run-id", name, *grid, *start, *more, *script

    @contextlib.contextmanager
    def begun(self, *words):
        """Start a command, with what it says in a file; it ends with the block."""
        with open(self.folder / "said", "w+") as file:
            client = spawned([*MUSTER, *words], env=self.env, cwd=self.code, stdout=file)
            client.said = (self.folder / "said").read_text
            try:
                yield client
            finally:
                client.kill()
                client.wait()

    def again(self, name):
        """Restart a run; return the name of the new one."""
        before = self.runs()
        done = self("restart", name)
        assert done.returncode == 0, done.stderr
        (new,) = set(self.runs()) - set(before)
        return new

    def state(self, name):
        return self.status(name)["state"]

    def members(self, name):
        return [member["state"] for member in self.status(name)["members"]]

    def status(self, name):
        return json.loads(self("status", name, "--json").stdout)

    def hold(self, *names):
        for name in names:
            (self.marks / f"hold-{name}").touch()

    def release(self, *names):
        for name in names:
            (self.marks / f"hold-{name}").unlink()

    def ran(self, name, word="began"):
        """Return what each rank of a script has written; all of it is from this place."""
        found = [json.loads(path.read_text()) for path in self.marks.glob(f"{word}-{name}-*")]
        if word == "began":
            assert all(self.is_there(one, name) for one in found), found
        return found

    def left(self):
        """Return the processes that were not there before any run, and jobs."""
        return [pid for pid in self.processes() if pid not in self.before]

    def processes(self):
        found, mark = [], str(self.folder).encode()
        for facts in proc.all_processes():
            try:
                texts = [
                    Path(f"/proc/{facts.pid}/{file}").read_bytes()
                    for file in ("environ", "cmdline")
                ]
            except OSError:
                continue
            if any(mark in text for text in texts) and proc.is_running(facts.pid):
                found.append(facts.pid)
        return found

    def assert_nothing_is_left(self):
        wait_until(lambda: not self.left(), "the end of all that was started")

    def runs(self):
        return sorted(path.name for path in self.home.glob("runs/*"))


class Here(Place):
    on = ("--here",)

    def __init__(self, folder):
        super().__init__(folder / "code", folder / "home", muster_env(folder / "home"))

    def is_there(self, said, name):
        return said["host"] == os.uname().nodename and "SLURM_JOB_ID" not in said["variables"]


class InsideJobPlace(Place):
    def __init__(self, folder):
        env = FakeSlurm(folder).env | INSIDE
        super().__init__(folder / "code", folder / "home", env)

    def is_there(self, said, name):
        return said["variables"].get("SLURM_JOB_ID") == "7"


class SshHosts(Place):
    on = ("--on", "lab")

    def __init__(self, folder):
        if (reason := ssh.why_not()) is not None:
            missing.stop(reason)
        self.hosts = ssh.SshHosts(folder)
        for name in ("a", "b"):
            self.hosts.add(name, shares=True)
        super().__init__(self.hosts.code, self.hosts.home, self.hosts.environment())
        site = f'[engines.lab]\nkind = "ssh"\nhosts = ["a", "b"]\npython = ["{sys.executable}"]\n'
        (self.code / "muster.toml").write_text(site)
        self.folder = folder

    def close(self):
        self.hosts.close()

    def is_there(self, said, name):
        return said["variables"]["HOME"] in [str(self.folder / f"host-{x}/home") for x in "ab"]


class Scheduler(Place):
    on = ("--on", "pbs")

    def __init__(self, folder):
        self.pbs = FakePbs(folder)
        super().__init__(folder / "code", folder / "home", self.pbs.muster.env)

    def close(self):
        self.pbs.close()

    def is_there(self, said, name):
        return said["variables"].get("PBS_JOBID", "").endswith(".ctl")

    def left(self):
        return [*super().left(), *self.pbs.living()]


class Cluster(Place):
    on = ("--on", "kube")

    def __init__(self, folder):
        if (reason := why_no_networks()) is not None:
            missing.stop(reason)
        self.network = Nodes(6)
        self.network.__enter__()
        self.lab = Lab(folder, self.network)
        super().__init__(folder / "code", folder / "home", self.lab.env())

    def close(self):
        for job in self.lab.jobs():
            (self.lab.state / job / "deleted").touch()
        wait_until(lambda: not self.lab.jobs(), "the end of all pods")
        self.network.__exit__(None, None, None)

    def is_there(self, said, name):
        return said["host"].split("-")[0] == name.rstrip("01mr")

    def left(self):
        return [*super().left(), *self.lab.jobs()]

    def asks(self):
        """Say whether a kubectl of ours runs."""
        lines = [Path(f"/proc/{pid}/cmdline") for pid in self.left() if isinstance(pid, int)]
        return any(b"/kubectl" in line.read_bytes() for line in lines)

    @contextlib.contextmanager
    def silent(self):
        """Let each kubectl wait for an answer, as from a cluster that gives none."""
        nodes = self.lab.state / "nodes.json"
        text = nodes.read_text()
        nodes.unlink()
        os.mkfifo(nodes)
        yield
        nodes.unlink()
        nodes.write_text(text)


class Session(Here):
    on = ("--session", "main")

    def __init__(self, folder):
        super().__init__(folder)
        assert self("session", "start", "--here", "--nodes", "2").returncode == 0

    def close(self):
        assert self("session", "end").returncode == 0
        wait_until(lambda: not self.processes(), "the end of the session")

    def doors(self):
        files = self.home.glob("runs/*-session-*/doors/*.json")
        return {json.loads(file.read_text())["pid"] for file in files}

    def is_there(self, said, name):
        return bool(self.doors() & set(said["above"]))

    def left(self):
        """Return the script's processes: a door keeps some for the next run."""
        began = [json.loads(path.read_text()) for path in self.marks.glob("began-*")]
        return [one["above"][0] for one in began if proc.is_running(one["above"][0])]


PLACES = {
    "here": Here,
    "in a job": InsideJobPlace,
    "hosts": SshHosts,
    "scheduler": Scheduler,
    "cluster": Cluster,
    "session": Session,
}


@pytest.fixture(scope="module")
def made(request, tmp_path_factory):
    place = PLACES[request.param](tmp_path_factory.mktemp("place"))
    place.before = set(place.processes())
    yield place
    place.close()


def at(*names):
    return pytest.mark.parametrize("made", names, indirect=True, scope="module")


ALL = at(*PLACES)
OWNED = at("here", "in a job", "hosts", "session")
TWO = ("--nodes", "2")


def interrupt(client):
    """Press Ctrl-C in a command that owns what runs, once it listens; return its exit code."""

    def listens():
        lines = Path(f"/proc/{client.pid}/status").read_text().splitlines()
        (caught,) = [line for line in lines if line.startswith("SigCgt:")]
        return int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1

    wait_until(listens, "a handler of SIGTERM")
    client.send_signal(signal.SIGINT)
    return client.wait(60)


@ALL
def test_a_run_succeeds(made):
    made.hold("ok")
    # What ends before it is reached is lost with its pod.
    record = made.home / "runs" / "ok" / "events.jsonl"
    with made.begun(*made.words("run", "ok", *TWO)) as client:
        wait_until(lambda: record.exists() and len(made.ran("ok")) == 2, "the script")
        made.release("ok")
        assert client.wait(60) == 0, client.said()
    assert made.state("ok") == "succeeded"
    assert len(made.ran("ok")) == 2
    made.assert_nothing_is_left()


@at("here", "scheduler", "session")
def test_a_detached_run_is_waited_for(made):
    made.hold("back")
    done = made(*made.words("run", "back", "--detach"))
    assert (done.returncode, done.stdout) == (0, "back\n"), done.stderr
    wait_until(lambda: made.ran("back"), "the script")
    assert made.state("back") == "running"
    made.release("back")
    assert made("wait", "back").returncode == 0
    assert made.state("back") == "succeeded"
    made.assert_nothing_is_left()


@OWNED
def test_ctrl_c_ends_a_run_with_its_grace_and_it_runs_again(made):
    made.hold("stop")
    with made.begun(*made.words("run", "stop", *TWO)) as client:
        wait_until(lambda: len(made.ran("stop")) == 2, "the script")
        client.send_signal(signal.SIGINT)  # at once: the owner may not listen in its loop yet
        assert client.wait(60) == 130, client.said()
    assert len(made.ran("stop", "stopped")) == 2
    assert made.state("stop") == "cancelled"
    made.assert_nothing_is_left()
    made.release("stop")
    assert made.state(made.again("stop")) == "succeeded"
    made.assert_nothing_is_left()


@at("scheduler")
def test_ctrl_c_leaves_a_job_alone(made):
    made.hold("alone")
    with made.begun(*made.words("run", "alone")) as client:
        wait_until(lambda: made.ran("alone") and "is running" in client.said(), "the script")
        client.send_signal(signal.SIGINT)
        assert client.wait(60) == 130, client.said()
    assert "continues; again within 3 s cancels it" in client.said()
    assert made.state("alone") == "running"
    made.release("alone")
    assert made("wait", "alone").returncode == 0
    assert made.state("alone") == "succeeded"
    assert not made.ran("alone", "stopped")
    made.assert_nothing_is_left()


@at("scheduler")
def test_a_second_ctrl_c_cancels_a_job_and_it_runs_again(made):
    made.hold("twice")
    with made.begun(*made.words("run", "twice")) as client:
        wait_until(lambda: made.ran("twice") and "is running" in client.said(), "the script")
        client.send_signal(signal.SIGINT)
        wait_until(lambda: "again within 3 s" in client.said(), "its answer")
        client.send_signal(signal.SIGINT)
        assert client.wait(60) == 143, client.said()
    assert made.ran("twice", "stopped")
    assert made.state("twice") == "cancelled"
    made.assert_nothing_is_left()
    made.release("twice")
    assert made.state(made.again("twice")) == "succeeded"
    made.assert_nothing_is_left()


@at("scheduler")
def test_ctrl_c_leaves_a_job_in_its_queue_and_a_cancel_takes_it_out(made):
    made.pbs.change(stopped=["workq"])
    with made.begun(*made.words("run", "queued")) as client:
        wait_until(lambda: "is pending" in client.said(), "that it waits")
        client.send_signal(signal.SIGINT)
        assert client.wait(60) == 130, client.said()
    assert made.state("queued") == "waiting"
    assert len(made.pbs.living()) == 1
    assert made("cancel", "queued").returncode == 0
    assert made.state("queued") == "cancelled"
    made.assert_nothing_is_left()
    made.pbs.change(stopped=[])
    assert not made.ran("queued")
    assert made.state(made.again("queued")) == "succeeded"
    made.assert_nothing_is_left()


@at("scheduler")
def test_a_second_ctrl_c_takes_a_job_out_of_its_queue(made):
    made.pbs.change(stopped=["workq"])
    with made.begun(*made.words("run", "never")) as client:
        wait_until(lambda: "is pending" in client.said(), "that it waits")
        client.send_signal(signal.SIGINT)
        wait_until(lambda: "again within 3 s" in client.said(), "its answer")
        client.send_signal(signal.SIGINT)
        assert client.wait(60) == 130, client.said()
    assert made.state("never") == "cancelled"
    made.pbs.change(stopped=[])
    made.assert_nothing_is_left()


@at("here", "in a job", "session")
@pytest.mark.parametrize("command", ["run", "sweep", "submit"])
def test_ctrl_c_at_the_start_leaves_nothing_or_a_cancelled_run(made, command):
    if (command, type(made)) == ("submit", Session):
        return  # refused
    before, name = made.runs(), f"at-once-{command}"
    with made.begun(*made.words(command, name)) as client:
        wait_until(lambda: made.runs() != before, "its directory")
        client.send_signal(signal.SIGINT)
        assert client.wait(60) == 130, client.said()
    assert made.runs() == before or made.state(name) == "cancelled"
    made.assert_nothing_is_left()


@at("cluster")
@pytest.mark.parametrize("command", ["run", "sweep", "submit"])
def test_ctrl_c_before_the_start_leaves_nothing(made, command):
    before = made.runs()
    with made.silent(), made.begun(*made.words(command, "early")) as client:
        wait_until(made.asks, "a question to the cluster")
        client.send_signal(signal.SIGINT)
        assert client.wait(60) == 130, client.said()
        made.assert_nothing_is_left()
    assert made.runs() == before


@at("here", "scheduler")
def test_a_failed_run_runs_again(made):
    (made.marks / "fail-bad").touch()
    done = made(*made.words("run", "bad", "--max-restarts", "0"))
    assert done.returncode == 3, done.stderr
    assert made.state("bad") == "failed"
    (made.marks / "fail-bad").unlink()
    assert made.state(made.again("bad")) == "succeeded"
    made.assert_nothing_is_left()


@at("here", "in a job", "hosts", "scheduler", "session")
def test_a_sweep_succeeds(made):
    done = made(*made.words("sweep", "two"))
    assert done.returncode == 0, done.stderr
    assert made.members("two") == ["succeeded"] * 2
    assert all(made.ran(f"two{n}") for n in (0, 1))
    made.assert_nothing_is_left()


@at("here", "in a job")
def test_ctrl_c_ends_a_sweep_and_it_goes_on(made):
    made.hold("cut0", "cut1")
    with made.begun(*made.words("sweep", "cut")) as client:
        wait_until(lambda: made.ran("cut0"), "the first member")
        assert interrupt(client) == 130, client.said()
    assert made.ran("cut0", "stopped")
    assert made.members("cut")[0] == "cancelled"
    made.assert_nothing_is_left()
    made.release("cut0", "cut1")
    assert made("restart", "cut").returncode == 0
    assert made.members("cut") == ["succeeded"] * 2
    made.assert_nothing_is_left()


@at("here", "in a job", "hosts", "scheduler")
def test_a_workflow_succeeds(made):
    done = made(*made.words("submit", "flow"))
    assert done.returncode == 0, done.stderr
    assert made.state("flow") == "succeeded"
    assert all(made.ran(f"flow{task}") for task in "mr")
    made.assert_nothing_is_left()


@at("here", "in a job", "hosts")
def test_ctrl_c_ends_a_workflow_and_it_goes_on(made):
    made.hold("partr")
    with made.begun(*made.words("submit", "part")) as client:
        wait_until(lambda: made.ran("partr"), "the second task")
        assert interrupt(client) == 130, client.said()
    assert made.ran("partr", "stopped")
    assert made.state("part") == "cancelled"
    made.assert_nothing_is_left()
    made.release("partr")
    assert made.state(made.again("part")) == "succeeded"
    made.assert_nothing_is_left()


@at("in a job", "hosts", "scheduler")
def test_a_session_runs_a_script_and_ends(made):
    begun = made("session", "start", *made.on, "--name", "kept")
    assert begun.returncode == 0, begun.stderr
    done = made("run", "--session", "kept", "--run-id", "held", "fit.py", str(made.marks), "held")
    assert done.returncode == 0, done.stderr
    assert made.ran("held")
    assert made("session", "end", "kept").returncode == 0
    assert made.state("held") == "succeeded"
    made.assert_nothing_is_left()
