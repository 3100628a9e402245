"""Nodes with networks of their own: namespaces without a name, gone with the process that made them.

    switch     the far ends of all links: one bridge for the fast network, none for the others
    node K     hsn0 10.10.0.K/24 on the bridge; mgmt0 192.168.50.K/24 that leads nowhere; docker0 172.17.0.1/16

Each namespace is held by a process that ends with its standard input, so nothing is left after SIGKILL either.
"""

import contextlib
import os
import shutil
import subprocess
import sys

HOLDER = "import sys; print('here', flush=True); sys.stdin.read()"


def why_not():
    """Return why no such nodes can be made here; None when they can."""
    if os.geteuid() != 0:
        return "namespaces of networks need root"
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed"
    trial = ("unshare", "-n", "ip", "link", "add", "lab0", "type", "bridge")
    tried = subprocess.run(trial, capture_output=True, check=False)
    return (
        None if tried.returncode == 0 else f"no bridge can be made: {tried.stderr.decode()[:200]}"
    )


class Nodes:
    """A switch and some nodes; a context manager."""

    def __init__(self, num_nodes):
        self.num_nodes = num_nodes
        self._holders = []
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            for _ in range(self.num_nodes + 1):
                self._holders.append(stack.enter_context(self._holder()))
            self._ip(0, "link add fast type bridge", "link set fast up", "link set lo up")
            for node in range(1, self.num_nodes + 1):
                self._connect(node)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error):
        self._stack.close()

    @property
    def pids(self):
        """Return the pids of the processes that hold the namespaces; the switch is the first."""
        return [holder.pid for holder in self._holders]

    @contextlib.contextmanager
    def _holder(self):
        argv = ["unshare", "--net", "--uts", sys.executable, "-S", "-c", HOLDER]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            try:
                assert holder.stdout.readline() == b"here\n"
                yield holder
            finally:
                holder.stdin.close()
                holder.wait(10)

    def _connect(self, node):
        pid = self._holders[node].pid
        self._ip(
            0,
            f"link add fast{node} type veth peer name hsn0 netns {pid}",
            f"link set fast{node} master fast up",
            f"link add mgmt{node} type veth peer name mgmt0 netns {pid}",
            f"link set mgmt{node} up",
        )
        self._ip(
            node,
            "link set lo up",
            f"addr add 10.10.0.{node}/24 dev hsn0",
            "link set hsn0 up",
            f"addr add 192.168.50.{node}/24 dev mgmt0",
            "link set mgmt0 up",
            "link add docker0 type bridge",
            "addr add 172.17.0.1/16 dev docker0",
            "link set docker0 up",
        )

    def ip(self, node, *lines):
        """Give lines to `ip -batch` on a node (from 1)."""
        self._ip(node, *lines)

    def _ip(self, number, *lines):
        text = "".join(f"{line}\n" for line in lines)
        argv = self.argv(number, ["ip", "-batch", "-"])
        subprocess.run(argv, input=text, text=True, check=True, timeout=20)

    def argv(self, node, command):
        """Return a command as it is run on a node; 0 is the switch."""
        return ["nsenter", f"--target={self._holders[node].pid}", "--net", "--uts", *command]
