"""A private network for the tasks of a group on one machine: all can listen on the same port.

Each task gets a network namespace with one interface; a bridge in a hub namespace joins them. It
needs no root, and leaves no name in /run/netns or /etc. Everything vanishes with the holder
(`network_hold`), which ends with us. If slirp4netns or pasta is installed, tasks can reach the
outside through it.

slirp4netns    one process for all tasks; its tap is a port of the hub's bridge
pasta          one process per task, since it serves one guest only; adds a second interface

Both run in the machine's own network as our user, need no root, and map nothing of the machine's
loopback into the network. They are children of a guard, which the holder forks before it enters its
namespaces. The guard's only task is to end them when the holder is gone, which closes a pipe.
"""

import ipaddress
import json
import os
import secrets
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.core import proc
from torchmuster.core.model import codec
from torchmuster.errors import MusterError, UsageError
from torchmuster.workflow.plan import NetworkShare

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
    stack: "NetworkStack | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkStack:
    """The network stack that the guard must start; the holder adds the paths of namespaces.

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
    passes_names: bool
    hub: str = ""
    user: str | None = None
    tasks: tuple[str, ...] = ()

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

    def __init__(self, orders: int, answers: int) -> None:
        self._orders = orders  # closing it ends the guard
        self._answers = answers

    def open(self, stack: NetworkStack, is_open: Callable[[], bool]) -> str | None:
        """Start the stack; return None when it works, else why not.

        Args:
            stack: The network stack to start.
            is_open: Returns whether the tasks reach the outside, for a stack that does not report
                it.
        """
        os.write(self._orders, codec.to_word(stack).encode() + b"\n")
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            said = _read_line(self._answers, _POLL_S)
            if said:
                return None if said == _READY else said
            if is_open():
                os.write(self._orders, b"\n")
                return None
        return f"{stack.kind}: it was not ready within {_READY_S:.0f} s"


def fork_guard() -> Guard:
    """Fork the guard; call this before entering any namespace, in a single-threaded process."""
    order, orders = os.pipe2(os.O_CLOEXEC)
    answers, answer = os.pipe2(os.O_CLOEXEC)
    if os.fork() == 0:
        try:
            os.close(orders)
            os.close(answers)
            _detach()
            _guard(order, answer)
        finally:
            os._exit(0)
    os.close(order)
    os.close(answer)
    return Guard(orders, answers)


def _detach() -> None:
    """Let go of the holder's streams: the reader of its answer waits until all copies close."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    proc.detach_from_parent()  # signals to the holder's process group must not reach us


def _guard(order: int, answer: int) -> None:
    line = _read_line(order, None)
    if not line:
        return
    stack = codec.from_word(NetworkStack, [line])
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
    """Return a line, or what came before the end of file; None at the time limit."""
    text = b""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not text.endswith(b"\n"):
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([fd], [], [], left)[0]:
            return None
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            break
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


INTERFACE = "eth0"
_MAX_TASKS = 255 - FIRST_TASK
_RESOLVER_FILE = "/etc/resolv.conf"
_POOLS = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
_START_TIMEOUT_S = 20.0
_END_TIMEOUT_S = 5.0


class PrivateNetwork:
    """The network of one group's tasks on this machine; `close` removes it.

    Attributes:
        tasks: Each task's namespace, by task name.
        resolver: The address of the DNS server outside; None without a gateway there.
        note: One line for the user about the connection to the outside.
    """

    def __init__(
        self,
        holder: proc.Child,
        lifeline: int,
        tasks: Mapping[str, NetworkShare],
        hostname: str,
        *,
        answer: Mapping[str, Any] | None = None,
        program: str | None = None,
    ) -> None:
        said = answer or {}
        self._holder = holder
        self._lifeline = lifeline
        self._hostname = hostname
        self.holder_pid = holder.pid
        self.tasks = tasks
        self.resolver: str | None = said.get("resolver")
        self.note = outside_note(said, program)

    @classmethod
    def open(
        cls,
        names: Sequence[str],
        *,
        find_program: Callable[[], str | None] = find_program,
    ) -> "PrivateNetwork":
        """Make a network for the tasks `names`; block for a few milliseconds per task.

        Args:
            names: The names of the tasks.
            find_program: Returns the path of the network stack's program, or None.

        Raises:
            UsageError: There are more tasks than addresses, or two of the same name.
            MusterError: The kernel refuses; the message has its reason.
        """
        if len(names) > _MAX_TASKS or len(set(names)) != len(names):
            raise UsageError(
                f"a private network takes up to {_MAX_TASKS} tasks of different names,"
                f" not {len(names)}"
            )
        program = find_program()
        wanted = _wanted(len(names), program)
        lifeline_end, lifeline = os.pipe()
        answer_fd, answer_end = os.pipe()
        try:
            hold = proc.node_program("network", codec.to_word(wanted))
            holder = proc.start(hold, stdin=lifeline_end, stdout=answer_end)
        except BaseException:
            os.close(lifeline)
            os.close(answer_fd)
            raise
        finally:
            os.close(lifeline_end)
            os.close(answer_end)
        try:
            answer = _answer(answer_fd)
        except BaseException:
            _end(holder, lifeline)
            raise
        finally:
            os.close(answer_fd)
        tasks = _tasks(holder.pid, names, list(wanted.addresses), answer)
        return cls(holder, lifeline, tasks, socket.gethostname(), answer=answer, program=program)

    def close(self) -> None:
        """End the holder; tasks that still run keep their own namespaces, now isolated."""
        if self._lifeline >= 0:
            _end(self._holder, self._lifeline)
            self._lifeline = -1

    def hosts_file(self, name: str, *, machine: str = "/etc/hosts") -> bytes:
        """Return the /etc/hosts of task `name`: the machine's entries, and all tasks by name.

        The machine's own name resolves to the task itself, as programs that ask for it expect.
        """
        ours = {self._hostname, *self.tasks}
        try:
            with open(machine, encoding="utf-8", errors="surrogateescape") as file:
                lines = [_without_names(line, ours) for line in file.read().splitlines()]
        except OSError:
            lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines = [line for line in lines if line]
        for task in self.tasks.values():
            is_machine = task.name == name and self._hostname not in self.tasks
            also = f" {self._hostname}" if is_machine else ""
            lines.append(f"{task.address} {task.name}{also}")
        return ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape")

    def resolver_file(self, *, machine: str = _RESOLVER_FILE) -> bytes | None:
        """Return the /etc/resolv.conf of the tasks; None when they can use the machine's."""
        if self.resolver is None:
            return None
        return resolver_text(_read_text(machine), self.resolver)


