"""Two hosts with an sshd each, and a laptop that reaches them over another network than they reach each other."""

import subprocess

from kit import namespaces
from kit.command import MUSTER, SOURCE
from kit.memory_group import MemoryGroup
from lab import netlab
from lab.live.case import CAREFUL
from matrix.world import MEMORY_BYTES, NODES, OWN_DISK, World


class SshWorld(World):
    """`muster run --on ssh` from the laptop of a network lab."""

    name, title = "ssh", "ssh, real sshd"
    made_of = (
        "two hosts in namespaces, an sshd on each, and a laptop on another network than theirs"
    )
    options = ("--on", "ssh", "--hosts", "n1,n2")
    wrong_interface = "mgmt0"  # it exists, and leads to the laptop only
    cannot = {"time": "over ssh nobody limits the time: muster says that it ignores `--time`"}

    def __init__(self, _folder):
        self._lab = None

    def why_not(self):
        return netlab.why_not()

    def __enter__(self):
        self._lab = netlab.NetLab([*CAREFUL]).__enter__()
        self.group = MemoryGroup(MEMORY_BYTES).__enter__()
        self.folder = self._lab.shared
        self._user_home = self._lab.home / "muster"
        self.home = self._lab.root(self._lab.controller) / "home" / "muster"
        self.scratch.mkdir()
        for node in NODES:
            self.on(node, "sh", "-ec", OWN_DISK, "sh", self.scratch)
        return self

    def __exit__(self, *error):
        self._lab.close()
        self.group.__exit__(*error)

    def prepare(self):
        for pid in self._lab.processes("n2"):  # its sshd, and so what that will start
            self.group.add(pid)
        super().prepare()

    def argv(self, node, words):
        return [*namespaces.ENTER, str(self._lab.pids[node]), "0", "/", *words]

    def start(self, words, **options):
        environment = {
            "PYTHONPATH": str(SOURCE),
            "MUSTER_HOME": str(self._user_home),
            "MUSTER_SSH": " ".join(self._lab.ssh),
        }
        argv = [*MUSTER, *words]
        lab, cwd = self._lab, self.folder
        return lab.start(lab.controller, argv, env=environment, cwd=cwd, **options)

    def kill_node(self, node):
        self._lab.kill(node, unplug=True)

    def cut_link(self, node):
        self._lab.cut(node)

    def heal_link(self, node):
        self._lab.heal(node)

    def processes(self):
        """Return what runs; where a host was cut off, sshd itself keeps the dead sessions."""
        laptop = self._lab.processes(self._lab.controller).values()
        return [*laptop, *(line for lines in self._lab.leftovers().values() for line in lines)]

    @property
    def watched(self):
        return ("/tmp", "/dev/shm", self._lab.home)

    @property
    def kept(self):
        """Return also what `docs/ssh.md` says that stays on a host."""
        return (self._user_home, self._lab.home / ".muster", self._lab.home / ".cache")

    def reset(self):
        self._lab.reset()
        for host in (*NODES, self._lab.controller):
            words = [*namespaces.ENTER, str(self._lab.pids[host]), "0", "/", "rm", "-rf"]
            subprocess.run([*words, *self.kept], check=True)
