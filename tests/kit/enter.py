"""Runs a command on a host of a lab; a script, started by the classes of the labs.

    python enter.py HOST UID CWD WORDS...

HOST is the pid of the process that holds the host's namespaces. Signals are passed on, the end of
the command is the end of this process, and when this one is killed the command is too.
"""

import os
import signal
import sys
import warnings  # noqa: F401  os.execvp needs it when another user can no longer read it

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from namespaces import NEWIPC, NEWNET, NEWNS, NEWPID, NEWUTS, checked, die_with_parent, libc

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# The names last: /proc is another one then. A host's own processes are its holder's children.
SPACES = (
    ("net", NEWNET),
    ("uts", NEWUTS),
    ("ipc", NEWIPC),
    ("pid_for_children", NEWPID),
    ("mnt", NEWNS),
)


def enter(host):
    """Join the namespaces of a host."""
    files = [(os.open(f"/proc/{host}/ns/{name}", os.O_RDONLY), name, kind) for name, kind in SPACES]
    for file, name, kind in files:
        checked(libc.setns(file, kind), f"setns {name}")
        os.close(file)


def become(uid, cwd, words):
    """Become the command."""
    if uid != os.getuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.chdir(cwd)
    os.execvp(words[0], words)


def follow(pid):
    """Wait for the command and end as it did."""
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def main():
    host, uid = (int(word) for word in sys.argv[1:3])
    cwd, words = sys.argv[3], sys.argv[4:]
    enter(host)
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    pid = os.fork()
    if pid == 0:
        try:
            become(uid, cwd, words)
        except OSError as error:
            os.write(2, f"{words[0]}: {error}\n".encode())
        os._exit(127)
    for signum in PASSED_ON:
        signal.signal(signum, lambda signum, frame: os.kill(pid, signum))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    follow(pid)


if __name__ == "__main__":
    main()
