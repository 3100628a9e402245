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
from namespaces import (
    MS_PRIVATE,
    MS_REC,
    NEWIPC,
    NEWNET,
    NEWNS,
    NEWPID,
    NEWUTS,
    bind,
    die_with_parent,
    forked,
    ip,
    mount,
    reap_orphans,
    set_host_name,
    stay,
    tell_and_wait,
    unshare,
    wait_for_end_of_lifeline,
)

LOGIN, PREFIX = "login", "10.88.0"


def first_process(folder):
    """Return what the lab's first process does: mounts, then wait for the lifeline's end."""

    def action(ready):
        die_with_parent()
        reap_orphans()
        mount("proc", "/proc", "proc")
        for name in ("hosts", "resolv.conf", "nsswitch.conf"):
            if os.path.exists(f"/etc/{name}"):
                bind(os.path.join(folder, name), f"/etc/{name}")
        ready()
        wait_for_end_of_lifeline()

    return action


def node(name):
    """Return what the process does that holds a node's network and name."""

    def action(ready):
        unshare(NEWNET | NEWUTS)
        set_host_name(name)
        ready()
        stay()

    return action


def address(number):
    return f"{PREFIX}.{number}"


def connect(name, number, pid):
    """Give the node of this pid (of the lab, where `ip` and `nsenter` run too) its link."""
    ip(f"link add {name} type veth peer name eth0 netns {pid}", f"link set {name} master lab0 up")
    ip(
        f"addr add {address(number)}/24 dev eth0",
        "link set eth0 up",
        "link set lo up",
        f"route add default via {address(254)}",
        net_of=pid,
    )


def main():
    folder, names = sys.argv[1], sys.argv[2:]
    unshare(NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET)
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    set_host_name(LOGIN)
    first, _ = forked(first_process(folder))
    ip("link set lo up", "link add lab0 type bridge", f"addr add {address(254)}/24 dev lab0")
    ip("link set lab0 up")
    pids = {LOGIN: first}
    for number, name in enumerate(names, 1):
        pids[name], inner = forked(node(name))
        connect(name, number, inner)
    tell_and_wait(json.dumps(pids))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
