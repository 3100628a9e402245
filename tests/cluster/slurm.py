"""A pretended Slurm for tests: its commands on PATH, its state in a folder."""

import json
import os
from pathlib import Path

import pytest

from cluster.user import User
from kit.command import muster_env
from kit.waiting import wait_until

# What a shell in a job of two nodes has.
INSIDE = {
    "SLURM_JOB_ID": "7",
    "SLURMD_NODENAME": "node1",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
FAKES = Path(__file__).parents[1] / "fakes" / "slurm"
SCRIPT = """
import os, sys, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
attempt, host = os.environ["TORCHELASTIC_RESTART_COUNT"], os.uname().nodename
os.write(1, f"sum {int(ones.item())} rank {dist.get_rank()} attempt {attempt} on {host}\\n".encode())
if sys.argv[1:2] == ["kill"] and attempt == "0" and dist.get_rank() == int(sys.argv[2]):
    os.kill(os.getpid(), 9)
if sys.argv[1:] == ["lose"] and attempt == "0" and dist.get_rank() == 1:
    with open(f"/proc/{os.getppid()}/stat") as stat:  # of the spawner, whose parent is the agent
        os.kill(int(stat.read().rpartition(")")[2].split()[1]), 9)
if sys.argv[1:] == ["fail"]:
    raise ValueError("no luck")
if sys.argv[1:] == ["wait"]:
    import signal
    signal.pause()
dist.barrier()
"""


class FakeSlurm(User):
    """A pretended cluster of three nodes and its user, who has the script above; `queue` is the folder of its state."""

    def __init__(self, folder):
        self.queue = folder / "queue"
        self.queue.mkdir()
        fakes = {"PATH": f"{FAKES}:{os.environ['PATH']}", "FAKE_SLURM": str(self.queue)}
        super().__init__(folder, muster_env(folder / "home", **fakes))
        self.script(SCRIPT)

    def set(self, **settings):
        """Say what the cluster is like."""
        (self.queue / "settings").write_text(json.dumps(settings))

    def commands(self, name):
        """Return the calls of a command, as words."""
        lines = (self.queue / "commands.log").read_text().splitlines()
        return [words for line in lines if (words := json.loads(line))[0] == name]

    def record(self, number):
        """Return what the queue has of a job."""
        return json.loads((self.queue / f"{number}.json").read_text())

    def wait_for_end(self, *numbers):
        """Wait until nothing of these jobs is left; of all of them where none is named."""
        for number in numbers or [path.stem for path in self.queue.glob("*.json")]:
            pid = self.record(number)["pid"]
            wait_until(lambda pid=pid: not _lives(pid), f"the end of job {number}")


def _lives(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.fixture
def cluster(tmp_path):
    """Return a pretended cluster; its jobs end before the test does."""
    made = FakeSlurm(tmp_path)
    yield made
    made.wait_for_end()
