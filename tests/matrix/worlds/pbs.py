"""The pretended PBS of the tests, its two hosts with networks and disks of their own; a real one where `PBS_PREFIX` names it."""

import contextlib
import json
import shutil
import subprocess
import time

from cluster import pbs_lab
from cluster.netns import Nodes
from cluster.pbs import FakePbs
from kit.command import MUSTER, SOURCE
from kit.memory_group import MemoryGroup
from kit.namespaces import why_no_networks
from kit.waiting import wait_until
from kit.world import MACHINE
from matrix.processes import pids_with
from matrix.world import MEMORY_BYTES, NODES, OWN_DISK, OWN_TMP, START_LIMIT_S, World
from matrix.worlds.slurm import SlurmWorld

TIME_LIMIT_S = 60


class PbsHosts(Nodes):
    """Nodes with several networks and mounts of their own."""

    spaces = ("net", "uts", "mount")


class OwnDisks(pbs_lab.PbsLab):
    """A lab whose hosts have mounts of their own and, the second, little memory."""

    def __init__(self, group):
        self.group = group
        super().__init__(len(NODES), uid=0)

    def mom_argv(self, name, *options):
        (self.shared / "scratch").mkdir(exist_ok=True)
        script = f'{OWN_TMP}; {OWN_DISK}; shift; exec "$@"'
        own = ["unshare", "--mount", "sh", "-ec", script, "sh", str(self.shared / "scratch")]
        argv = [*own, *super().mom_argv(name, *options)]
        return self.group.argv(argv) if name == "n2" else argv


class RealPbsWorld(SlurmWorld):
    """`muster run --on pbs` on the login node of a lab."""

    name, title = "pbs", "PBS, real"
    made_of = "pbs_server, pbs_sched and two pbs_mom of OpenPBS 23.06.06 in namespaces, a disk for each host"
    options = ("--on", "pbs", "--nodes", "2")
    lab = OwnDisks
    daemons = ("pbs_mom", "enter.py")
    # A job with a dead host runs until the server calls that host down, about 90 s after its last word.
    job_ends_within_s = 150.0

    def why_not(self):
        return pbs_lab.why_not()

    def wait_time_limit(self, running):
        # Its daemon looks at the clock seldom, and says so before it signals.
        log = self.run_dir / "job.log"
        wait_until(
            lambda: "job killed: walltime" in log.read_text(), "the limit", 2 * START_LIMIT_S
        )
        return time.time()

    def jobs(self):
        """Return the jobs that are not about to end."""
        return self._lab.run(["qselect", "-s", "HQRSTW"]).stdout.split()


class PretendedPbsWorld(World):
    """`muster run --on pbs` on the login node, which is this machine."""

    name, title = "pbs", "PBS, pretended"
    made_of = (
        "commands that answer as a recorded server did; two hosts in namespaces, a disk for each"
    )
    options = ("--on", "pbs", "--nodes", "2")
    wrong_interface = "mgmt0"  # it exists, and leads nowhere
    time_limit = f"{TIME_LIMIT_S}s"

    def __init__(self, folder):
        self.folder, self.home = folder, folder / "home"
        self._stack = contextlib.ExitStack()

    def why_not(self):
        return why_no_networks()

    def __enter__(self):
        self.scratch.mkdir(parents=True)
        self._hosts = self._stack.enter_context(PbsHosts(len(NODES)))
        self.group = self._stack.enter_context(MemoryGroup(MEMORY_BYTES))
        self._pbs = FakePbs(self.folder)
        self._stack.callback(self._pbs.close)
        hosts = {node: {"ncpus": 8, "ngpus": 4, "enter": self._enter(node)} for node in NODES}
        self._pbs.settings(hosts=hosts)
        for node in NODES:
            self.on(node, "sh", "-ec", f"{OWN_TMP}; {OWN_DISK}", "sh", self.scratch)
            self.on(node, "hostname", node)
        return self

    def __exit__(self, *error):
        self._stack.close()

    def _enter(self, node):
        words = self.argv(node, ["env", "-C", str(self._pbs.home)])
        return self.group.argv(words) if node == "n2" else words

    def argv(self, node, words):
        return self._hosts.argv(NODES.index(node) + 1, words)

    def start(self, words, **options):
        environment = {"PYTHONPATH": str(SOURCE), "MUSTER_HOME": str(self.home)}
        return subprocess.Popen(
            [*MUSTER, *map(str, words)],
            env=self._pbs.environment | environment,
            cwd=self.folder,
            **options,
        )

    def kill_node(self, node):
        self.cut_link(node)
        self._pbs.change(lost=[node])

    def cut_link(self, node):
        self._hosts.ip(0, f"link set fast{NODES.index(node) + 1} down")

    def heal_link(self, node):
        self._hosts.ip(0, f"link set fast{NODES.index(node) + 1} up")

    def wait_time_limit(self, running):
        job = json.loads((self.run_dir / "job.json").read_text())["job_id"]
        return self._pbs.started_at(job) + TIME_LIMIT_S

    def processes(self):
        return list(pids_with(f"FAKE_PBS={self._pbs.state}").values())

    def jobs(self):
        return self._pbs.living()

    @property
    def watched(self):
        return (*super().watched, self._pbs.home)

    @property
    def kept(self):
        """Return also what the pretended server writes."""
        return (*super().kept, self._pbs.home / ".bash_profile")

    def reset(self):
        for node in NODES:
            self.heal_link(node)
        self._pbs.change(lost=[])
        self._pbs.close()
        wait_until(lambda: not self.processes(), "the end of the jobs")
        shutil.rmtree(self.home, ignore_errors=True)


PbsWorld = RealPbsWorld if MACHINE.get("PBS_PREFIX") else PretendedPbsWorld
