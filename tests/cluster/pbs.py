"""A pretended PBS for tests: its commands on PATH, its state in a folder, and waiting for what a job does.

    def test_it(pbs):
        job = pbs.submit("sleep 1", "-l", "select=2:ncpus=2:mpiprocs=1", "-l", "place=scatter")
        assert pbs.wait(job, "F")["Exit_status"] == 0

`pbs.environment` is that of a login node. `pbs.settings(kill_delay_s=5, history=False)` changes the server before any
job, `pbs.change(lost=["n2"])` while jobs run.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.user import User
from kit.command import muster_env, ran
from kit.waiting import wait_until

# Notes each step with the time, its host, its attempt and its spawner; ends when there is a file. Nothing of ours protects the notes.
NOTES = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
words = (os.uname().nodename, os.environ["TORCHELASTIC_RESTART_COUNT"], os.getppid())
go_on = True
while go_on:
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        with open("steps", "a") as steps:
            print(time.time(), *words, file=steps)
    end = torch.tensor([os.path.exists("end") and dist.get_rank() == 0], dtype=torch.int)
    dist.broadcast(end, 0)
    go_on = not end.item()
    time.sleep(0.05)
"""
FAKES = Path(__file__).parents[1] / "fakes" / "pbs"


class FakePbs:
    """The server and its two hosts, n1 and n2, of 8 ncpus and 4 ngpus each.

    Attributes:
        state: The folder of the queue; `home` in it is the user's home on the hosts.
        environment: What a shell on the login node has.
        folder: Where commands run.
        muster: The user, whose home is in `folder`.
    """

    def __init__(self, folder):
        self.folder = folder
        self.state = folder / "pbs"
        self.state.mkdir()
        self.home = self.state / "home"
        self.home.mkdir()
        # The commands' first line asks for a python3: this one.
        path = f"{FAKES}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "FAKE_PBS": str(self.state)}
        self.environment = os.environ | own
        self.muster = User(folder, muster_env(folder / "home", **own))
        self._scripts = 0

    def call(self, *words, limit_s=30):
        """Run a command as on the login node; its texts and exit code."""
        return ran(words, limit_s=limit_s, cwd=self.folder, env=self.environment)

    def settings(self, **values):
        """Change what the server is like, before any job: hosts, queues, history, kill_delay_s, walltime_lag_s."""
        (self.state / "queue.json").write_text(json.dumps(values))

    def change(self, **values):
        """Change what the server is like while jobs run: `lost` hosts, `is_down`."""
        with self._state() as data:
            data.update(values)

    def end(self, job_id, words):
        """End a job as mom does, for a limit that it breaks: `mem 799544kb exceeded limit 716800kb`."""
        with self._state() as data:
            data["jobs"][job_id]["breaks"] = words

    def start_elsewhere(self, job_id):
        """Start a job's script once more beside its processes; return the process.

        Recorded: the server does that with a first host that it can't reach, `node_fail_requeue` seconds
        later, under the same id; what runs there lives on, and its disk may be the same.
        """
        (script,) = self.pids_of(job_id, "script")
        environment = Path(f"/proc/{script}/environ").read_bytes().split(b"\0")
        words = Path(f"/proc/{script}/cmdline").read_bytes().split(b"\0")[:-1]
        with open(self.view(job_id)["Output_Path"].partition(":")[2], "a") as output:
            return subprocess.Popen(
                words,
                cwd=self.home,
                env=dict(os.fsdecode(one).split("=", 1) for one in environment if b"=" in one),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def restart_server(self):
        """End the server and start it again while jobs run. Recorded: it forgets what it had said of them."""
        with self._state() as data:
            for job in data["jobs"].values():
                job["comment"] = None

    @contextlib.contextmanager
    def _state(self):
        with open(self.state / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = self.state / "queue.json"
            data = json.loads(path.read_text())
            yield data
            new = path.with_suffix(".mine")
            new.write_text(json.dumps(data))
            new.replace(path)

    def sessions(self, job):
        """Return the sessions that the hosts' daemons know as the job's."""
        return {int(pid) for pid in self._job(job)["pids"]}

    def pids_of(self, job, what):
        """Return the pids of the script (`script`) or of the tasks on a host (`n2`)."""
        return [int(pid) for pid, where in self._job(job)["pids"].items() if where == what]

    def _job(self, job):
        return json.loads((self.state / "queue.json").read_text())["jobs"][job]

    def submit(self, commands, *words):
        """Submit a script of these commands with these options of qsub; its id."""
        self._scripts += 1
        script = self.folder / f"job{self._scripts}.sh"
        script.write_text(f"#!/bin/bash\n#PBS -j oe\n{commands}\n")
        done = self.call("qsub", *words, str(script))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def view(self, job):
        """Return what `qstat -x -f -F json` says of a job."""
        done = self.call("qstat", "-x", "-f", "-F", "json", job)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["Jobs"][job]

    def wait(self, job, state="F", limit_s=60.0):
        """Wait for a state of a job; return its view then."""
        wait_until(lambda: self.view(job)["job_state"] == state, f"{job} to be {state}", limit_s)
        return self.view(job)

    def output(self, job):
        """Return what a job wrote; it comes when the job is over."""
        return Path(self.view(job)["Output_Path"].partition(":")[2]).read_text()

    def processes(self):
        """Return the pids of all servers, scripts and tasks that still run."""
        return [int(name) for name in os.listdir("/proc") if name.isdecimal() and self._owns(name)]

    def _owns(self, pid):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return state not in "ZX" and f"FAKE_PBS={self.state}".encode() in variables

    def living(self):
        """Return the ids of the jobs that have not ended."""
        path = self.state / "queue.json"
        jobs = json.loads(path.read_text()).get("jobs", {}) if path.exists() else {}
        return [name for name, job in jobs.items() if job["state"] != "F"]

    def started_at(self, job):
        """Return when a job was started, in seconds since 1970."""
        return self._job(job)["started"]

    def close(self):
        """End all jobs and see that nothing of them is left; new ones may follow."""
        if living := self.living():
            self.call("qdel", *living)
        try:
            # What has left the job's sessions is not ended by PBS: it has to go by itself.
            wait_until(lambda: not self.processes(), "the jobs to end")
        finally:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def pbs(tmp_path):
    """Return a pretended PBS; its jobs end with the test."""
    fake = FakePbs(tmp_path)
    yield fake
    fake.close()
