"""Namespaces without a name: for tests that need hosts, networks or mounts of their own.

No file names them, so nothing of them is on the machine, and the kernel removes them with their last
process. That one reads a pipe that whoever made it holds open: when he dies, however he dies, it ends.

- `small_disk` runs a command on a file system of a few KiB.
- `HeldNetworks` are network namespaces in which commands of the test run.
- The rest is for the houses of whole labs (`lab/net_house.py`, `cluster/slurm_house.py`): trees of processes with all
  kinds of namespaces, which `enter.py` enters. They are scripts that run with `-I -S`: standard library only.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys

NEWNS, NEWUTS, NEWIPC = 0x20000, 0x4000000, 0x8000000
NEWPID, NEWNET = 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)
ENTER = (
    sys.executable,
    "-I",
    "-S",
    os.path.join(os.path.dirname(os.path.abspath(__file__)), "enter.py"),
)
_HOLDER = "import sys; print('here', flush=True); sys.stdin.read()"


def why_not(what, programs, kinds, trial, *, install=""):
    """Return why `what` can't be made on this machine; None when it can.

    Args:
        what: With its article, for the sentence.
        programs: Commands that it needs.
        kinds: The namespaces that it needs, as letters of unshare(1).
        trial: A line of the shell that has to succeed in them.
        install: The packages that have the programs.
    """
    from kit.world import MACHINE_PATH  # not known to the scripts of the labs

    if os.geteuid() != 0:
        return f"{what} needs root"
    needed = (*programs, "unshare")
    if missing := [name for name in needed if shutil.which(name, path=MACHINE_PATH) is None]:
        return f"{what} needs {', '.join(missing)}{f': apt-get install {install}' * bool(install)}"
    words = ["unshare", f"-{kinds}", "sh", "-ec", trial]
    tried = subprocess.run(words, capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"{what} can't be made here: {tried.stderr.strip()}"


# For single tests.


def why_no_mount():
    """Return why no file system can be mounted for one command; None when it can."""
    return why_not("a private mount", ("mount",), "m", "mount -t tmpfs none /tmp")


def small_disk(folder, size):
    """Return the words that run a command with a file system of this size at a folder, seen by it alone."""
    script = 'mount -t tmpfs -o size="$1" none "$0"; shift; exec "$@"'
    return ["unshare", "-m", "sh", "-ec", script, str(folder), size]


def why_no_networks():
    """Return why no `HeldNetworks` can be made; None when they can."""
    trial = "ip link add lab0 type bridge"
    return why_not("a network of one's own", ("ip", "nsenter"), "n", trial)


class HeldNetworks:
    """Some namespaces of network and host name, numbered from 0, each held by a process; a context manager.

    Attributes:
        spaces: The kinds of namespaces, as unshare(1) and nsenter(1) call them.
        pids: Of the processes that hold them.
    """

    spaces = ("net", "uts")

    def __init__(self, count):
        self._count = count
        self._stack = contextlib.ExitStack()
        self.pids = []

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self.pids = [stack.enter_context(_holder(self.spaces)).pid for _ in range(self._count)]
            self.connect()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error):
        self._stack.close()

    def connect(self):
        """Give them links; none unless a class of them does."""

    def argv(self, number, command):
        """Return a command as it is run in one of them."""
        return ["nsenter", f"--target={self.pids[number]}", *_options(self.spaces), *command]

    def ip(self, number, *lines):
        """Run lines of `ip` in one of them."""
        ip(*lines, net_of=self.pids[number])


def _options(spaces):
    return [f"--{space}" for space in spaces]


@contextlib.contextmanager
def _holder(spaces):
    argv = ["unshare", *_options(spaces), sys.executable, "-S", "-c", _HOLDER]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"here\n"
            yield holder
        finally:
            holder.stdin.close()
            holder.wait(10)


# For labs.


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
