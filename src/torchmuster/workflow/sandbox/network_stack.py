"""Connect a private network to the outside through a user-mode network stack, if installed.

slirp4netns    one process for all tasks; its tap is a port of the hub's bridge
pasta          one process per task, since it serves one guest only; adds a second interface

Both run in the machine's own network as our user, need no root, and map nothing of the machine's
loopback into the network. They are children of a guard, which the holder forks before it enters its
namespaces. The guard's only task is to end them when the holder is gone, which closes a pipe.
"""

import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.core import proc

TAP = "tap0"
OUTSIDE = "out0"
PROGRAMS = ("slirp4netns", "pasta")
GATEWAY, RESOLVER = 2, 3  # last numbers of their addresses, as in slirp4netns
FIRST_TASK = 4
_READY_S = 10.0
_POLL_S = 0.01
_MAX_MESSAGE_CHARS = 2000
_READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkHolderArguments:
    """The command line of `network`.

    Attributes:
        addresses: The addresses of the tasks.
        interface: The name of the interface in each task's namespace.
        stack: Program, networks and resolver of the network stack; None without one.
    """

    addresses: tuple[str, ...]
    interface: str
    stack: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkStack:
    """The network stack that the guard must start.

    Attributes:
        program: The path of the program.
        subnet: The tasks' own network, `10.1.2.0/24`.
        outside: The network of pasta's interface, which holds only that and a gateway.
        hub: The path of the hub's namespace; `user` is that of its user namespace.
        tasks: The paths of the tasks' namespaces.
        passes_names: Whether the machine's resolver is on its loopback, so that the stack must
            forward queries.
    """

    program: str
    subnet: str
    outside: str
    hub: str
    user: str | None
    tasks: tuple[str, ...]
    passes_names: bool

    @property
    def kind(self) -> str:
        """Return the name of the program."""
        return os.path.basename(self.program)


def find_program(which: Callable[[str], str | None] = shutil.which) -> str | None:
    """Return the path of the first installed program, or None."""
    return next((path for name in PROGRAMS if (path := which(name)) is not None), None)


def address_of(subnet: str, number: int) -> str:
    """Return the address with this last number in a /24 network."""
    return subnet.partition("/")[0].rpartition(".")[0] + f".{number}"


def slirp_argv(stack: NetworkStack, exit_fd: int, ready_fd: int) -> list[str]:
    """Return the command line of slirp4netns; the holder switches the tap on."""
    user = [f"--userns-path={stack.user}"] if stack.user else []
    argv = [stack.program, f"--exit-fd={exit_fd}", f"--ready-fd={ready_fd}", "--mtu=1500"]
    argv += [f"--cidr={stack.subnet}", "--disable-host-loopback", *user, "--netns-type=path"]
    return [*argv, stack.hub, TAP]


def pasta_argv(stack: NetworkStack, task: str) -> list[str]:
    """Return the command line of pasta for one task; it opens no port to the outside."""
    # pasta switches from root to `nobody`, which may not enter root's namespaces.
    user = [f"--userns={stack.user}"] if stack.user else ["--netns-only"]
    user += ["--runas=0:0"] if os.geteuid() == 0 else []
    argv = [stack.program, "--foreground", "--quiet", "--config-net", "--no-map-gw", "--ipv4-only"]
    argv += ["-t", "none", "-u", "none", "-T", "none", "-U", "none", f"--ns-ifname={OUTSIDE}"]
    argv += [f"--address={address_of(stack.outside, 100)}", "--netmask=24"]
    argv += [f"--gateway={address_of(stack.outside, GATEWAY)}"]
    if stack.passes_names:  # else another server would answer queries to the machine's resolver
        argv += [f"--dns-forward={address_of(stack.outside, RESOLVER)}"]
    return [*argv, *user, f"--netns={task}"]


class Guard:
    """The process, forked by `fork_guard`, that starts the holder's network stack and ends it."""

    def __init__(self, pid: int, orders: int, answers: int) -> None:
        self._pid = pid
        self._orders = orders  # closing it ends the guard
        self._answers = answers

    def open(self, stack: NetworkStack, is_open: Callable[[], bool]) -> str | None:
        """Start the stack; return None when it works, else why not.

        Args:
            stack: The network stack to start.
            is_open: Returns whether the tasks reach the outside, for a stack that does not report
                it.
        """
        wanted = {name: getattr(stack, name) for name in stack.__slots__}
        os.write(self._orders, json.dumps(wanted).encode() + b"\n")
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            said = _read_line(self._answers, _POLL_S)
            if said is not None:
                return None if said == _READY else said
            if is_open():
                os.write(self._orders, b"\n")
                return None
        return f"{stack.kind}: it was not ready within {_READY_S:.0f} s"


def fork_guard() -> Guard:
    """Fork the guard; call this before entering any namespace, in a single-threaded process."""
    order, orders = os.pipe2(os.O_CLOEXEC)
    answers, answer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            os.close(orders)
            os.close(answers)
            _detach()
            _guard(order, answer)
        finally:
            os._exit(0)
    os.close(order)
    os.close(answer)
    return Guard(pid, orders, answers)


