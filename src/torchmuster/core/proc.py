"""Start commands, and end them with all their descendants; no other module starts commands.

Standard library only: agents use it on nodes where nothing else is installed.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torchmuster.errors import MusterError

# The script that starts each of our programs on a node; it is run by its path.
PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NODE_ENTRY = os.path.join(PACKAGE_FOLDER, "core", "programs", "__main__.py")

# The options of prctl(2), from the kernel's header linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


# PBS sets it in every process of a job. Its daemons recognize a job by the sessions that they
# started: a process in another session is not accounted, limited, suspended or ended.
_OF_A_JOB_BY_SESSION = "PBS_JOBID"

# As a command's standard output or error: nobody reads it.
NOWHERE = subprocess.DEVNULL

# Children of the shell that replaced itself with us by `exec`: the `tee` in `exec muster > >(tee
# log)`.
_inherited: frozenset[int] | None = None
_spared: set[int] = set()
_left_sessions: set[int] = set()  # of processes that may outlive a successful run


def importable(path: str | None, root: str) -> str:
    """Return a PYTHONPATH with which scripts can import torchmuster: `path`, then `root`."""
    return os.pathsep.join([*([path] if path else []), root])


def node_program(name: str, *words: str, python: str = sys.executable) -> list[str]:
    """Return the command line of one of our programs, isolated from site packages and variables."""
    return [python, "-I", "-S", NODE_ENTRY, name, *words]


class HasStatus(Protocol):
    """A process whose exit status can be polled: started or forked here, or forked by a server."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit status (negative for a signal), or None while the process runs."""

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; return the exit status or None when the time is up."""

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the process has been reaped already."""


@runtime_checkable
class ForkedAgent(HasStatus, Protocol):
    """An agent that something else has forked for us."""

    def wait_started(self) -> None:
        """Wait until it has started.

        Raises:
            MusterError: It can't start.
        """

    def let_go(self) -> None:
        """Stop watching it; its lifeline ends it."""


class Child:
    """A child that this process started as a command."""

    def __init__(self, popen: "subprocess.Popen[bytes]") -> None:
        self._popen = popen
        self.pid = popen.pid

    def poll(self) -> int | None:
        """Return the exit status (negative for a signal), or None while the process runs."""
        return self._popen.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; return the exit status or None when the time is up."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the process has been reaped already."""
        self._popen.send_signal(signum)


def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
    takes_terminal: bool = False,
) -> Child:
    """Start a command, detached as by `detach_from_parent`; standard input defaults to /dev/null.

    Args:
        argv: The command.
        env: Its environment; None: ours.
        cwd: Its working directory.
        stdin: Its standard input.
        stdout: Its standard output; None: ours.
        stderr: Its standard error; None: ours.
        pass_fds: Further descriptors that it inherits.
        takes_terminal: It makes its standard input its controlling terminal, which only a session
            leader can.

    Raises:
        MusterError: The command can't be executed.
    """
    _note_inherited()
    try:
        popen = subprocess.Popen(
            list(argv),
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(pass_fds),
            start_new_session=takes_terminal or not keeps_session(),
            process_group=0 if keeps_session() and not takes_terminal else None,
        )
    except OSError as error:
        raise _not_started(argv, error) from error
    return Child(popen)


def _not_started(argv: Sequence[str], error: OSError) -> MusterError:
    where = " ".join(argv)[:200]
    return MusterError(f"`{argv[0]}` can't be started", where=where, why=str(error))


def keeps_session() -> bool:
    """Say whether our processes have to stay in this session: in a PBS job they do."""
    return bool(os.environ.get(_OF_A_JOB_BY_SESSION))


def detach_from_parent() -> None:
    """Leave the parent's process group, so that signals to that group don't reach this process.

    In its own session a process also has no terminal; in a PBS job it must stay in the job's
    session.
    """
    if keeps_session():
        os.setpgid(0, 0)
    else:
        os.setsid()


def start_spared(
    argv: Sequence[str],
    *,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
) -> Child:
    """Start a command that `end_children` spares; the caller ends it, then calls `let_go`.

    Raises:
        MusterError: The command can't be executed.
    """
    child = start(argv, stdin=stdin, stdout=stdout, stderr=stderr)
    _spared.add(child.pid)
    return child


def let_go(child: Child) -> None:
    """Forget a child of `start_spared` that has been reaped."""
    _spared.discard(child.pid)


def leave_sessions(sessions: Iterable[int]) -> None:
    """Make `end_children` spare the processes of these sessions from now on."""
    _left_sessions.update(sessions)


