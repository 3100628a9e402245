"""Holds the namespaces of a cluster; a script that is started by `cluster.py`.

    python house.py FOLDER GROUP      stdin: the lifeline; its end ends everything

All of the cluster is in a namespace of processes that no file names, its control plane in one of networks, with the bridge to
the nodes. This script removes FOLDER and the control groups named GROUP when the last process has ended.
"""

import os
import shutil
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "kit"))
import namespaces
from control_groups import remove_groups

BRIDGE, ADDRESS = "lab0", "10.94.0.254"
# A pod's packets pass the bridge of another network: no host is to be told of a shorter path.
SETTINGS = {
    "ip_forward": "1",
    "conf/all/send_redirects": "0",
    "conf/default/send_redirects": "0",
}


def first_process(ready):
    """Wait for the lifeline's end."""
    namespaces.die_with_parent()
    namespaces.reap_orphans()
    ready()
    namespaces.wait_for_end_of_lifeline()


def main():
    folder, group = sys.argv[1:3]
    namespaces.unshare(namespaces.NEWNET | namespaces.NEWPID)
    first, _ = namespaces.forked(first_process)
    for name, value in SETTINGS.items():
        with open(f"/proc/sys/net/ipv4/{name}", "w") as file:
            file.write(value)
    namespaces.ip(
        "link set lo up",
        f"link add {BRIDGE} type bridge",
        f"addr add {ADDRESS}/24 dev {BRIDGE}",
        f"link set {BRIDGE} up",
    )
    namespaces.tell_and_wait(str(first))
    remove_groups(group)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
