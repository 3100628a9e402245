"""Holds the namespaces of a Slurm lab; a script that is started by `slurm_lab.py`.

    python slurm_house.py FOLDER NODE...      stdin: the lifeline; its end ends everything

All of the lab, its bridge and links too, is in namespaces of processes, network, names and mounts
that no file names (`kit/namespaces.py`). This script removes FOLDER when its last process has ended.
"""

import json
import os
import shutil
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "kit"))
import namespaces

LOGIN, PREFIX = "login", "10.88.0"


def first_process(folder):
    """Return what the lab's first process does: mounts, then wait for the lifeline's end."""

    def action(ready):
        namespaces.die_with_parent()
        namespaces.reap_orphans()
        namespaces.mount("proc", "/proc", "proc")
        for name in ("hosts", "resolv.conf", "nsswitch.conf"):
            if os.path.exists(f"/etc/{name}"):
                namespaces.bind(os.path.join(folder, name), f"/etc/{name}")
        ready()
        namespaces.wait_for_end_of_lifeline()

    return action


def node(name):
    """Return what the process does that holds a node's network and name."""

    def action(ready):
        namespaces.unshare(namespaces.NEWNET | namespaces.NEWUTS)
        namespaces.set_host_name(name)
        ready()
        namespaces.stay()

    return action


def address(number):
    return f"{PREFIX}.{number}"


def connect(name, number, pid):
    """Give the node of this pid (of the lab, where `ip` and `nsenter` run too) its link."""
    namespaces.ip(
        f"link add {name} type veth peer name eth0 netns {pid}", f"link set {name} master lab0 up"
    )
    namespaces.ip(
        f"addr add {address(number)}/24 dev eth0",
        "link set eth0 up",
        "link set lo up",
        f"route add default via {address(254)}",
        net_of=pid,
    )


def main():
    folder, names = sys.argv[1], sys.argv[2:]
    namespaces.unshare(
        namespaces.NEWNS
        | namespaces.NEWUTS
        | namespaces.NEWIPC
        | namespaces.NEWPID
        | namespaces.NEWNET
    )
    namespaces.mount("none", "/", flags=namespaces.MS_REC | namespaces.MS_PRIVATE)
    namespaces.set_host_name(LOGIN)
    first, _ = namespaces.forked(first_process(folder))
    namespaces.ip(
        "link set lo up", "link add lab0 type bridge", f"addr add {address(254)}/24 dev lab0"
    )
    namespaces.ip("link set lab0 up")
    pids = {LOGIN: first}
    for number, name in enumerate(names, 1):
        pids[name], inner = namespaces.forked(node(name))
        connect(name, number, inner)
    namespaces.tell_and_wait(json.dumps(pids))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
