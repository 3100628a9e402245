"""Two simulated nodes on this machine: one network and one disk, which the run alone sees."""

import contextlib
import os
import shutil
import signal
import subprocess

from kit.command import MUSTER, muster_env
from kit.memory_group import MemoryGroup
from kit.namespaces import HeldNetworks, why_no_mount
from kit.trees import signal_tree
from matrix.processes import pids_with
from matrix.world import MEMORY_BYTES, OWN_DISK, OWN_TMP, World

ONE_MACHINE = "simulated nodes are processes of one machine"


class Mounts(HeldNetworks):
    """Some mount namespaces, each held by a process."""

    spaces = ("mount",)


class LocalWorld(World):
    """`muster run --nodes 2` on one machine."""

    name, title = "local", "local, simulated nodes"
    made_of = "this machine: the agents of both nodes are processes of it"
    options = ("--on", "local", "--nodes", "2")
    is_silent = False
    is_one_disk = True
    cannot = {
        "link": f"{ONE_MACHINE}: there is no link between them",
        "package": f"{ONE_MACHINE} and see the same files",
        "time": "without a scheduler's job there is no time limit: muster says that it ignores `--time`",
    }

    def __init__(self, folder):
        self.folder, self.home = folder, folder / "home"
        self._stack = contextlib.ExitStack()

    def why_not(self):
        return why_no_mount()

    def __enter__(self):
        self.scratch.mkdir(parents=True)
        self._mounts = self._stack.enter_context(Mounts(1))
        self.group = self._stack.enter_context(MemoryGroup(MEMORY_BYTES))
        self.on("n1", "sh", "-ec", f"{OWN_TMP}; {OWN_DISK}", "sh", self.scratch)
        return self

    def __exit__(self, *error):
        self._stack.close()

    def argv(self, node, words):
        return self._mounts.argv(0, words)

    def start(self, words, **options):
        words = ["env", "-C", str(self.folder), *MUSTER, *map(str, words)]
        argv = self.group.argv(self.argv("n1", words))
        return subprocess.Popen(argv, env=self._environment(), **options)

    def _environment(self):
        return muster_env(self.home, MUSTER_ON="local", MUSTER_MATRIX=str(self.folder))

    def kill_node(self, node):
        signal_tree(self.running.agent_pid(node), signal.SIGKILL)

    def processes(self):
        return list(pids_with(f"MUSTER_MATRIX={self.folder}").values())

    def reset(self):
        for pid in pids_with(f"MUSTER_MATRIX={self.folder}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.home, ignore_errors=True)
