"""Addresses of this machine: which interface has one, from connections that worked and never guessed; ports that listen."""

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_BACKLOG = 4096


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 lets the kernel choose.

    Raises:
        OSError: The address is not one of this machine, or the port is taken.
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
    """Return the name of the interface that has `address`; None when there is none here."""
    if ":" in address:
        return _interface_of_ipv6(address)
    if address.startswith("127."):
        return "lo"
    return next((name for name, own in _ipv4_addresses() if own == address), None)


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine that other machines may reach, without loopback."""
    found = (address for _, address in _ipv4_addresses() if not address.startswith("127."))
    return list(dict.fromkeys(found))


def own_endpoints(port: int) -> tuple[str, ...]:
    """Return where a port of all addresses of this machine is called, as `address:port`; on loopback where it has no other."""
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
    except (OSError, UnicodeError):  # no such name, or no name at all
        return False
    for family, kind, protocol, _, sockaddr in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((sockaddr[0], 0))
            except OSError:
                continue
            return True
    return False
