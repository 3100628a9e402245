"""A real Kubernetes on this machine: its control plane and its nodes in namespaces, from one folder of programs.

Nodes are n1, n2, ... Nothing of it is on the machine's own network, so any number of clusters can stand: a user's command runs
where the control plane is (`user_argv`). What remains after `close`, also after a kill of this process, is nothing.
"""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

from kit.command import ran
from kit.control_groups import folder_of, make_groups, remove_groups
from kit.waiting import wait_until
from lab.kubernetes import images, programs
from lab.kubernetes.certificates import Certificates
from lab.kubernetes.house import ADDRESS, BRIDGE
from lab.kubernetes.node import SOCKET
from torchmuster.core import proc

HERE = Path(__file__).parent
SERVER = f"{ADDRESS}:6443"
SERVICES, FIRST_SERVICE, DNS_SERVICE = "10.95.0.0/16", "10.95.0.1", "10.95.0.10"
START_LIMIT_S = 120.0
EVICT_S = 10  # until pods of a lost node are evicted; Kubernetes waits 300
GPU, GPUS = "nvidia.com/gpu", 4


class Cluster:
    """The cluster; a context manager.

    Args:
        num_nodes: How many nodes.
        gpus: How many GPUs each claims to have.

    Attributes:
        folder: Of all files of the cluster.
        nodes: The names of its nodes.
        pids: Of the first process of each node that has power.
        admin: The kubeconfig of who may do everything.
        hidden: The file of names that DNS does not know yet.
    """

    def __init__(self, num_nodes=2, gpus=GPUS):
        self.nodes = [f"n{number}" for number in range(1, num_nodes + 1)]
        self._gpus, self._token = gpus, secrets.token_hex(3)
        self._programs = programs.folder()
        self._stack = contextlib.ExitStack()
        self._running, self.pids, self._last_heartbeat = {}, {}, {}

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix="muster-kube-", dir="/var/tmp"))
            self.group = f"muster-kube-{self._token}"
            self._hold(stack)
            self._stack = stack.pop_all()
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        """End all of it."""
        self._stack.close()

    # What a user and an administrator do.

    def user_argv(self, words):
        """Return a command as it is run where the cluster's addresses mean something."""
        return ["nsenter", f"--net=/proc/{self._first}/ns/net", "--", *map(str, words)]

    def environment(self, kubeconfig=None):
        """Return the environment of a user: kubectl and whom it is to be."""
        return {
            **os.environ,
            "PATH": f"{self._programs}:{os.environ['PATH']}",
            "KUBECONFIG": str(kubeconfig or self.admin),
            "KUBECACHEDIR": str(self.folder / "kubectl"),
        }

    def try_kubectl(self, *words, text=None):
        """Run kubectl as the administrator; return what has ended."""
        return self.run(["kubectl", "--request-timeout=20s", *words], text)

    def run(self, words, text=None):
        """Run a command where the cluster's addresses mean something, as the administrator; return what has ended."""
        return ran(self.user_argv(words), env=self.environment(), input=text)

    def kubectl(self, *words, text=None):
        """Run kubectl as the administrator; return what it prints."""
        done = self.try_kubectl(*words, text=text)
        assert done.returncode == 0, f"kubectl {words}: {done.stderr}"
        return done.stdout

    def get(self, *words):
        """Return what `kubectl get` has found, as values."""
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def create(self, *objects):
        """Make objects, or change them."""
        items = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "--server-side", "-f", "-", text=json.dumps(items))

    def user(self, name, namespace):
        """Make a user without any right; return the path of the kubeconfig."""
        self._certificates.sign(name, f"/CN={name}")
        return self._certificates.kubeconfig(name, namespace)

    # What happens to nodes.

    def node_argv(self, node, words):
        """Return a command as it runs on a node."""
        spaces = ("--mount", "--net", "--uts", "--ipc", "--pid", "--cgroup")
        return ["nsenter", f"--target={self.pids[node]}", *spaces, "--", *map(str, words)]

    def set_link(self, node, state):
        """Turn the link of a node `up` or `down`."""
        self._ip(f"link set {node} {state}")

    def cut_power(self, node):
        """End a node at once: nobody hears of it."""
        self.set_link(node, "down")
        self._last_heartbeat[node] = self._heartbeat(node)
        os.kill(self.pids.pop(node), 9)
        self._running.pop(node).wait()
        self._ip(f"link del {node}")  # the kernel would do it a little later
        remove_groups(f"{self.group}/{node}")

    def start_node(self, node):
        """Start a node, or one whose power has been cut, with an empty disk."""
        order = self._order(node)
        argv = self._inside([sys.executable, "-I", "-S", HERE / "node.py", order])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with self._log(node) as log:
            process = subprocess.Popen(argv, env=_clean_environment(), stderr=log, **pipes)
        self._running[node] = process
        assert process.stdout.readline() == b"made\n", self.logs()
        self.pids[node] = self._first_of_node(process.pid)
        self._connect(node)
        process.stdin.write(b"go\n")
        process.stdin.close()
        process.stdout.close()

    def wait_ready(self, *nodes):
        """Wait until nodes are ready and take pods."""
        for node in nodes:
            wait_until(lambda node=node: self._is_ready(node), node, START_LIMIT_S)
            status = json.dumps({"status": {"capacity": {GPU: str(self._gpus)}}})
            self.kubectl(
                "patch", "node", node, "--subresource=status", "--type=merge", "-p", status
            )
            wait_until(lambda node=node: not self._taints(node), f"no taints of {node}")

    @contextlib.contextmanager
    def pods_kept_apart(self):
        """Let nothing but DNS pass between pods of different nodes for a while."""
        hook = "{ type filter hook forward priority -10 ; }"
        rule = "ip saddr 10.94.0.0/16 ip daddr 10.94.0.0/16 ip protocol tcp drop"
        begin = f"add table ip apart; add chain ip apart way {hook}; add rule ip apart way {rule}"
        for node in self.nodes:
            self._nft(node, begin)
        try:
            yield
        finally:
            for node in self.nodes:
                self._nft(node, "delete table ip apart")

    def _nft(self, node, line):
        subprocess.run(self.node_argv(node, [self._programs / "nft", line]), check=True)

    def _heartbeat(self, node):
        """Return the time of a node's last sign of life, as the API writes it; empty where there was none."""
        words = ("get", "lease", node, "-n", "kube-node-lease", "-o", "jsonpath={.spec.renewTime}")
        return self.try_kubectl(*words).stdout

    def processes_in_pods(self, node):
        """Return pid -> command line of what runs in the containers of a node's pods."""
        found = {}
        for path in self.pod_groups(node):
            for pid in (path / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    found[int(pid)] = " ".join(map(os.fsdecode, words)).strip()
        pause = " ".join(images.PAUSE)
        return {pid: line for pid, line in found.items() if line and line != pause}

    def pod_groups(self, node, controller="memory"):
        """Return the folders of the control groups of a node's containers."""
        top = Path(folder_of(controller, f"{self.group}/{node}")) / "kubepods"
        return [path.parent for path in top.rglob("cgroup.procs")]

    def logs(self, last_bytes=3000):
        """Return the ends of all logs."""
        paths = sorted((self.folder / "logs").iterdir())
        return "\n".join(f"== {p.name}\n{p.read_bytes()[-last_bytes:].decode()}" for p in paths)

    # How it is made.

    def _hold(self, stack):
        argv = [sys.executable, "-I", "-S", HERE / "house.py", self.folder, self.group]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._house = stack.enter_context(subprocess.Popen(argv, start_new_session=True, **pipes))
        self._first = int(self._house.stdout.readline())
        stack.callback(self._end_house)

    def _end_house(self):
        self._house.stdin.close()
        for process in self._running.values():
            process.wait()
        self._house.wait()

    def _begin(self):
        for name in ("logs", "conf", "etcd"):
            (self.folder / name).mkdir()
        self.hidden = self.folder / "hidden-names"
        self._certificates = certificates = Certificates(self.folder / "keys", f"https://{SERVER}")
        names = (
            f"IP:{ADDRESS}",
            f"IP:{FIRST_SERVICE}",
            "IP:127.0.0.1",
            "DNS:kubernetes.default.svc",
        )
        certificates.sign("server", "/CN=kube-apiserver", names)
        certificates.sign("admin", "/O=system:masters/CN=admin")
        self.admin = certificates.kubeconfig("admin")
        images.write_images(self.folder / "images.tar")
        images.write_spec(self._programs / "ctr", self.folder / "conf" / "container.json")
        self._start_control_plane()
        for node in self.nodes:
            number = self.nodes.index(node) + 1
            subject = f"/O=system:nodes/CN=system:node:{node}"
            certificates.sign(node, subject, (f"DNS:{node}", f"IP:{_address(number)}"))
            certificates.kubeconfig(node)
            self.start_node(node)
        self._add_names()
        self.wait_ready(*self.nodes)
        account = ("serviceaccount", "default")
        wait_until(lambda: self.try_kubectl("get", *account).returncode == 0, "an account")

    def _start_control_plane(self):
        path = self._certificates.path
        client = "http://127.0.0.1:2379"
        self._start(
            "etcd", f"--data-dir={self.folder}/etcd", "--unsafe-no-fsync", "--log-level=warn",
            f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
        )  # fmt: skip
        self._start(
            "kube-apiserver", f"--etcd-servers={client}", f"--advertise-address={ADDRESS}",
            f"--service-cluster-ip-range={SERVICES}", f"--client-ca-file={path('ca.crt')}",
            f"--tls-cert-file={path('server.crt')}", f"--tls-private-key-file={path('server.key')}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={path('sa.pub')}",
            f"--service-account-signing-key-file={path('sa.key')}",
            f"--kubelet-certificate-authority={path('ca.crt')}",
            f"--kubelet-client-certificate={path('admin.crt')}",
            f"--kubelet-client-key={path('admin.key')}", "--allow-privileged=true",
            "--enable-aggregator-routing=true",  # webhooks: nothing here leads to a Service's address
            "--kubelet-preferred-address-types=InternalIP", "--authorization-mode=Node,RBAC",
            f"--default-not-ready-toleration-seconds={EVICT_S}",
            f"--default-unreachable-toleration-seconds={EVICT_S}",
        )  # fmt: skip
        wait_until(self._answers, "the API server", START_LIMIT_S)
        own = (f"--kubeconfig={self.admin}", "--leader-elect=false")
        self._start(
            "kube-controller-manager", *own, f"--root-ca-file={path('ca.crt')}",
            f"--service-account-private-key-file={path('sa.key')}",
            "--node-monitor-grace-period=16s", "--node-monitor-period=2s",
        )  # fmt: skip
        self._start("kube-scheduler", *own)
        words = [HERE / "names.py", ADDRESS, SERVER, path("ca.crt"), path("admin.crt")]
        words += [path("admin.key"), self.hidden]
        self.start_words("names", [sys.executable, "-I", "-S", *words])

    def _answers(self):
        for name, process in self._running.items():
            assert process.poll() is None, f"{name} has ended:\n{self.logs()}"
        return self.try_kubectl("get", "--raw", "/readyz").returncode == 0

    def _start(self, name, *options):
        self.start_words(name, [self._programs / name, *options])

    def start_words(self, name, words):
        """Start a program beside the control plane."""
        argv, silent = self._inside(words), subprocess.DEVNULL
        options = {"env": _clean_environment(), "cwd": self.folder}
        with self._log(name) as log:
            self._running[name] = subprocess.Popen(
                argv, stdin=silent, stdout=log, stderr=log, **options
            )

    def _log(self, name):
        return (self.folder / "logs" / f"{name}.log").open("ab")

    def _inside(self, words):
        spaces = ("--net", "--pid")
        return ["nsenter", f"--target={self._first}", *spaces, "--", *map(str, words)]

    def _first_of_node(self, outer):
        """Return the pid of a node's first process: below nsenter, and below what waits for it."""
        for _ in range(2):
            (outer,) = proc.children_of(outer)
        return outer

    def _ip(self, *lines, node=None):
        net = self._first if node is None else self.pids[node]
        argv = ["nsenter", f"--net=/proc/{net}/ns/net", "ip", "-batch", "-"]
        subprocess.run(argv, input="".join(f"{line}\n" for line in lines), text=True, check=True)

    def _connect(self, node):
        number = self.nodes.index(node) + 1
        address = _address(number)
        peer = f"peer name eth0 netns {self.pids[node]}"
        self._ip(
            f"link add {node} type veth {peer}",
            f"link set {node} master {BRIDGE} up",
            f"route replace 10.94.{number}.0/24 via {address}",
        )
        self._ip(
            "link set lo up",
            f"addr add {address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {ADDRESS}",
            node=node,
        )
        forward = "echo 1 >/proc/sys/net/ipv4/ip_forward"
        argv = ["nsenter", f"--net=/proc/{self.pids[node]}/ns/net", "sh", "-c", forward]
        subprocess.run(argv, check=True)

    def _order(self, node):
        """Write what a node has to know; return the path."""
        folder, conf = self.folder / node, self.folder / "conf" / node
        subprocess.run(["rm", "-rf", folder], check=True)
        (folder / "log" / "pods").mkdir(parents=True)
        (folder / "lib" / "kubelet").mkdir(parents=True)
        conf.mkdir(exist_ok=True)
        number = self.nodes.index(node) + 1
        (conf / "containerd.toml").write_text(self._containerd(conf))
        (conf / "kubelet.json").write_text(json.dumps(self._kubelet(node, conf)))
        (conf / "proxy.json").write_text(json.dumps(self._proxy()))
        (conf / "resolv.conf").write_text("")
        (conf / "10-lab.conflist").write_text(json.dumps(_network(number)))
        group = f"{self.group}/{node}"
        make_groups(group)
        order = {
            "name": node,
            "address": _address(number),
            "group": group,
            "folder": str(folder),
            "conf": str(conf),
            "logs": str(self.folder / "logs"),
            "images": str(self.folder / "images.tar"),
            "programs": str(self._programs),
            "kubeconfig": self._certificates.path(f"{node}.kubeconfig"),
        }
        path = conf / "order.json"
        path.write_text(json.dumps(order))
        return path

    def _containerd(self, conf):
        plugin = "plugins.'io.containerd.cri.v1"
        runc = f"{plugin}.runtime'.containerd.runtimes.runc"
        return f"""\
version = 3
[{plugin}.images'.pinned_images]
sandbox = "{images.PAUSE_IMAGE}"
[{plugin}.runtime']
disable_apparmor = true
restrict_oom_score_adj = true
[{plugin}.runtime'.cni]
bin_dirs = ["{self._programs}"]
conf_dir = "{conf}"
[{runc}]
runtime_type = "io.containerd.runc.v2"
base_runtime_spec = "{self.folder}/conf/container.json"
[{runc}.options]
BinaryName = "{self._programs}/runc"
"""

    def _kubelet(self, node, conf):
        path, socket = self._certificates.path, f"unix://{SOCKET}"
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "x509": {"clientCAFile": path("ca.crt")},
            },
            "tlsCertFile": path(f"{node}.crt"),
            "tlsPrivateKeyFile": path(f"{node}.key"),
            "containerRuntimeEndpoint": socket,
            "imageServiceEndpoint": socket,
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": False,
            "failSwapOn": False,
            "protectKernelDefaults": True,
            "makeIPTablesUtilChains": False,
            "clusterDNS": [DNS_SERVICE],
            "clusterDomain": "cluster.local",
            "resolvConf": f"{conf}/resolv.conf",
            "nodeStatusUpdateFrequency": "4s",
            "volumePluginDir": "/var/lib/kubelet/plugins",
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
        }

    def _proxy(self):
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": self.admin},
            "mode": "nftables",
            "clusterCIDR": "10.94.0.0/16",
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
        }

    def _add_names(self):
        """Give the cluster the Service behind which its DNS is."""
        place = {"name": "kube-dns", "namespace": "kube-system"}
        port = {"name": "dns", "port": 53, "protocol": "UDP"}
        self.create(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": place,
                "spec": {"clusterIP": DNS_SERVICE, "ports": [port]},
            },
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {**place, "labels": {"kubernetes.io/service-name": "kube-dns"}},
                "addressType": "IPv4",
                "endpoints": [{"addresses": [ADDRESS]}],
                "ports": [port],
            },
        )

    def _is_ready(self, node):
        for name, process in self._running.items():
            assert process.poll() is None, f"{name} has ended:\n{self.logs()}"
        done = self.try_kubectl("get", "node", node, "-o", "json")
        if done.returncode != 0:
            return False
        conditions = json.loads(done.stdout)["status"]["conditions"]
        is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
        return is_ready and self._heartbeat(node) > self._last_heartbeat.get(node, "")

    def _taints(self, node):
        return self.get("node", node)["spec"].get("taints")


def _address(number):
    return f"10.94.0.{number}"


def _network(number):
    plugin = {
        "type": "bridge",
        "bridge": "cni0",
        "isDefaultGateway": True,
        "hairpinMode": True,
        "ipam": {"type": "host-local", "ranges": [[{"subnet": f"10.94.{number}.0/24"}]]},
    }
    return {"cniVersion": "1.0.0", "name": "lab", "plugins": [plugin]}


def _clean_environment():
    return {key: value for key, value in os.environ.items() if key != "KUBECONFIG"}