def own_package_environment() -> dict[str, str]:
    """Return our environment, extended so that another Python imports this very torchmuster."""
    source, path = os.path.dirname(PACKAGE_FOLDER), os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{path}" if path else source}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutput:
    """The output of a short helper process; the status is None when it timed out."""

    status: int | None
    stdout: bytes
    stderr: bytes


def ask(argv: Sequence[str], request: bytes, timeout_s: float) -> CommandOutput:
    """Run a command with `request` on standard input until it ends; kill it after `timeout_s`.

    Raises:
        MusterError: The command can't be executed.
    """
    _note_inherited()
    try:
        done = subprocess.run(
            list(argv), input=request, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        return CommandOutput(status=None, stdout=b"", stderr=error.stderr or b"")
    except OSError as error:
        raise _not_started(argv, error) from error
    return CommandOutput(status=done.returncode, stdout=done.stdout, stderr=done.stderr)


def ask_spared(argv: Sequence[str], timeout_s: float) -> CommandOutput:
    """Run a command that `end_children` spares, from any thread; kill it after `timeout_s`.

    Raises:
        MusterError: The command can't be executed.
    """
    _note_inherited()
    try:
        popen = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=not keeps_session(),
            process_group=0 if keeps_session() else None,
        )
    except OSError as error:
        raise _not_started(argv, error) from error
    _spared.add(popen.pid)
    with popen:
        try:
            out, err = popen.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            popen.kill()
            return CommandOutput(status=None, stdout=b"", stderr=b"")
        finally:
            _spared.discard(popen.pid)
    return CommandOutput(status=popen.returncode, stdout=out, stderr=err)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """What /proc says about one process."""

    pid: int
    parent_pid: int
    group: int
    session: int
    state: str
    start_ticks: int

    @property
    def can_run(self) -> bool:
        """Say whether it can still run: a zombie can't."""
        return self.state not in ("Z", "X")


def read_process(pid: int) -> ProcessFacts | None:
    """Return the facts about a process, a zombie included; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            text = stat.read()
    except OSError:
        return None
    # The name is in parentheses and may contain anything, parentheses included.
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessFacts(
        pid=pid,
        state=fields[0].decode(),
        parent_pid=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
    )


def is_running(pid: int) -> bool:
    """Say whether `pid` is a process that can still run; a zombie can't."""
    facts = read_process(pid)
    return facts is not None and facts.can_run


def local_process_state(pid: int, whose: tuple[str, str], own: tuple[str, str]) -> str | None:
    """Return the state of a process on this machine (`X`: gone); None if it may be elsewhere.

    `whose` and `own` are (`boot_id()`, `network_id()`) of that process and of this one.
    """
    if whose != own or not all(own):
        return None
    facts = read_process(pid)
    return facts.state if facts is not None else "X"


def process_state_here(pid: int, whose: tuple[str, str]) -> str | None:
    """Return `local_process_state` of a process with the ids `whose`, seen from this process."""
    return local_process_state(pid, whose, (boot_id(), network_id()))


def all_processes() -> list[ProcessFacts]:
    """Return the facts of every process that /proc shows."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [facts for facts in found if facts is not None]


def descendants(root: int) -> list[int]:
    """Return the pids of all living processes below `root`, parents before children."""
    children: dict[int, list[int]] = {}
    for facts in all_processes():
        if facts.can_run:
            children.setdefault(facts.parent_pid, []).append(facts.pid)
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def leader_of(facts: ProcessFacts, leaders: Container[int]) -> int | None:
    """Return the process in `leaders` that started this one, by session or group; None if none."""
    return next((pid for pid in (facts.session, facts.group) if pid in leaders), None)


def kill_quietly(pid: int, signum: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def kill_session(leader: int) -> None:
    """SIGKILL the process group of a command of `start` and the rest of its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    for facts in all_processes():
        if facts.session == leader and facts.can_run:
            kill_quietly(facts.pid)


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that none escapes by forking twice."""
    _note_inherited()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to SIGKILL this process when its parent dies; die now if it already has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def catches_signal(pid: int, signum: int) -> bool:
    """Say whether the process handles `signum` itself (`SigCgt` in /proc)."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            for line in status:
                if line.startswith(b"SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    except OSError:
        return False
    return False


def boot_id() -> str:
    """Return an id of this boot of the kernel and of this process namespace."""
    return _namespace_id("pid")


def network_id() -> str:
    """Return an id of this boot of the kernel and of this network namespace."""
    return _namespace_id("net")


def _namespace_id(kind: str) -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}/{os.readlink(f'/proc/self/ns/{kind}')}"
    except OSError:
        return ""


