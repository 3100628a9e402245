"""What a careless lab would leave on the machine: for the tests that labs leave nothing."""

import hashlib
import os
import subprocess
from pathlib import Path


def machine(words=("slurm", "munge", "netns", "muster-lab", "sshd")):
    """Return links, mounts, named namespaces and files: a set, so that what others remove doesn't count.

    Args:
        words: Of files outside of /etc, those count whose path has one of these words.
    """
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    found = {("link", line.split(":")[1].strip()) for line in links.splitlines()}
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found |= {("mount", line.split()[4]) for line in mounts}
    found |= {("group", str(path)) for path in Path("/sys/fs/cgroup").rglob("*slurm*")}
    for top in ("/etc", "/run", "/var/spool", "/var/log", "/var/lib/munge"):
        for folder, _, names in os.walk(top):
            for path in (folder, *(os.path.join(folder, name) for name in names)):
                if top == "/etc" or any(word in path for word in words):
                    found.add(("file", path, os.lstat(path).st_mtime_ns))
    for name in ("hosts", "hostname", "passwd", "shadow", "resolv.conf"):
        found.add(("content", name, _checksum(Path("/etc") / name)))
    return found


def inside(folder, pids, space=None):
    """Return the processes of a lab, by pid.

    Args:
        folder: The lab's own, as text: who names it on his command line is of the lab.
        pids: Of the holders of its hosts: who entered one of them is of the lab.
        space: Its process namespace, as /proc names it.
    """
    words = [folder.encode(), *(f"enter.py\0{pid}\0".encode() for pid in pids)]
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            of_lab = os.readlink(process / "ns" / "pid") == space
            line = (process / "cmdline").read_bytes()
        except OSError:
            continue
        found += [process.name] if of_lab or any(word in line for word in words) else []
    return found


def _checksum(path):
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
