"""The program `network`: hold the network of one group's tasks on this machine.

It has one hub namespace with a bridge and one namespace for each task, all unnamed: they are
descriptors of this process, which `setns` reaches as /proc/PID/fd/N. They vanish with it and with
the last task in them. Standard output gets one line of JSON. Standard input is the lifeline: this
process ends when it closes. (PR_SET_PDEATHSIG would end it with the thread that started it, not
with the agent.)
"""

import json
import os
import secrets
import signal
import socket
import struct
from dataclasses import replace
from typing import Any

from torchmuster.core.model import codec
from torchmuster.launcher.node import namespaces
from torchmuster.workflow.sandbox import network

# Route netlink: links, addresses, a default route. Raw, because `ip` is missing in many images and
# would be a process for every step.


_NEW_LINK, _NEW_ADDRESS, _NEW_ROUTE = 16, 20, 24
_REQUEST, _ACKNOWLEDGE, _CREATE, _EXCLUSIVE = 0x1, 0x4, 0x400, 0x200
_ERROR = 2
_UP = 1
# Attributes: linux/if_link.h, linux/if_addr.h, linux/veth.h
_IFLA_NAME, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_NET_FD = 3, 10, 18, 28
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RTA_OIF, _RTA_GATEWAY = 4, 5
_TABLE_MAIN, _PROTO_STATIC, _SCOPE_UNIVERSE, _UNICAST = 254, 4, 0, 1
_TIMEOUT_S = 5.0


class Netlink:
    """A route netlink socket of the network namespace that opened it."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.settimeout(_TIMEOUT_S)
        self._socket.bind((0, 0))
        self._sequence = 0

    def close(self) -> None:
        """Close the netlink socket."""
        self._socket.close()

    def add_bridge(self, name: str) -> None:
        """Make a bridge.

        Raises:
            OSError: The kernel refused; all methods below raise this too.
        """
        info = _attribute(_INFO_KIND, b"bridge")
        self._new_link(_name(name) + _attribute(_IFLA_LINKINFO, info))

    def add_veth(self, name: str, *, master: str, peer: str, peer_namespace_fd: int) -> None:
        """Make a pair of links: `name` on the bridge `master`, `peer` in another namespace."""
        there = _link_header() + _name(peer)
        there += _attribute(_IFLA_NET_FD, struct.pack("=I", peer_namespace_fd))
        info = _attribute(_INFO_KIND, b"veth")
        info += _attribute(_INFO_DATA, _attribute(_VETH_PEER, there))
        bridge = struct.pack("=I", socket.if_nametoindex(master))
        here = _name(name) + _attribute(_IFLA_MASTER, bridge)
        self._new_link(here + _attribute(_IFLA_LINKINFO, info))

    def set_up(self, name: str) -> None:
        """Switch a link on."""
        self._ask(_NEW_LINK, 0, _link_header(name, _UP))

    def set_master(self, name: str, master: str) -> None:
        """Make a link a port of the bridge `master`."""
        bridge = struct.pack("=I", socket.if_nametoindex(master))
        self._ask(_NEW_LINK, 0, _link_header(name) + _attribute(_IFLA_MASTER, bridge))

    def add_default_route(self, name: str, gateway: str) -> None:
        """Send all other IPv4 traffic to `gateway` over the link `name`."""
        kind = (_TABLE_MAIN, _PROTO_STATIC, _SCOPE_UNIVERSE, _UNICAST)
        header = struct.pack("=BBBBBBBBI", socket.AF_INET, 0, 0, 0, *kind, 0)
        index = struct.pack("=I", socket.if_nametoindex(name))
        body = _attribute(_RTA_GATEWAY, socket.inet_aton(gateway)) + _attribute(_RTA_OIF, index)
        self._ask(_NEW_ROUTE, _CREATE | _EXCLUSIVE, header + body)

    def add_address(self, name: str, address: str, prefix_bits: int) -> None:
        """Give a link an IPv4 address; the kernel adds the route to its network."""
        index = socket.if_nametoindex(name)
        packed = socket.inet_aton(address)
        header = struct.pack("=BBBBI", socket.AF_INET, prefix_bits, 0, 0, index)
        body = header + _attribute(_IFA_LOCAL, packed) + _attribute(_IFA_ADDRESS, packed)
        self._ask(_NEW_ADDRESS, _CREATE | _EXCLUSIVE, body)

    def _new_link(self, attributes: bytes) -> None:
        self._ask(_NEW_LINK, _CREATE | _EXCLUSIVE, _link_header() + attributes)

    def _ask(self, kind: int, flags: int, body: bytes) -> None:
        self._sequence += 1
        flags |= _REQUEST | _ACKNOWLEDGE
        header = struct.pack("=IHHII", 16 + len(body), kind, flags, self._sequence, 0)
        self._socket.send(header + body)
        answer = self._socket.recv(1 << 16)
        _, said, _, _, _, code = struct.unpack_from("=IHHIIi", answer)
        if said == _ERROR and code != 0:
            raise OSError(-code, os.strerror(-code))


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _name(name: str) -> bytes:
    return _attribute(_IFLA_NAME, name.encode() + b"\0")


def _link_header(name: str = "", flags: int = 0) -> bytes:
    """Return the header of a new link, or of one to change: its flags to switch on."""
    index = socket.if_nametoindex(name) if name else 0
    return struct.pack("=BxHiII", 0, 0, index, flags, flags)


_PREFIX_BITS = 24


def main(arguments: list[str]) -> int:
    """Make the network, print its descriptors, and wait for the end of standard input."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # they are meant for the run; the lifeline decides
    wanted = codec.from_word(network.NetworkHolderArguments, arguments)
    guard = network.fork_guard() if wanted.stack is not None else None
    try:
        answer = make_network(list(wanted.addresses), wanted.interface)
        if guard is not None and wanted.stack is not None:
            answer |= open_network_stack(guard, wanted.stack, answer, wanted.interface)
    except OSError as error:
        print(json.dumps({"error": error.strerror or str(error)}), flush=True)
        return 1
    print(json.dumps(answer), flush=True)
    while os.read(0, 4096):
        pass
    return 0


