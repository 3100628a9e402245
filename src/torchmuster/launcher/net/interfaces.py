"""What the kernel knows of this machine's network: its interfaces, and who listens on a port."""

import fcntl
import os
import pwd
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchmuster.core.net.address import own_addresses

if TYPE_CHECKING:
    from torchmuster.launcher.model.network import Interface

# This node's interfaces with their addresses, as the kernel lists them, without loopback.


# linux/rtnetlink.h, linux/netlink.h, linux/if_addr.h, linux/sockios.h, linux/if.h
_GET_ADDRESS, _NEW_ADDRESS = 22, 20
_REQUEST, _DUMP, _DONE, _ERROR = 0x1, 0x300, 3, 2
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_TEMPORARY, _DAD_FAILED, _DEPRECATED, _TENTATIVE = 0x01, 0x08, 0x20, 0x40
_SIOCGIFFLAGS = 0x8913
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_MAX_INTERFACES = 32
_TIMEOUT_S = 2.0


def own_interfaces() -> "tuple[Interface, ...]":
    """Return each interface with its first IPv4 and its first global IPv6 address, at most 32.

    Gloo and NCCL use the first address of a family for an interface's name.
    """
    from torchmuster.launcher.model.network import Interface

    found: dict[tuple[str, int], Interface] = {}
    try:
        rows = list(_addresses())
    except OSError:  # a sandbox without netlink
        return ()
    for name, family, address, prefix_bits in rows:
        flags = _flags(name)
        if flags & _IFF_LOOPBACK or (name, family) in found:
            continue
        found[name, family] = Interface(
            name=name,
            address=address,
            prefix_bits=prefix_bits,
            speed_mbit=_speed(name),
            is_up=bool(flags & _IFF_UP),
        )
    return tuple(found.values())[:_MAX_INTERFACES]


def link_names() -> tuple[str, ...]:
    """Return the names of all interfaces, with or without an address."""
    try:
        return tuple(name for _, name in socket.if_nameindex())[:256]
    except OSError:
        return ()


def _addresses() -> Iterator[tuple[str, int, str, int]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as route:
        route.settimeout(_TIMEOUT_S)
        body = struct.pack("=BBBBI", socket.AF_UNSPEC, 0, 0, 0, 0)
        header = struct.pack("=IHHII", 16 + len(body), _GET_ADDRESS, _REQUEST | _DUMP, 1, 0)
        route.send(header + body)
        while True:
            answer = route.recv(1 << 16)
            offset = 0
            while offset + 16 <= len(answer):
                size, kind, _, _, _ = struct.unpack_from("=IHHII", answer, offset)
                if kind in (_DONE, _ERROR) or size < 16:
                    return
                if kind == _NEW_ADDRESS:
                    yield from _read_row(answer[offset + 16 : offset + size])
                offset += (size + 3) & ~3


def _read_row(body: bytes) -> Iterator[tuple[str, int, str, int]]:
    family, prefix_bits, flags, scope, index = struct.unpack_from("=BBBBI", body)
    attributes: dict[int, bytes] = {}
    offset = 8
    while offset + 4 <= len(body):
        size, kind = struct.unpack_from("=HH", body, offset)
        if size < 4:
            break
        attributes[kind] = body[offset + 4 : offset + size]
        offset += (size + 3) & ~3
    # On a point-to-point link, IFA_ADDRESS is the other side.
    packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
    if packed is None or not _is_wanted(family, flags, scope):
        return
    try:
        name = socket.if_indextoname(index)
    except OSError:  # it has gone since
        return
    yield name, family, socket.inet_ntop(family, packed), prefix_bits


def _is_wanted(family: int, flags: int, scope: int) -> bool:
    if family == socket.AF_INET:
        return True
    short_lived = _TEMPORARY | _DAD_FAILED | _DEPRECATED | _TENTATIVE
    return family == socket.AF_INET6 and scope == 0 and not flags & short_lived


def _flags(name: str) -> int:
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, request)
        except OSError:
            return 0
    return int(struct.unpack_from("=H", answer, 16)[0])