def _detach() -> None:
    """Let go of the holder's streams: the reader of its answer waits until all copies close."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    proc.detach_from_parent()  # signals to the holder's process group must not reach us


def _guard(order: int, answer: int) -> None:
    line = _read_line(order, None)
    if line is None:
        return
    plain = json.loads(line)
    stack = NetworkStack(**{**plain, "tasks": tuple(plain["tasks"])})
    children: list[proc.Child] = []
    try:
        start = _start_slirp if stack.kind == "slirp4netns" else _start_pasta
        said = start(stack, children, order)
        os.write(answer, said.replace("\n", " ").encode() + b"\n")
        while said == _READY and os.read(order, 4096):
            pass
    finally:
        for child in children:
            child.send_signal(signal.SIGKILL)
        for child in children:
            child.wait(_READY_S)


def _start_slirp(stack: NetworkStack, children: list[proc.Child], order: int) -> str:
    del order
    alive, exit_end = os.pipe2(os.O_CLOEXEC)
    ready, ready_end = os.pipe2(os.O_CLOEXEC)
    said, said_end = os.pipe2(os.O_CLOEXEC)
    del exit_end  # open while we live: slirp4netns ends with a killed guard
    children.append(
        proc.start(
            slirp_argv(stack, alive, ready_end),
            stdout=said_end,
            stderr=said_end,
            pass_fds=[alive, ready_end],
        )
    )
    for fd in (alive, ready_end, said_end):
        os.close(fd)
    waiting = select.poll()
    waiting.register(ready, select.POLLIN)
    if waiting.poll(_READY_S * 1000) and os.read(ready, 1):
        return _READY
    return _describe_exit(stack.kind, said)


def _start_pasta(stack: NetworkStack, children: list[proc.Child], order: int) -> str:
    saids = []
    for task in stack.tasks:
        said, said_end = os.pipe2(os.O_CLOEXEC)
        # pasta drops root's right to look into other processes, so it gets the descriptor.
        fd = os.open(task, os.O_RDONLY | os.O_CLOEXEC)
        argv = pasta_argv(stack, f"/proc/self/fd/{fd}")
        children.append(proc.start(argv, stdout=said_end, stderr=said_end, pass_fds=[fd]))
        saids.append(said)
        for one in (fd, said_end):
            os.close(one)
    # pasta does not report when it is ready: the holder checks, and we report one that ends.
    while not select.select([order], [], [], _POLL_S)[0]:
        for child, said in zip(children, saids, strict=True):
            if child.poll() is not None:
                return _describe_exit(stack.kind, said)
    return _READY


def _describe_exit(kind: str, said: int) -> str:
    os.set_blocking(said, False)
    try:
        text = os.read(said, 1 << 16).decode(errors="replace")
    except OSError:
        text = ""
    lines = [line for line in text.splitlines() if line.strip() and "to syslog" not in line]
    why = "; ".join(lines[-2:] or ["it ended without a message"])
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        why += " (/dev/net/tun is not open to this user)"
    return f"{kind}: {why}"[:_MAX_MESSAGE_CHARS]


def _read_line(fd: int, timeout_s: float | None) -> str | None:
    text = b""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not text.endswith(b"\n"):
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([fd], [], [], left)[0]:
            return None
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return None
        text += chunk
    return text.decode().rstrip("\n")


def has_own_resolver(text: str) -> bool:
    """Return whether a resolv.conf leads to the machine's loopback, which tasks can't reach."""
    servers = [line.split()[1] for line in text.splitlines() if line.startswith("nameserver ")]
    return not servers or any(name.startswith("127.") or name == "::1" for name in servers)


def resolver_text(machine: str, resolver: str) -> bytes | None:
    """Return a /etc/resolv.conf for tasks; None when they can use the machine's."""
    if not has_own_resolver(machine):
        return None
    kept = [line for line in machine.splitlines() if not line.startswith("nameserver")]
    return "\n".join([f"nameserver {resolver}", *kept, ""]).encode()


def outside_note(answer: Mapping[str, object], found: str | None) -> str:
    """Return the line that tells the user what tasks in the network can reach."""
    if answer.get("gateway"):
        return (
            f"tasks in a private network reach each other, and the outside through"
            f" {os.path.basename(found or '')}; they can't be reached from outside"
        )
    why = answer.get("stack_error")
    missing = f"neither {' nor '.join(PROGRAMS)} is installed"
    return (
        "tasks in a private network reach each other and nothing else, no internet and no license"
        f" server: {why or missing}"
    )


def task_paths(pid: int, fds: Sequence[int]) -> tuple[str, ...]:
    """Return the paths by which other processes reach the namespaces that a process holds."""
    return tuple(f"/proc/{pid}/fd/{fd}" for fd in fds)
