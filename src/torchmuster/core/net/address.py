"""The secret of a run, and this machine's addresses and listening ports.

A node's interface follows from an address over which a connection worked: it is never guessed.
"""

import fcntl
import os
import secrets
import socket
import struct

from torchmuster.errors import RunDirectoryError, UsageError

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