def _speed(name: str) -> int | None:
    try:
        with open(f"/sys/class/net/{name}/speed") as file:
            speed = int(file.read())
    except (OSError, ValueError):  # a link that is down, or has no speed
        return None
    return speed if speed > 0 else None


def own_endpoints(port: int) -> tuple[str, ...]:
    """Return `address:port` for each of this machine's addresses; loopback if there is no other."""
    return tuple(f"{address}:{port}" for address in own_addresses() or ["127.0.0.1"])


def is_own_address(host: str) -> bool:
    """Return whether `host` is an address of this machine, i.e. one that we can bind."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # no such name, or not a name
        return False
    for family, kind, protocol, _, sockaddr in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((sockaddr[0], 0))
            except OSError:
                continue
            return True
    return False


# The process that listens on a port, in the kernel's tables and /proc.

_LISTEN, _ESTABLISHED = "0A", "01"  # include/net/tcp_states.h
_MAX_TABLE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PortOwner:
    """The process that listens on a port.

    Attributes:
        pid: None if we may not inspect it.
    """

    uid: int
    pid: int | None = None
    name: str = ""

    def __str__(self) -> str:
        if self.pid is not None:
            return f"{self.name} (pid {self.pid})"
        try:
            return f"a process of {pwd.getpwuid(self.uid).pw_name}"
        except KeyError:
            return f"a process of uid {self.uid}"


def port_owner(port: int) -> PortOwner | None:
    """Return the process that listens on a TCP port in our network namespace; None if unseen."""
    found = _listening_sockets(port)
    if not found:
        return None
    for inode, uid in found.items():
        pid = _process_with(f"socket:[{inode}]")
        if pid is not None:
            return PortOwner(uid=uid, pid=pid, name=_name(pid))
    return PortOwner(uid=next(iter(found.values())))


def _listening_sockets(port: int) -> dict[str, int]:
    """Return inode -> uid of the sockets that listen on a port."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _read(table).splitlines()[1:]:
            words = line.split()
            if len(words) < 10 or words[3] != _LISTEN:
                continue
            if int(words[1].rpartition(":")[2], 16) == port:
                found[words[9]] = int(words[7])
    return found


def _process_with(link: str) -> int | None:
    """Return the lowest pid, among the processes we may inspect, that has a socket open."""
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        folder = f"/proc/{pid}/fd"
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        if any(_points_to(f"{folder}/{name}", link) for name in names):
            return pid
    return None


def _points_to(path: str, link: str) -> bool:
    try:
        return os.readlink(path) == link
    except OSError:
        return False


def _name(pid: int) -> str:
    """Return a name that the user recognizes: the process's program and the script it runs."""
    words = [word for word in _read(f"/proc/{pid}/cmdline").split("\0") if word]
    names = [os.path.basename(word) for word in words if not word.startswith("-")][:2]
    text = " ".join(names) or _read(f"/proc/{pid}/comm").strip()
    return "".join(c if c.isprintable() else "?" for c in text)[:60]


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_TABLE_BYTES).decode(errors="replace")
    except OSError:
        return ""


def is_own_connection(stream: socket.socket) -> bool:
    """Return whether this user owns the peer of a loopback connection: all users share it."""
    here, there = stream.getsockname(), stream.getpeername()
    for line in _read("/proc/net/tcp").splitlines()[1:]:
        words = line.split()
        if len(words) >= 10 and words[1:3] == [_table_address(there), _table_address(here)]:
            # The kernel shows root as the owner of a socket that its process has closed.
            return words[3] == _ESTABLISHED and int(words[7]) == os.getuid()
    return False


def _table_address(address: tuple[str, int]) -> str:
    """Return an address as in the kernel's table: four bytes in native byte order, and the port."""
    (number,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return f"{number:08X}:{address[1]:04X}"
