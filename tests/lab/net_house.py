"""Holds the namespaces of a network lab; a script that is started by `netlab.py`.

    python net_house.py FOLDER      stdin: the lifeline; its end ends everything

FOLDER/lab.json says which hosts and networks there are, and which files each host has of its own.
Each host is a process that holds its network, name, mounts, IPC and, for its children, its process
namespace; all are below the lab's own process namespace (`kit/namespaces.py`). This script removes FOLDER
when the last process of the lab has ended.
"""

import contextlib
import json
import os
import shutil
import signal
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "kit"))
import namespaces


def first_process(ready):
    """Be the lab's first process: its end is the lab's."""
    namespaces.die_with_parent()
    namespaces.reap_orphans()
    namespaces.mount("proc", "/proc", "proc")
    ready()
    namespaces.wait_for_end_of_lifeline()


def host(spec):
    """Return what the process does that holds a host."""

    def action(ready):
        namespaces.die_with_parent()
        namespaces.unshare(
            namespaces.NEWNET
            | namespaces.NEWUTS
            | namespaces.NEWNS
            | namespaces.NEWIPC
            | namespaces.NEWPID
        )
        namespaces.mount("none", "/", flags=namespaces.MS_REC | namespaces.MS_PRIVATE)
        namespaces.set_host_name(spec["name"])
        pid, _ = namespaces.forked(lambda up: hold(spec, up))
        ready()
        os.waitpid(pid, 0)

    return action


def hold(spec, ready):
    """Be the host's first process: arrange what its processes see, and reap them."""
    namespaces.die_with_parent()
    namespaces.reap_orphans()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    show_files(spec)
    ready()
    namespaces.stay()


def show_files(spec):
    """Mount what the host has of its own: kernel file systems, /tmp, /run and the files of `binds`."""
    namespaces.mount("proc", "/proc", "proc")
    groups = opened("/sys/fs/cgroup")
    namespaces.mount(
        "sysfs", "/sys", "sysfs"
    )  # shows the interfaces of the network that it is mounted from
    if groups is not None:
        with contextlib.suppress(OSError):
            namespaces.bind(groups, "/sys/fs/cgroup")
    namespaces.mount("tmpfs", "/dev/shm", "tmpfs", data="mode=1777")
    namespaces.mount("tmpfs", "/run", "tmpfs", data="mode=0755")
    os.mkdir("/run/sshd", 0o755)  # sshd wants it for the separation of its privileges
    for source, target in spec["binds"]:
        namespaces.bind(source, target)
    show_tmp(spec["tmp"], spec["keep"])
    for path in spec["hide"]:
        namespaces.mount("tmpfs", path, "tmpfs", data="mode=0755")


def opened(path):
    """Return a descriptor of a place, which reaches it when something else is mounted there; None if it isn't."""
    try:
        return os.open(path, os.O_PATH)
    except OSError:
        return None


def show_tmp(folder, keep):
    """Give the host a /tmp of its own, in which the places `keep` are seen as before."""
    if folder is None:
        return
    kept = [(path, os.open(path, os.O_PATH)) for path in keep]
    namespaces.bind(folder, "/tmp")
    for path, place in kept:
        os.makedirs(path, exist_ok=True)
        namespaces.bind(place, path)
        os.close(place)


def connect(spec, number, pid):
    """Give the host of this pid (of the lab) its interfaces."""
    inside = ["link set lo up"]
    for link in spec["links"]:
        name, kind = link["name"], link["kind"]
        if kind == "identical":
            inside.append(f"link add {name} type bridge")
        else:
            port = f"{name}.{number}"
            namespaces.ip(
                f"link add {port} type veth peer name {name} netns {pid}",
                f"link set {port} master {name}",
                f"link set {port} up",
            )
            if link["isolated"]:
                namespaces.ip(f"link set {port} type bridge_slave isolated on")
        inside += [f"addr add {link['address']} dev {name}"]
        inside += [f"link set {name} mtu {link['mtu']}"] if link["mtu"] else []
        inside += [f"link set {name} up"]
    namespaces.ip(*inside, net_of=pid)


def main():
    folder = sys.argv[1]
    with open(os.path.join(folder, "lab.json")) as file:
        lab = json.load(file)
    namespaces.unshare(
        namespaces.NEWNS
        | namespaces.NEWUTS
        | namespaces.NEWIPC
        | namespaces.NEWPID
        | namespaces.NEWNET
    )
    namespaces.mount("none", "/", flags=namespaces.MS_REC | namespaces.MS_PRIVATE)
    namespaces.set_host_name("lab")
    first, _ = namespaces.forked(first_process)
    namespaces.ip("link set lo up")
    for bridge, mtu in lab["bridges"]:
        namespaces.ip(
            f"link add {bridge} type bridge",
            f"link set {bridge} mtu {mtu}",
            f"link set {bridge} up",
        )
    pids = {}
    for number, spec in enumerate(lab["hosts"], 1):
        pids[spec["name"]], inner = namespaces.forked(host(spec))
        connect(spec, number, inner)
    namespaces.tell_and_wait(json.dumps({"first": first, "hosts": pids}))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