def make_network(addresses: list[str], interface: str) -> dict[str, Any]:
    """Make the hub and the tasks' namespaces; return their descriptors and the bridge's name.

    Raises:
        OSError: The kernel refused.
    """
    user = namespaces.enter_user_namespace(namespaces.NEW_NETWORK)
    hub_fd = _own_namespace("net")
    hub = Netlink()
    suffix = secrets.token_hex(3)
    bridge = f"mu{suffix}"
    hub.add_bridge(bridge)
    hub.set_up("lo")
    hub.set_up(bridge)
    fds: list[int] = []
    for number, address in enumerate(addresses):
        fd = _new_namespace()
        namespaces.join_fd(hub_fd, namespaces.NEW_NETWORK)
        port = f"mu{suffix}.{number}"
        hub.add_veth(port, master=bridge, peer=interface, peer_namespace_fd=fd)
        hub.set_up(port)
        namespaces.join_fd(fd, namespaces.NEW_NETWORK)
        _configure(interface, address)
        namespaces.join_fd(hub_fd, namespaces.NEW_NETWORK)
        fds.append(fd)
    hub.close()
    user_fd = _own_namespace("user") if user else None
    return {"user_fd": user_fd, "hub_fd": hub_fd, "fds": fds, "bridge": bridge}


def open_network_stack(
    guard: network.Guard, stack: network.NetworkStack, made: dict[str, Any], interface: str
) -> dict[str, Any]:
    """Start the network stack and route the tasks to it; a failure is no error, only reported."""
    pid, user_fd = os.getpid(), made["user_fd"]
    (hub,) = network.task_paths(pid, [made["hub_fd"]])
    stack = replace(
        stack,
        hub=hub,
        user=None if user_fd is None else network.task_paths(pid, [user_fd])[0],
        tasks=network.task_paths(pid, made["fds"]),
    )
    lacking = list(made["fds"])
    why = guard.open(stack, lambda: stack.kind == "pasta" and _have_routes(lacking))
    if why is not None:
        return {"stack_error": why}
    is_slirp = stack.kind == "slirp4netns"
    subnet = stack.subnet if is_slirp else stack.outside
    gateway = network.address_of(subnet, network.GATEWAY)
    if is_slirp:
        try:
            _route_through_tap(made, interface, gateway)
        except OSError as error:
            return {"stack_error": f"{stack.kind}: {error.strerror}"}
    return {"gateway": gateway, "resolver": network.address_of(subnet, network.RESOLVER)}


def _have_routes(fds: list[int]) -> bool:
    """Return whether all namespaces have a default route; remove from the list those that do."""
    while fds:
        namespaces.join_fd(fds[-1], namespaces.NEW_NETWORK)
        with open("/proc/thread-self/net/route") as file:
            if not any(line.split()[1] == "00000000" for line in file):
                return False
        fds.pop()
    return True


def _route_through_tap(made: dict[str, Any], interface: str, gateway: str) -> None:
    namespaces.join_fd(made["hub_fd"], namespaces.NEW_NETWORK)
    hub = Netlink()
    hub.set_master(network.TAP, made["bridge"])
    hub.set_up(network.TAP)
    hub.close()
    for fd in made["fds"]:
        namespaces.join_fd(fd, namespaces.NEW_NETWORK)
        task = Netlink()
        task.add_default_route(interface, gateway)
        task.close()
    namespaces.join_fd(made["hub_fd"], namespaces.NEW_NETWORK)


def _new_namespace() -> int:
    namespaces.unshare(namespaces.NEW_NETWORK)
    return _own_namespace("net")


def _configure(interface: str, address: str) -> None:
    link = Netlink()
    try:
        link.set_up("lo")
        link.add_address(interface, address, _PREFIX_BITS)
        link.set_up(interface)
    finally:
        link.close()


def _own_namespace(kind: str) -> int:
    return os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
