"""Namespaces without a name: what the processes that hold a lab have in common.

A lab is a tree of processes in namespaces that no file names, so nothing of it is on the host and
the kernel removes it with its last process. Its first process reads the lifeline, a pipe that
whoever made the lab holds open: when he dies, however he dies, it ends, and the kernel kills every
process of the lab. Standard library only: the scripts that use this run with `-I -S`.
"""

import ctypes
import os
import signal
import subprocess
import sys

NEWNS, NEWUTS, NEWIPC = 0x20000, 0x4000000, 0x8000000
NEWPID, NEWNET = 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)


def checked(result, what):
    """Raise the error of a call of libc that has failed."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(kinds):
    """Give this process (for NEWPID: its children) new namespaces."""
    checked(libc.unshare(kinds), "unshare")


def mount(source, target, kind=None, flags=0, data=None):
    """Mount, in this process's mount namespace."""
    words = [os.fsencode(word) if word else None for word in (source, target, kind)]
    options = data.encode() if data else None
    checked(libc.mount(*words, ctypes.c_ulong(flags), options), f"mount {target}")


def bind(source, target):
    """Show a file or folder at another place; `source` may be a descriptor, of what is hidden now."""
    if isinstance(source, int):
        source = f"/proc/self/fd/{source}"
    mount(source, target, flags=MS_BIND | MS_REC)


def set_host_name(name):
    """Set the name of this process's UTS namespace."""
    checked(libc.sethostname(name.encode(), len(name)), "sethostname")


def die_with_parent():
    """Have the kernel kill this process when its parent ends."""
    checked(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def ip(*lines, net_of=None):
    """Run lines of `ip`, in the network of the process `net_of` (its pid in the lab) or in ours."""
    enter = [] if net_of is None else ["nsenter", f"--net=/proc/{net_of}/ns/net"]
    text = "".join(f"{line}\n" for line in lines)
    subprocess.run([*enter, "ip", "-batch", "-"], input=text, text=True, check=True)


def forked(action):
    """Run `action` in a child until it has called `ready`; return its pid here and in the lab."""
    said, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(said)
            action(lambda: (os.write(tell, str(os.getpid()).encode()), os.close(tell)))
        except BaseException as error:  # noqa: BLE001 - nothing may leave a forked child
            os.write(2, f"lab: {error!r}\n".encode())
        finally:
            os._exit(0)
    os.close(tell)
    inner = os.read(said, 20)
    os.close(said)
    if not inner:
        sys.exit("lab: a process did not come up")
    return pid, int(inner)


def reap_orphans():
    """Have the kernel reap the children of this process, the first of its process namespace."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def wait_for_end_of_lifeline():
    """Return when nobody holds the other end of our standard input."""
    while os.read(0, 4096):
        pass


def stay():
    """Wait for ever: a process that holds namespaces."""
    while True:
        signal.pause()


def tell_and_wait(text):
    """Tell the maker of the lab that it stands; return when the last of our children has ended."""
    os.write(1, text.encode() + b"\n")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    try:
        while True:  # all of them: the kernel ends the first process when the others are reaped
            os.wait()
    except ChildProcessError:
        pass
