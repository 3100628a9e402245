"""A private network for the tasks of a group on one machine: all can listen on the same port.

Each task gets a network namespace with one interface; a bridge in a hub namespace joins them. It
needs no root, and leaves no name in /run/netns or /etc. Everything vanishes with the holder
(`network_hold`), which ends with us. If slirp4netns or pasta is installed, tasks can reach the
outside through it.
"""

import ipaddress
import json
import os
import secrets
import select
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.core import proc
from torchmuster.core.model import codec
from torchmuster.errors import MusterError, UsageError
from torchmuster.workflow.sandbox import network_stack
from torchmuster.workflow.sandbox.network_stack import NetworkHolderArguments

INTERFACE = "eth0"
_MAX_TASKS = 255 - network_stack.FIRST_TASK
_RESOLVER_FILE = "/etc/resolv.conf"
_POOLS = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
_START_TIMEOUT_S = 20.0
_END_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkNamespace:
    """One task's part of a private network.

    Attributes:
        name: The name of the task.
        address: The task's IPv4 address.
        join: The namespaces to enter, `user` and `net`, for `write_view`.
        environment: The variables for Gloo and NCCL, which would otherwise use the address of the
            machine's own name, outside of this network.
    """

    name: str
    address: str
    join: Mapping[str, str | None]
    environment: Mapping[str, str]


class PrivateNetwork:
    """The network of one group's tasks on this machine; `close` removes it.

    Attributes:
        tasks: Each task's namespace, by task name.
        gateway: The address of the gateway to the outside; None without one.
        resolver: The address of the DNS server there; None without a gateway.
        note: One line for the user about the connection to the outside.
    """

    def __init__(
        self,
        holder: proc.Child,
        lifeline: int,
        tasks: Mapping[str, NetworkNamespace],
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
        self.gateway: str | None = said.get("gateway")
        self.resolver: str | None = said.get("resolver")
        self.note = network_stack.outside_note(said, program)

    @classmethod
    def open(
        cls,
        names: Sequence[str],
        *,
        python: str = sys.executable,
        hostname: str | None = None,
        find_program: Callable[[], str | None] = network_stack.find_program,
    ) -> "PrivateNetwork":
        """Make a network for the tasks `names`; block for a few milliseconds per task.

        Args:
            names: The names of the tasks.
            python: The interpreter that runs the holder.
            hostname: The machine's name.
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
            hold = proc.node_program("network", codec.to_word(wanted), python=python)
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
        hostname = hostname or socket.gethostname()
        return cls(holder, lifeline, tasks, hostname, answer=answer, program=program)

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
            also = f" {self._hostname}" if task.name == name else ""
            if also and self._hostname in self.tasks:
                also = ""
            lines.append(f"{task.address} {task.name}{also}")
        return ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape")

    def resolver_file(self, *, machine: str = _RESOLVER_FILE) -> bytes | None:
        """Return the /etc/resolv.conf of the tasks; None when they can use the machine's."""
        if self.resolver is None:
            return None
        return network_stack.resolver_text(_read_text(machine), self.resolver)


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
    addresses = [str(network[number + network_stack.FIRST_TASK]) for number in range(num_tasks)]
    stack = None
    if program is not None:
        stack = {
            "program": program,
            "subnet": str(network),
            "outside": str(choose_network([*routed, network])),
            "passes_names": network_stack.has_own_resolver(_read_text(_RESOLVER_FILE)),
        }
    return NetworkHolderArguments(addresses=tuple(addresses), interface=INTERFACE, stack=stack)


def _tasks(
    pid: int, names: Sequence[str], addresses: Sequence[str], answer: Mapping[str, Any]
) -> dict[str, NetworkNamespace]:
    user_fd = answer["user_fd"]
    user = None if user_fd is None else f"/proc/{pid}/fd/{user_fd}"
    environment = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
    return {
        name: NetworkNamespace(
            name=name,
            address=address,
            join={"user": user, "net": f"/proc/{pid}/fd/{fd}"},
            environment=environment,
        )
        for name, address, fd in zip(names, addresses, answer["fds"], strict=True)
    }


def _answer(fd: int) -> dict[str, Any]:
    text = b""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not text.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            raise MusterError(f"the private network was not made within {_START_TIMEOUT_S:.0f} s")
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            break
        text += chunk
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
