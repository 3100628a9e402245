"""As much of the kernel's route netlink as a private network needs: links, addresses, a default route.

Raw, because `ip` is missing in many images and would be a process for every step.
"""

import os
import socket
import struct

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
    """A route netlink socket of the network namespace in which it was opened."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.settimeout(_TIMEOUT_S)
        self._socket.bind((0, 0))
        self._sequence = 0

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def add_bridge(self, name: str) -> None:
        """Make a bridge.

        Raises:
            OSError: The kernel refused; so do all methods below.
        """
        info = _attribute(_INFO_KIND, b"bridge")
        self._new_link(_name(name) + _attribute(_IFLA_LINKINFO, info))

    def add_veth(self, name: str, *, master: str, peer: str, peer_namespace_fd: int) -> None:
        """Make a pair of links: `name` here, on the bridge `master`, and `peer` elsewhere."""
        there = _link_header() + _name(peer)
        there += _attribute(_IFLA_NET_FD, struct.pack("=I", peer_namespace_fd))
        info = _attribute(_INFO_KIND, b"veth")
        info += _attribute(_INFO_DATA, _attribute(_VETH_PEER, there))
        bridge = struct.pack("=I", socket.if_nametoindex(master))
        here = _name(name) + _attribute(_IFLA_MASTER, bridge)
        self._new_link(here + _attribute(_IFLA_LINKINFO, info))

    def set_up(self, name: str) -> None:
        """Switch a link on."""
        header = struct.pack("=BxHiII", 0, 0, socket.if_nametoindex(name), _UP, _UP)
        self._ask(_NEW_LINK, 0, header)

    def set_master(self, name: str, master: str) -> None:
        """Make a link a port of the bridge `master`."""
        header = struct.pack("=BxHiII", 0, 0, socket.if_nametoindex(name), 0, 0)
        bridge = struct.pack("=I", socket.if_nametoindex(master))
        self._ask(_NEW_LINK, 0, header + _attribute(_IFLA_MASTER, bridge))

    def add_default_route(self, name: str, gateway: str) -> None:
        """Send all other IPv4 traffic to `gateway`, by the link `name`."""
        kind = (_TABLE_MAIN, _PROTO_STATIC, _SCOPE_UNIVERSE, _UNICAST)
        header = struct.pack("=BBBBBBBBI", socket.AF_INET, 0, 0, 0, *kind, 0)
        index = struct.pack("=I", socket.if_nametoindex(name))
        body = _attribute(_RTA_GATEWAY, socket.inet_aton(gateway)) + _attribute(_RTA_OIF, index)
        self._ask(_NEW_ROUTE, _CREATE | _EXCLUSIVE, header + body)

    def add_address(self, name: str, address: str, prefix_bits: int) -> None:
        """Give a link an IPv4 address; the route to its network comes with it."""
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


def _link_header() -> bytes:
    return struct.pack("=BxHiII", 0, 0, 0, 0, 0)
