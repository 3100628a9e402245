"""How faults of a node are made: small disks, dead mounts, control groups, limits of what its sshd starts."""

import contextlib
import os
import resource
import subprocess
import sys
import uuid
from pathlib import Path

DEAD_MOUNT = Path(__file__).with_name("dead_mount.py")
GROUPS_V1, GROUPS_V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def done(bench, host, *argv):
    """Run a command on a host; it has to work."""
    ended = bench.lab.run(host, argv)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def home(bench, host):
    """Return a host's own HOME, seen from outside."""
    return bench.lab.root(host) / "home"


@contextlib.contextmanager
def disk(bench, host, path, options):
    """Mount a file system of memory on a host: `size=1m`, or `ro`."""
    done(bench, host, "mkdir", "-p", path)
    done(bench, host, "mount", "-t", "tmpfs", "-o", options, "lab", path)
    try:
        yield
    finally:
        done(bench, host, "umount", "-l", path)


@contextlib.contextmanager
def dead_mount(bench, host, path, error=0):
    """Mount a file system that answers nothing, or every question with an error number; yield its server."""
    done(bench, host, "mkdir", "-p", path)
    words = [sys.executable, "-I", "-S", str(DEAD_MOUNT), path, str(error)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = bench.lab.start(host, words, **pipes)
    try:
        assert server.stdout.readline() == b"mounted\n"
        yield server
    finally:
        server.kill()
        server.communicate()
        bench.lab.run(host, ["umount", "-l", path])


# Removes a control group when its last process has ended; it outlives whoever started it.
REMOVE = 'read line; for i in $(seq 300); do rmdir "$0" && exit; sleep 0.1; done'


@contextlib.contextmanager
def memory_limit(bench, host, limit_bytes):
    """Put a host's sshd, so all that it starts, into a control group with this limit.

    The group ends with the host's processes.
    """
    is_second = (GROUPS_V2 / "cgroup.controllers").exists()
    group = (GROUPS_V2 if is_second else GROUPS_V1) / f"muster-lab-{uuid.uuid4().hex[:8]}"
    limit = group / ("memory.max" if is_second else "memory.limit_in_bytes")
    words = ["sh", "-c", REMOVE, str(group)]
    quiet = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen(words, **quiet) as remover:
        try:
            group.mkdir()
            limit.write_text(str(limit_bytes))
            for pid in bench.lab.processes(host):
                (group / "cgroup.procs").write_text(str(pid))
            yield
        finally:
            bench.lab.kill(host)
            remover.communicate()
    assert not group.exists()


def may_limit_memory():
    """Return why no control group with a limit of memory can be made here; None when one can."""
    if (GROUPS_V2 / "cgroup.controllers").exists():
        on = (GROUPS_V2 / "cgroup.subtree_control").read_text().split()
        return (
            None if "memory" in on else "the memory controller is not on in the root control group"
        )
    return None if os.access(GROUPS_V1, os.W_OK) else "there is no control group of memory"


@contextlib.contextmanager
def open_files_limit(bench, host, most):
    """Let what a host's sshd starts open only so many files; it ends with the host's processes."""
    try:
        for pid in bench.lab.processes(host):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
        yield
    finally:
        bench.lab.kill(host)
