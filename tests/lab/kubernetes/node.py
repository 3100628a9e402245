"""The first process of a node: mounts what a machine of its own would have, and starts containerd, kubelet and kube-proxy.

    python node.py ORDER      stdin: a line when the node's link is there; stdout: a line when it may be made

ORDER is a JSON file of `cluster.py`. The node has all kinds of namespaces: when its first process is killed, all of it ends in
that moment, as if its power failed.
"""

import json
import os
import subprocess
import sys
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "kit"))
import namespaces
from control_groups import ROOT, is_unified, join_groups, pass_controllers_on

MS_SHARED, NEWCGROUP = 1 << 20, 0x2000000
SOCKET = "/run/containerd/containerd.sock"
# A kubelet would set these for the whole machine; it finds them set, in the node's own view.
SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


def mount_all(folder):
    """Mount /proc, /sys, control groups, and the node's own /run, /var/lib and /var/log."""
    namespaces.mount("none", "/", flags=namespaces.MS_REC | namespaces.MS_PRIVATE)
    namespaces.mount("proc", "/proc", "proc")
    namespaces.mount("sysfs", "/sys", "sysfs")
    mount_control_groups()
    namespaces.mount("tmpfs", "/run", "tmpfs")
    for name in ("lib", "log"):
        namespaces.bind(f"{folder}/{name}", f"/var/{name}")
    os.mkdir("/run/settings")
    for name, value in SETTINGS.items():
        if os.path.exists(f"/proc/sys/{name}"):
            path = f"/run/settings/{name.replace('/', '.')}"
            with open(path, "w") as file:
                file.write(f"{value}\n")
            namespaces.bind(path, f"/proc/sys/{name}")
    # What containers see has to reach them.
    namespaces.mount("none", "/", flags=namespaces.MS_REC | MS_SHARED)


def mount_control_groups():
    """Mount the hierarchies anew: the node's groups are their first ones then."""
    if is_unified():
        namespaces.mount("cgroup2", ROOT, "cgroup2")
        pass_controllers_on()
        return
    with open("/proc/self/cgroup") as file:
        names = [line.split(":")[1] for line in file]
    namespaces.mount("tmpfs", ROOT, "tmpfs")
    for name in filter(None, names):
        place = f"{ROOT}/{name.removeprefix('name=')}"
        os.mkdir(place)
        data = f"none,{name}" if name.startswith("name=") else name
        namespaces.mount("cgroup", place, "cgroup", data=data)
        for alias in name.split(","):
            if "," in name:
                os.symlink(name, f"{ROOT}/{alias}")


def start(order, name, words):
    """Start a program of the node; what it says goes to a file."""
    with open(f"{order['logs']}/{order['name']}.{name}.log", "ab") as log:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def run_programs(order):
    """Start the programs in their order."""
    programs, conf = order["programs"], order["conf"]
    os.environ.update(PATH=f"{programs}:{os.environ['PATH']}", HOME="/var/lib")
    start(order, "containerd", [f"{programs}/containerd", "-c", f"{conf}/containerd.toml"])
    ctr = [f"{programs}/ctr", "-a", SOCKET, "-n", "k8s.io"]
    never, silent = threading.Event(), {"capture_output": True, "check": False}
    while subprocess.run([*ctr, "version"], **silent).returncode != 0:
        never.wait(0.1)
    start(order, "images", [*ctr, "images", "import", order["images"]]).wait()
    own = ["--hostname-override", order["name"]]
    kubelet = [f"{programs}/kubelet", f"--config={conf}/kubelet.json", *own]
    kubelet += [f"--kubeconfig={order['kubeconfig']}", f"--node-ip={order['address']}"]
    start(order, "kubelet", kubelet)
    start(order, "proxy", [f"{programs}/kube-proxy", f"--config={conf}/proxy.json", *own])


def live(order):
    """Be the first process of the node."""
    namespaces.set_host_name(order["name"])
    print("made", flush=True)
    if not sys.stdin.readline():
        return
    mount_all(order["folder"])
    run_programs(order)
    while True:
        os.wait()  # kubelet and the others live as long as the node; what containers leave is reaped


def main():
    with open(sys.argv[1]) as file:
        order = json.load(file)
    join_groups(order["group"])
    namespaces.unshare(
        namespaces.NEWNS
        | namespaces.NEWNET
        | namespaces.NEWUTS
        | namespaces.NEWIPC
        | namespaces.NEWPID
        | NEWCGROUP
    )
    pid = os.fork()
    if pid == 0:
        live(order)
        os._exit(1)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
