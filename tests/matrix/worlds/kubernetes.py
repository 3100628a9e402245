"""A real Kubernetes of two nodes in namespaces, each with a disk of its own; a pod of a run is what a node is elsewhere."""

import contextlib
import json
import shutil
from datetime import datetime
from pathlib import Path

from kit.waiting import wait_until
from lab.kubernetes import programs
from lab.kubernetes.cluster import Cluster
from lab.kubernetes.images import PAUSE_IMAGE
from lab.kubernetes.user import NAMESPACE, User
from matrix.processes import pids_with
from matrix.world import NODES, OWN_DISK, OWN_TMP, World

TIME_LIMIT_S = 45
POD_FOLDERS = "/var/lib/kubelet/pods"
PATH_IN_POD = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"
INDEX = "batch.kubernetes.io/job-completion-index"
_COUNTERS = ("memory.oom_control", "memory.events")


class PodMemory:
    """The memory of the pods on a node: each may use what the site gives it."""

    def __init__(self, cluster, node):
        self._cluster, self._node = cluster, node

    def num_kills(self):
        """Return how many processes the kernel has killed in the pods that are there."""
        total = 0
        for folder in self._cluster.pod_groups(self._node):
            with contextlib.suppress(OSError):
                path = next(path for name in _COUNTERS if (path := folder / name).exists())
                lines = path.read_text().splitlines()
                total += int(dict(line.split() for line in lines)["oom_kill"])
        return total


class KubernetesWorld(World):
    """`muster run --on kubernetes` with the rights of the page's Role."""

    name, title = "kubernetes", "Kubernetes, real"
    made_of = "a control plane and two nodes with kubelet and containerd in namespaces, a disk for each node; a run's node is a pod"
    options = ("--on", "kubernetes", "--nodes", "2")
    wrong_interface = "lo"  # the only other one
    time_limit = f"{TIME_LIMIT_S}s"
    running = None

    def __init__(self, folder):
        self._base = folder
        self.folder, self.home = folder / "user", folder / "user" / "home"
        self._stack = contextlib.ExitStack()
        self._away = set()

    def why_not(self):
        reason = programs.why_not()
        return None if reason is None else "; ".join(reason.splitlines())

    def __enter__(self):
        for folder in (self.folder, self.data, self.scratch):
            folder.mkdir(parents=True)
        self._cluster = self._stack.enter_context(Cluster())
        self.group = PodMemory(self._cluster, "n2")
        self._user = User(self._cluster, self.folder)
        for name, folder in (("data", self.data), ("scratch", self.scratch)):
            self._user.share(name, folder)
        self._cluster.create(*map(_keeper, NODES))
        for node in NODES:
            self._give_disks(node)
        return self

    def __exit__(self, *error):
        self._stack.close()

    @property
    def data(self):
        return self._base / "data"

    @property
    def scratch(self):
        return self._base / "scratch"

    def _give_disks(self, node):
        self.on(node, "sh", "-ec", f"{OWN_TMP}; {OWN_DISK}", "sh", self.scratch)

    def prepare(self):
        self.running = None
        super().prepare()

    def run(self, options=(), script_options=(), **more):
        """Start the training; where it is to meet at a fixed port, on the nodes' own network, which others share."""
        claims = [f"{path.name}:{path}" for path in (self.data, self.scratch)]
        self._user.write_site(
            namespace=NAMESPACE,
            claims=claims,
            memory="1536Mi",
            host_network=bool(script_options),
        )
        return super().run(options, script_options, **more)

    def argv(self, node, words):
        """Return a command as it runs in the run's pod on a node; on the node itself before there is a run."""
        if self.running is None:
            return self._cluster.node_argv(node, words)
        found = self._cluster.processes_in_pods(node)
        first = [pid for pid in found if _pid_inside(pid) == 1]
        if not first:  # its pid means nobody then
            return ["unshare", "--pid", "--fork", *words]
        spaces = ("--mount", "--net", "--uts", "--pid")
        inside = ("/usr/bin/env", PATH_IN_POD, *words)
        return ["nsenter", f"--target={first[0]}", *spaces, "--", *inside]

    def called(self, node):
        """Return the name of the pod that is on a node, with the node's."""
        return f"{self.run_id}-{NODES.index(node)} ({node})"

    def start(self, words, **options):
        return self._user.start(words, env={"MUSTER_MATRIX": str(self.folder)}, **options)

    def kill_node(self, node):
        self._away.add(node)
        self._cluster.cut_power(node)

    def cut_link(self, node):
        self._away.add(node)
        self._cluster.set_link(node, "down")

    def heal_link(self, node):
        self._cluster.set_link(node, "up")
        self._away.discard(node)

    def wait_time_limit(self, running):
        first = json.loads((self.run_dir / "events.jsonl").read_text().splitlines()[0])
        return datetime.fromisoformat(first["time"]).timestamp() + TIME_LIMIT_S

    def processes(self):
        mine = pids_with(f"MUSTER_MATRIX={self.folder}").values()
        inside = (self._cluster.processes_in_pods(n).values() for n in NODES if n in self._alive)
        return [*mine, *(line for lines in inside for line in lines)]

    @property
    def _alive(self):
        return self._cluster.pids

    def jobs(self):
        """Return the objects of runs, and what a kubelet still has of their pods; of a node that is away nobody can remove them."""
        found = []
        for one in self._user.objects():
            node = one.get("spec", {}).get("nodeName")
            if node not in self._away or "deletionTimestamp" not in one["metadata"]:
                found.append(f"{one['kind']} {one['metadata']['name']}")
        return [*found, *sorted(self.files([n for n in NODES if n not in self._away]))]

    def files(self, nodes):
        """Return the files of runs on nodes: in /tmp and /dev/shm, and what their kubelets have of pods."""
        keepers = self._cluster.get("pods", "-n", NAMESPACE, "-l", "keeper")["items"]
        kept = [one["metadata"]["uid"] for one in keepers]
        found = set()
        for node in nodes:
            words = ("find", POD_FOLDERS, "/tmp", "/dev/shm", "-mindepth", "1", "-maxdepth", "1")
            lines = self._on_node(node, *words)
            found |= {f"{node}:{p}" for p in lines if not any(uid in p for uid in kept)}
        return found

    def _on_node(self, node, *words):
        running, self.running = self.running, None
        try:
            return self.on(node, *words).splitlines()
        finally:
            self.running = running

    def reset(self):
        self._cluster.kubectl(
            "delete", "jobs.batch,services,secrets", "-n", NAMESPACE, "--all", "--wait=false"
        )
        self.running = None
        for node in NODES:
            if node not in self._cluster.pids:
                self._cluster.start_node(node)
                self._give_disks(node)
            self.heal_link(node)
        self._cluster.wait_ready(*NODES)
        wait_until(lambda: not self.jobs() and not self.processes(), "an empty cluster")
        shutil.rmtree(self.home, ignore_errors=True)


def _keeper(node):
    """Return a pod that keeps those of another index off its node: pod 0 of a run is on n1 then, and pod 1 on n2."""
    other = str(1 - NODES.index(node))
    term = {
        "labelSelector": {"matchLabels": {INDEX: other}},
        "topologyKey": "kubernetes.io/hostname",
    }
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    name = f"keeper-{node}"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"keeper": node}},
        "spec": {
            "nodeName": node,
            "containers": [{"name": "pause", "image": PAUSE_IMAGE}],
            "affinity": affinity,
            "tolerations": [{"operator": "Exists"}],
            "terminationGracePeriodSeconds": 0,
        },
    }


def _pid_inside(pid):
    """Return the pid of a process as its own namespace has it; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])