def children_of(pid: int) -> list[int]:
    """Return the pids of the direct children of `pid`, zombies included."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):  # each lists only those that it started
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as children:
                found += [int(word) for word in children.read().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN, or a thread that has just ended
        return [facts.pid for facts in all_processes() if facts.parent_pid == pid]
    return found


def _note_inherited() -> None:
    """Remember the children that existed before our first; they are not ours to end."""
    global _inherited
    if _inherited is None:
        _inherited = frozenset(children_of(os.getpid()))


def end_children(keep: frozenset[int] = frozenset()) -> bool:
    """SIGKILL and reap every child of this process except `keep`; return whether any is left.

    Call it until it returns False: when this process is a subreaper, the children of a killed child
    become ours, so each pass meets the next generation.
    """
    keep |= (_inherited or frozenset()) | _spared
    left = False
    for pid in _ended_children(keep):
        kill_quietly(pid)
        try:
            reaped, _ = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue
        left = left or reaped == 0
    return left or bool(_ended_children(keep))


def _ended_children(keep: frozenset[int]) -> list[int]:
    """Return the children that `end_children` has to end."""
    found = [pid for pid in children_of(os.getpid()) if pid not in keep]
    if not _left_sessions:
        return found
    facts = [read_process(pid) for pid in found]
    return [f.pid for f in facts if f is not None and f.session not in _left_sessions]


def name_of(pid: int) -> str:
    """Return the short name of a process."""
    try:
        with open(f"/proc/{pid}/comm", errors="replace") as name:
            return name.read().strip()
    except OSError:
        return "?"


# An agent connects a second or two after its start; a host with a cold file system needs longer.
# OpenPBS's pbsdsh hangs for ever when its host is gone, even if the host returns, so a start needs
# a limit.
CALL_LIMIT_S = 60.0
_MAX_LINES = 4
_MAX_LINE = 200
_DRAIN_S = 1.0


class Starter:
    """A command that starts an agent on another host.

    It forwards the command's standard error, and keeps its last lines for the case that it ends
    before an agent has connected.

    Attributes:
        child: The command: pbsdsh, srun, ssh.
        log_bytes: Length of the job's output before it.
    """

    def __init__(self, child: Child, stderr_fd: int, stdout_fd: int | None = None) -> None:
        self.child = child
        self.log_bytes = 0
        self._began_at = time.monotonic()
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._readings = [
            threading.Thread(target=self._read, args=(fd, fd == stderr_fd), daemon=True)
            for fd in (stderr_fd, stdout_fd)
            if fd is not None
        ]
        for reading in self._readings:
            reading.start()

    def is_late(self, now: float) -> bool:
        """Say whether the agent should have connected long ago, so that this start has failed."""
        return now - self._began_at > CALL_LIMIT_S

    def said(self) -> tuple[str, ...]:
        """Return the last lines of a command that has ended."""
        for reading in self._readings:
            reading.join(_DRAIN_S)  # a daemon that it started may hold the pipe open
        return tuple(self._lines)

    def _read(self, read_fd: int, passes_on: bool) -> None:
        with open(read_fd, "rb") as stream:
            for line in stream:
                if passes_on:
                    with contextlib.suppress(OSError):  # our own reader is gone
                        os.write(2, line)
                text = line.decode(errors="replace").strip()
                if text:
                    self._lines.append(text[:_MAX_LINE])


def start_agent(
    argv: Sequence[str], *, spared: bool = False, keeps_output: bool = False
) -> Starter:
    """Start a command that starts an agent.

    Args:
        argv: The command.
        spared: `end_children` spares it.
        keeps_output: Keep its standard output along with its standard error: the agent writes
            nothing there, and pbsdsh reports there how it ended.

    Raises:
        MusterError: The command can't be executed.
    """
    pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(1 + keeps_output)]
    streams = dict(zip(("stderr", "stdout"), (write_fd for _, write_fd in pipes), strict=False))
    try:
        child = (start_spared if spared else start)(argv, **streams)
    except BaseException:
        for read_fd, _ in pipes:
            os.close(read_fd)
        raise
    finally:
        for _, write_fd in pipes:
            os.close(write_fd)
    return Starter(child, *(read_fd for read_fd, _ in pipes))


def describe_end(status: int, said: Sequence[str]) -> str:
    """Return the sentence about a command that ended before its agent connected."""
    words = f": {' / '.join(said)}" if said else ", without a word"
    return f"what started its agent ended (exit code {status}){words}"
