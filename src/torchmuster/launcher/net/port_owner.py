"""Find the process that listens on a port of this machine, in the kernel's tables and /proc."""

import os
import pwd
import socket
import struct
from dataclasses import dataclass

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
