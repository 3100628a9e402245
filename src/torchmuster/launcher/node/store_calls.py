"""Find out which store a rank calls: the script may have changed MASTER_ADDR or MASTER_PORT.

There are three sources, none sufficient alone: the kernel lists a process's connections (a refused
call leaves none), torch names the address in the rank's log when a call has failed, and the
script's own lines show where it was set.
"""

import ipaddress
import os
import re
import select
import sys
import time

from torchmuster.core.files.layout import last_bytes
from torchmuster.launcher.facts import stacks as reading
from torchmuster.launcher.model.progress import StoreCall

_MAX_FDS = 4096
_MAX_TABLE_BYTES = 4 << 20
_MAX_ENDS = 16
_MAX_LOG_BYTES = 64 << 10
_MAX_SCRIPT_BYTES = 1 << 20
_MAX_LINES = 8
_POLL_S = 0.05
_ESTABLISHED, _SYN_SENT = "01", "02"  # include/net/tcp_states.h
# Source: torch/csrc/distributed/c10d/TCPStore.cpp and socket.cpp, torch 2.6 to 2.13.
_NAMED = re.compile(
    rb"(?:failed to connect/validate to host |client socket has failed to connect to )"
    rb"\[?(?P<host>[\w.:-]{1,255}?)\]?:(?P<port>\d{1,5})\b"
)
_SETS = re.compile(
    r"""environ\[\s*["']MASTER_(ADDR|PORT)["']\s*\]\s*=[^=]|putenv\(\s*["']MASTER_(ADDR|PORT)"""
    r"""|["']MASTER_(ADDR|PORT)["']\s*:|init_method\s*=|["']tcp://|\bTCPStore\("""
)


def look(pid: int, text: str, log_path: str, deadline: float) -> StoreCall:
    """Return the evidence on the store to which a rank is connecting.

    Args:
        pid: Process id of the rank.
        text: Its stacks.
        log_path: Path of its log, polled until torch has named an address there.
        deadline: When to stop polling, in seconds of the monotonic clock.
    """
    connected, calling = _connections(pid)
    named = "" if connected or calling else _named(log_path, deadline)
    return StoreCall(connected=connected, calling=calling, named=named, lines=_lines(text))


def _connections(pid: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the peers of the process's TCP connections: the established, then the unanswered."""
    inodes = _sockets(pid)
    found: dict[str, list[str]] = {_ESTABLISHED: [], _SYN_SENT: []}
    for table in ("tcp", "tcp6"):
        for line in _read(f"/proc/{pid}/net/{table}", _MAX_TABLE_BYTES).decode().splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[9] in inodes and words[3] in found:
                found[words[3]].append(read_end(words[2]))
    first, second = (tuple(sorted(set(ends)))[:_MAX_ENDS] for ends in found.values())
    return first, second


def read_end(word: str) -> str:
    """Return a /proc/net/tcp address (words in native byte order) as `10.0.0.1:29501`."""
    host, _, port = word.partition(":")
    packed = b"".join(
        int(host[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(host), 8)
    )
    address = ipaddress.ip_address(packed)
    mapped = getattr(address, "ipv4_mapped", None)
    return f"{mapped or address}:{int(port, 16)}"


def _sockets(pid: int) -> set[str]:
    """Return the inodes of the process's sockets."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")[:_MAX_FDS]
    except OSError:
        return set()
    found = set()
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[len("socket:[") : -1])
    return found


def _named(path: str, deadline: float) -> str:
    """Return the address at the end of a log, where torch names it if our signal broke its call."""
    while path:
        found = list(_NAMED.finditer(last_bytes(path, _MAX_LOG_BYTES)))
        if found:
            return f"{found[-1]['host'].decode()}:{found[-1]['port'].decode()}"
        if time.monotonic() >= deadline:
            break
        select.select([], [], [], _POLL_S)
    return ""


def _lines(text: str) -> tuple[str, ...]:
    """Return the lines that set the address of a store in the script's files on the stack."""
    found: list[str] = []
    frames = reading.main_frames(text)
    for file in dict.fromkeys(f.file for f in frames if not reading.is_library(f.file)):
        script = _read(file, _MAX_SCRIPT_BYTES).decode(errors="replace")
        for number, line in enumerate(script.splitlines(), 1):
            code = line.strip()
            if _SETS.search(code) and not code.startswith("#"):
                found.append(f"{os.path.basename(file)}:{number}: {code[:100]}")
    return tuple(found[:_MAX_LINES])


def _read(path: str, most: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except OSError:
        return b""
