"""A real Slurm of two nodes in network namespaces, each with a disk of its own."""

import json
import os
import shutil
import time

from cluster import slurm_lab
from kit.command import MUSTER, SOURCE
from kit.memory_group import MemoryGroup
from kit.waiting import wait_until
from matrix.world import MEMORY_BYTES, NODES, OWN_DISK, OWN_TMP, START_LIMIT_S, World
from torchmuster.core import proc


class OwnDisks(slurm_lab.SlurmLab):
    """A lab whose nodes have mounts of their own and, the second, little memory."""

    def __init__(self, group):
        self.group = group
        super().__init__(len(NODES), down_after_s=60)

    def slurmd_argv(self, name):
        (self.shared / "scratch").mkdir(exist_ok=True)
        script = f'{OWN_TMP}; {OWN_DISK}; shift; exec "$@"'
        own = ["unshare", "--mount", "sh", "-ec", script, "sh", str(self.shared / "scratch")]
        argv = [*own, *super().slurmd_argv(name)]
        return self.group.argv(argv) if name == "n2" else argv


class SlurmWorld(World):
    """`muster run --on slurm` on the login node of a lab."""

    name, title = "slurm", "Slurm, real"
    made_of = "slurmctld and two slurmd of Debian in namespaces, a disk for each node"
    options = ("--on", "slurm", "--nodes", "2")
    wrong_interface = "lo"  # the only other one
    time_limit = "1m"
    lab = OwnDisks
    daemons = ("slurmd", "slurmstepd", "enter.py")

    def __init__(self, _folder):
        self._lab = None

    def why_not(self):
        return slurm_lab.why_not()

    def __enter__(self):
        self.group = MemoryGroup(MEMORY_BYTES).__enter__()
        self._lab = self.lab(self.group).__enter__()
        self.folder = self._lab.shared
        self.home = self.folder / "home"
        return self

    def __exit__(self, *error):
        self._lab.close()
        self.group.__exit__(*error)

    def argv(self, node, words):
        (slurmd,) = proc.children_of(self._lab.daemons[node].pid)
        spaces = ("--mount", "--net", "--uts", "--pid")
        return ["nsenter", f"--target={slurmd}", *spaces, "--", *words]

    def start(self, words, **options):
        environment = {"PYTHONPATH": str(SOURCE), "MUSTER_HOME": str(self.home)}
        return self._lab.popen([*MUSTER, *words], env=environment, **options)

    def kill_node(self, node):
        self._lab.kill_node(node, unplug=True)

    def cut_link(self, node):
        self._lab.set_link(node, "down")

    def heal_link(self, node):
        self._lab.set_link(node, "up")

    def wait_time_limit(self, running):
        job = json.loads((self.run_dir / "job.json").read_text())["job_id"]
        wait_until(
            lambda: self._lab.job(job)["JobState"] != "RUNNING", "the limit", 2 * START_LIMIT_S
        )
        return time.time()

    def processes(self):
        """Return what runs on the nodes beside Slurm's own and what has led the runner there."""
        found = self._lab.commands_on(*NODES).values()
        lines = [" ".join(map(os.fsdecode, words)).strip() for words in found]
        return [line for line in lines if line and not any(word in line for word in self.daemons)]

    def jobs(self):
        """Return the jobs that are not about to end: those of a dead node complete when Slurm believes in its death."""
        lines = self._lab.run(["squeue", "-h", "-o", "%A %T"]).stdout.splitlines()
        return [line for line in lines if not line.endswith("COMPLETING")]

    def reset(self):
        for node in NODES:
            self._lab.set_link(node, "up")
        self._lab.reset()
        shutil.rmtree(self.home, ignore_errors=True)
