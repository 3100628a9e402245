"""Runs a command in a Slurm lab, on one of its hosts; a script that is started by `slurm_lab.py`.

    python slurm_enter.py FIRST HOST UID CWD WORDS...

FIRST is the pid of the lab's first process, HOST that of the host's holder. Signals are passed on,
the end of the command is the end of this process, and when this one is killed the command is too.
"""

import ctypes
import os
import signal
import sys
import warnings  # noqa: F401  os.execvp needs it when another user can no longer read it

NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG = 1
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
libc = ctypes.CDLL(None, use_errno=True)


def checked(result, what):
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def enter(first, host):
    spaces = [(host, "net", NEWNET), (host, "uts", NEWUTS), (first, "ipc", NEWIPC)]
    spaces += [(first, "pid", NEWPID), (first, "mnt", NEWNS)]
    files = [
        (os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY), name, kind) for pid, name, kind in spaces
    ]
    for file, name, kind in files:
        checked(libc.setns(file, kind), f"setns {name}")
        os.close(file)


def become(uid, cwd, words):
    if uid != os.getuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    checked(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.chdir(cwd)
    os.execvp(words[0], words)


def main():
    first, host, uid = (int(word) for word in sys.argv[1:4])
    cwd, words = sys.argv[4], sys.argv[5:]
    enter(first, host)
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
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
