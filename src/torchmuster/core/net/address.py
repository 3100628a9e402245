"""The secret of a run, and this machine's interfaces, addresses and listening ports.

A node's interface follows from an address over which a connection worked: it is never guessed.
"""

import fcntl
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchmuster.errors import RunDirectoryError, UsageError

if TYPE_CHECKING:
    from torchmuster.core.model.network import Interface

# The secret of a run: 32 random bytes in a 0600 file. Never in argv, environment or logs.


SECRET_BYTES = 32


def new_secret() -> bytes:
    """Return a new random secret."""
    return secrets.token_bytes(SECRET_BYTES)


def write_secret(path: str, secret: bytes) -> None:
    """Write a secret to a new file that only its user can read; the file appears complete.

    Raises:
        FileExistsError: Another process created it first.
    """
    temporary = f"{path}.{os.getpid()}-{secrets.token_hex(4)}"
    _write_new(temporary, secret)
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        _write_new(path, secret)
    finally:
        os.unlink(temporary)


def _write_new(path: str, secret: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(secret.hex() + "\n")


def read_secret(path: str) -> bytes:
    """Return the secret in a file.

    Raises:
        RunDirectoryError: The file can't be read.
        UsageError: It is malformed or readable by others.
    """
    try:
        with open(path, errors="replace") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(1024).strip()
    except OSError as error:
        raise RunDirectoryError(
            "the secret can't be read", where=path, why=error.strerror
        ) from error
    if mode & 0o077:
        raise UsageError(
            "the secret can be read by others",
            where=path,
            why=f"its mode is {mode & 0o777:04o}",
            fix=f"chmod 600 {path}",
        )
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) < 16:
        raise UsageError(
            "the secret is not at least 16 bytes in hexadecimal digits",
            where=path,
            fix=f"(umask 077; openssl rand -hex 32 > {path})",
        )
    return secret


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
    from torchmuster.core.model.network import Interface  # late: an agent starts its spawner first

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


_SIOCGIFADDR = 0x8915  # linux/sockios.h
_BACKLOG = 4096


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 lets the kernel choose.

    Raises:
        OSError: The address is not one of this machine's, or the port is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has `address`; None if this machine has none."""
    if ":" in address:
        return _interface_of_ipv6(address)
    if address.startswith("127."):
        return "lo"
    return next((name for name, own in _ipv4_addresses() if own == address), None)


def own_addresses() -> list[str]:
    """Return this machine's IPv4 addresses, without loopback."""
    found = (address for _, address in _ipv4_addresses() if not address.startswith("127."))
    return list(dict.fromkeys(found))


def own_endpoints(port: int) -> tuple[str, ...]:
    """Return `address:port` for each of this machine's addresses; loopback if there is no other."""
    return tuple(f"{address}:{port}" for address in own_addresses() or ["127.0.0.1"])


def split_endpoint(text: str) -> tuple[str, int]:
    """Return the host and the port of `host:port`."""
    host, _, port = text.rpartition(":")
    return host, int(port)


def _ipv4_addresses() -> list[tuple[str, str]]:
    """Return each interface with its first IPv4 address."""
    found: list[tuple[str, str]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def _interface_of_ipv6(address: str) -> str | None:
    wanted = socket.inet_pton(socket.AF_INET6, address.split("%", maxsplit=1)[0]).hex()
    try:
        with open("/proc/net/if_inet6") as table:
            rows = [line.split() for line in table]
    except OSError:
        return None
    return next((row[5] for row in rows if row[0] == wanted), None)


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
