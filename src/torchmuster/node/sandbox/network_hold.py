"""Hold the network of one group's tasks on this machine, and let go of it at the end.

One hub namespace with a bridge and one namespace for each task, all without a name: they are
descriptors of this process, which `setns` reaches as /proc/PID/fd/N, and vanish with it and with the
last task in them. Standard output gets one line of JSON; standard input is the lifeline: at its end
this process ends. (No PR_SET_PDEATHSIG: that ends us with the thread that started us, not the agent.)
"""

import json
import os
import secrets
import signal
from typing import Any

from torchmuster.model import codec
from torchmuster.node.sandbox import namespaces, network_stack
from torchmuster.node.sandbox.netlink import Netlink
from torchmuster.node.sandbox.network_stack import NetworkOrder

_PREFIX_BITS = 24


def main(arguments: list[str]) -> int:
    """Make the network, say so, and wait for the end of standard input."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # meant for the run; the lifeline decides
    wanted = codec.from_word(NetworkOrder, arguments)
    out = wanted.stack or {}
    guard = network_stack.fork_guard() if out else None
    try:
        answer = make_network(list(wanted.addresses), wanted.interface)
        if guard is not None:
            answer |= open_network_stack(guard, out, answer, wanted.interface)
    except OSError as error:
        print(json.dumps({"error": error.strerror or str(error)}), flush=True)
        return 1
    print(json.dumps(answer), flush=True)
    while os.read(0, 4096):
        pass
    return 0


def make_network(addresses: list[str], interface: str) -> dict[str, Any]:
    """Make the hub and the tasks' namespaces; return the descriptors by which they are reached.

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
    guard: network_stack.Guard, wanted: dict[str, Any], made: dict[str, Any], interface: str
) -> dict[str, Any]:
    """Start the network stack and lead the tasks to it; a network without one is whole, too."""
    pid, user_fd = os.getpid(), made["user_fd"]
    (hub,) = network_stack.task_paths(pid, [made["hub_fd"]])
    stack = network_stack.NetworkStack(
        **wanted,
        hub=hub,
        user=None if user_fd is None else network_stack.task_paths(pid, [user_fd])[0],
        tasks=network_stack.task_paths(pid, made["fds"]),
    )
    lacking = list(made["fds"])
    why = guard.open(stack, lambda: stack.kind == "pasta" and _have_routes(lacking))
    if why is not None:
        return {"stack_error": why}
    gateway = network_stack.address_of(stack.outside, network_stack.GATEWAY)
    resolver = network_stack.address_of(stack.outside, network_stack.RESOLVER)
    if stack.kind == "slirp4netns":
        gateway = network_stack.address_of(stack.subnet, network_stack.GATEWAY)
        resolver = network_stack.address_of(stack.subnet, network_stack.RESOLVER)
        try:
            _lead_to_tap(made, interface, gateway)
        except OSError as error:
            return {"stack_error": f"{stack.kind}: {error.strerror}"}
    return {"gateway": gateway, "resolver": resolver}


def _have_routes(fds: list[int]) -> bool:
    """Say whether all of these namespaces have a default route; those that do leave the list."""
    while fds:
        namespaces.join_fd(fds[-1], namespaces.NEW_NETWORK)
        with open("/proc/thread-self/net/route") as file:
            if not any(line.split()[1] == "00000000" for line in file):
                return False
        fds.pop()
    return True


def _lead_to_tap(made: dict[str, Any], interface: str, gateway: str) -> None:
    namespaces.join_fd(made["hub_fd"], namespaces.NEW_NETWORK)
    hub = Netlink()
    hub.set_master(network_stack.TAP, made["bridge"])
    hub.set_up(network_stack.TAP)
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