def choose_network(
    taken: Sequence[ipaddress.IPv4Network],
    *,
    draw: Callable[[int], int] = secrets.randbelow,
) -> ipaddress.IPv4Network:
    """Return a /24 that overlaps none of `taken`: in 10.0.0.0/8, else in another private range.

    Raises:
        MusterError: All are taken.
    """
    for whole in _POOLS:
        pool = ipaddress.IPv4Network(whole)
        count = pool.num_addresses >> 8
        start, step = draw(count), 0
        while step < count:
            first = int(pool.network_address) + ((start + step) % count << 8)
            network = ipaddress.IPv4Network((first, 24))
            clash = next((other for other in taken if network.overlaps(other)), None)
            if clash is None:
                return network
            step += (int(clash.broadcast_address) - first >> 8) + 1
    raise MusterError(
        "no private network can be made", why=f"{', '.join(_POOLS)} are routed here as a whole"
    )


def host_networks(path: str = "/proc/net/route") -> list[ipaddress.IPv4Network]:
    """Return the networks that this machine has a route to, without the default route."""
    found = []
    try:
        with open(path) as file:
            rows = [line.split() for line in file][1:]
    except OSError:
        return []
    for row in rows:
        # The kernel reads the bytes, in network order, as native integers and prints those.
        address, mask = (
            int.from_bytes(int(row[column], 16).to_bytes(4, sys.byteorder), "big")
            for column in (1, 7)
        )
        if mask:
            found.append(ipaddress.IPv4Network((address & mask, mask.bit_count())))
    return found


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _without_names(line: str, names: set[str]) -> str:
    words = line.split("#", 1)[0].split()
    if not any(word in names for word in words[1:]):
        return line
    kept = [word for word in words[1:] if word not in names]
    return " ".join([words[0], *kept]) if kept else ""


def _wanted(num_tasks: int, program: str | None) -> NetworkHolderArguments:
    """Return the order to the holder: addresses, and the network stack if one is installed."""
    routed = host_networks()
    network = choose_network(routed)
    addresses = [str(network[number + FIRST_TASK]) for number in range(num_tasks)]
    stack = None
    if program is not None:
        stack = NetworkStack(
            program=program,
            subnet=str(network),
            outside=str(choose_network([*routed, network])),
            passes_names=has_own_resolver(_read_text(_RESOLVER_FILE)),
        )
    return NetworkHolderArguments(addresses=tuple(addresses), interface=INTERFACE, stack=stack)


def _tasks(
    pid: int, names: Sequence[str], addresses: Sequence[str], answer: Mapping[str, Any]
) -> dict[str, NetworkShare]:
    user_fd = answer["user_fd"]
    user = None if user_fd is None else f"/proc/{pid}/fd/{user_fd}"
    environment = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
    return {
        name: NetworkShare(
            name=name,
            address=address,
            join={"user": user, "net": f"/proc/{pid}/fd/{fd}"},
            environment=environment,
        )
        for name, address, fd in zip(names, addresses, answer["fds"], strict=True)
    }


def _answer(fd: int) -> dict[str, Any]:
    text = _read_line(fd, _START_TIMEOUT_S)
    if text is None:
        raise MusterError(f"the private network was not made within {_START_TIMEOUT_S:.0f} s")
    answer = json.loads(text) if text else {"error": "its process ended without a message"}
    if "error" in answer:
        raise MusterError(
            "the private network can't be made",
            why=answer["error"],
            fix="run the workflow without a private network, with a port for each task",
        )
    return dict(answer)


def _end(holder: proc.Child, lifeline: int) -> None:
    os.close(lifeline)
    if holder.wait(_END_TIMEOUT_S) is None:
        proc.kill_quietly(holder.pid)
        holder.wait(_END_TIMEOUT_S)
