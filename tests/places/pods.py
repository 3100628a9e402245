"""Pods without a Kubernetes: process trees with a network, a host name, processes and a file of names of their own.

They start as the manifest says, with as many descriptors as containers often have: the image's Python runs `start.py` of the Secret's folder. What stands for the cluster: folders
for Secret and disk, a file for DNS whose lines the test writes, and a kill of the first process for the loss of a pod. That real
pods behave so was seen on a control plane of 1.36.
"""

import json
import os
import shutil
import signal
import subprocess
import sys

from torchmuster.core.files.layout import RunDir
from torchmuster.core.owner.create import create_run_dir
from torchmuster.kubernetes.node.call import call_argv
from torchmuster.kubernetes.pods.bring import bring_run
from torchmuster.kubernetes.pods.bring_group import bring_group, plan_group
from torchmuster.launcher.model.job import JobRequest, NodeChunk
from torchmuster.launcher.spec.site import Site
from torchmuster.workflow.owner.workflow import create_workflow_dir

PORT = 29517
# Nobody follows these: the first pod does not wait for a client.
KEYS = (
    ("image", "x"),
    ("home", "/nowhere"),
    ("door_port", str(PORT)),
    ("take_within", "0s"),
)
_INSIDE = 'ulimit -Sn 1024; mount --bind "$1" /etc/hosts; mount --bind "$2" "$3"; mount -t proc proc /proc; hostname "$4"; shift 4; exec "$@"'


class PodWorld:
    """The pods of one run, on the nodes of a small network: pod I is on node I + 1 at first."""

    def __init__(self, nodes, folder, plan, *, num_pods, job="run"):
        request = JobRequest(
            name=job, chunks=(NodeChunk(num_nodes=num_pods),), head=(), log_path="", own_keys=KEYS
        )
        client = create_run_dir(plan, str(folder / "client"))
        self._make(nodes, folder, client, bring_run(plan, client, request, 0.0))

    @classmethod
    def of_group(cls, nodes, folder, plan, name, outputs):
        """Return the pods of a group of a workflow, which all are of one Job; `outputs` are those of tasks before it."""
        world = cls.__new__(cls)
        client = create_workflow_dir(plan, "", "")
        for task, files in outputs.items():
            os.makedirs(client.task_output(task))
            for file, text in files.items():
                with open(os.path.join(client.task_output(task), file), "w") as out:
                    out.write(text)
        site = Site(name="k", kind="kubernetes", origin="muster.toml:1:1", own_keys=KEYS)
        group = plan.group(name)
        pods = plan_group(plan, group, site)
        brought = bring_group(plan, group, client, pods)
        world._make(nodes, folder, client, brought.jobs[0])
        return world

    def _make(self, nodes, folder, client, request):
        self.nodes, self.folder, self.job = nodes, folder, request.name
        self.pods, self.logs, self.num_started = {}, {}, 0
        self.client, self.request = client, request
        self.secret = folder / "secret"
        self.secret.mkdir()
        for name, path in request.brings:
            shutil.copy(path, self.secret / os.path.basename(name))
        self.hosts = folder / "hosts"
        self.names = {}

    def know(self, **addresses):
        """Write what DNS knows: pods by number (`p0`), the last number of their address; None for no name."""
        self.names |= addresses
        lines = ["127.0.0.1 localhost"]
        for pod, last in self.names.items():
            name = f"{self.job}-{pod[1:]}"
            lines += [f"10.10.0.{last} {name}.{self.job} {name}"] if last is not None else []
        with open(
            self.hosts, "r+" if self.hosts.exists() else "w"
        ) as file:  # the same file: it is mounted
            file.truncate()
            file.write("\n".join(lines) + "\n")

    def start(self, index, *, node=None):
        """Make a pod, on an empty disk."""
        self.num_started += 1
        disk = self.folder / f"disk-{index}-{self.num_started}"
        disk.mkdir()
        self._fit_order(disk)
        (disk / "scratch").mkdir()
        scratch = self.folder / "scratch"  # the same path in all pods, as the manifest has it
        scratch.mkdir(exist_ok=True)
        self.logs[index] = self.folder / f"pod-{index}-{self.num_started}.log"
        environment = {
            **os.environ,
            "MUSTER_POD_INDEX": str(index),
            "MUSTER_POD_DISK": str(scratch),
            "MUSTER_POD_UID": str(self.num_started),
            "MUSTER_HOME": str(disk / "home"),
            "HOME": str(disk),
        }
        inside = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
        inside += ["sh", "-ec", _INSIDE, "-", str(self.hosts), str(disk / "scratch"), str(scratch)]
        inside += [f"{self.job}-{index}"]
        command = [*inside, sys.executable, "-I", "-S", str(disk / "secret" / "start.py")]
        with open(self.logs[index], "wb") as log:
            self.pods[index] = subprocess.Popen(
                self.nodes.argv(index + 1 if node is None else node, command),
                stdout=log,
                stderr=log,
                env=environment,
            )
        return self.pods[index]

    def _fit_order(self, disk):
        """Give each pod a home of its own, as pods without a volume have."""
        shutil.copytree(self.secret, disk / "secret")
        path = disk / "secret" / "order.json"
        order = json.loads(path.read_text())
        path.write_text(json.dumps({**order, "home": str(disk / "home")}))
        os.makedirs(disk / "home")

    def log(self, index):
        """Return what a pod has written."""
        return self.logs[index].read_text(errors="replace")

    def kill(self, index, signum=signal.SIGKILL):
        """End a pod: SIGKILL is its loss, SIGTERM asks its first process to leave."""
        if signum == signal.SIGKILL:
            self.pods[index].kill()
            self.pods[index].wait(30)
            return
        (first,) = self._children(self.pods[index].pid)
        os.kill(first, signum)

    def _children(self, pid):
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]

    def in_pod(self, index, command):
        """Run a command in a pod through its door, as the client does; return what it printed."""
        words = [*call_argv(self.client.secret, PORT), "127.0.0.1", command]
        said = subprocess.run(
            self.nodes.argv(index + 1, words), capture_output=True, timeout=60, check=False
        )
        return said.stdout

    def run_dir(self, index):
        """Return the run directory of a pod, as the host sees it."""
        number = self.logs[index].stem.split("-")[-1]
        home = self.folder / f"disk-{index}-{number}" / "home"
        return RunDir(str(home / "runs" / os.path.basename(self.client.path)))

    def wait(self, index, limit_s=120):
        """Return the exit code of a pod."""
        return self.pods[index].wait(limit_s)

    def close(self):
        """End all pods."""
        for pod in self.pods.values():
            pod.kill()
            pod.wait(30)
