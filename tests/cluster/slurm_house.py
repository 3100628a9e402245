"""Holds the namespaces of a Slurm lab; a script that is started by `slurm_lab.py`.

    python slurm_house.py FOLDER NODE...      stdin: the lifeline; its end ends everything

All of the lab, its bridge and links too, is in namespaces of processes, network, names and mounts
that no file names, so nothing of it is on the host and the kernel removes it with its last process.
The first process of the lab reads the lifeline: when whoever holds the other end dies, however he
dies, it ends, and the kernel kills every process of the lab. This one then removes FOLDER.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys

NEWNS, NEWUTS, NEWIPC = 0x20000, 0x4000000, 0x8000000
NEWPID, NEWNET = 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_PDEATHSIG = 1
LOGIN, PREFIX = "login", "10.88.0"
libc = ctypes.CDLL(None, use_errno=True)


def checked(result, what):
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source, target, kind=None, flags=0):
    words = [word.encode() if word else None for word in (source, target, kind)]
    checked(libc.mount(*words, ctypes.c_ulong(flags), None), f"mount {target}")


def die_with_parent():
    checked(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def ip(*lines):
    text = "".join(f"{line}\n" for line in lines)
    subprocess.run(["ip", "-batch", "-"], input=text, text=True, check=True)


def forked(action):
    """Run `action` in a child until it has called `ready`; return its pid here and in the lab."""
    said, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(said)
            action(lambda: (os.write(tell, str(os.getpid()).encode()), os.close(tell)))
        except BaseException as error:  # noqa: BLE001 - nothing may leave a forked child
            os.write(2, f"slurm_house: {error!r}\n".encode())
        finally:
            os._exit(0)
    os.close(tell)
    inner = os.read(said, 20)
    os.close(said)
    if not inner:
        sys.exit("slurm_house: a process of the lab did not come up")
    return pid, int(inner)


def first_process(folder):
    """Return what the lab's first process does: mounts, then wait for the lifeline's end."""

    def action(ready):
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the orphans of the lab
        mount("proc", "/proc", "proc")
        for name in ("hosts", "resolv.conf", "nsswitch.conf"):
            if os.path.exists(f"/etc/{name}"):
                mount(os.path.join(folder, name), f"/etc/{name}", flags=MS_BIND)
        ready()
        while os.read(0, 4096):
            pass

    return action


def node(name):
    """Return what the process does that holds a node's network and name."""

    def action(ready):
        checked(libc.unshare(NEWNET | NEWUTS), "unshare")
        checked(libc.sethostname(name.encode(), len(name)), "sethostname")
        ready()
        while True:
            signal.pause()

    return action


def address(number):
    return f"{PREFIX}.{number}"


def connect(name, number, pid):
    """Give the node of this pid (of the lab, where `ip` and `nsenter` run too) its link."""
    ip(f"link add {name} type veth peer name eth0 netns {pid}", f"link set {name} master lab0 up")
    inside = [
        f"addr add {address(number)}/24 dev eth0",
        "link set eth0 up",
        "link set lo up",
        f"route add default via {address(254)}",
    ]
    subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-"],
        input="\n".join(inside) + "\n",
        text=True,
        check=True,
    )


def main():
    folder, names = sys.argv[1], sys.argv[2:]
    checked(libc.unshare(NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET), "unshare")
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    checked(libc.sethostname(LOGIN.encode(), len(LOGIN)), "sethostname")
    first, _ = forked(first_process(folder))
    ip("link set lo up", "link add lab0 type bridge", f"addr add {address(254)}/24 dev lab0")
    ip("link set lab0 up")
    pids = {LOGIN: first}
    for number, name in enumerate(names, 1):
        pids[name], inner = forked(node(name))
        connect(name, number, inner)
    os.write(1, json.dumps(pids).encode() + b"\n")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    try:
        while True:  # all of them: the kernel ends the first process when the others are reaped
            os.wait()
    except ChildProcessError:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
