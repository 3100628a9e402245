"""Ports that a test gives to what it starts, and that nobody else takes in between.

A port that the kernel chose and got back is the next that it gives to somebody's outgoing call, so a listener that is
started a moment later may find it taken. These stand below the range that the kernel chooses from, and a name that ends
with this process keeps them from the tests of other processes.
"""

import atexit
import contextlib
import os
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 15_000
_reserved = contextlib.ExitStack()
atexit.register(_reserved.close)


def reserve_port() -> int:
    """Return a port that nobody listens on, and that no other test gets while this process lives."""
    end = int(_RANGE.read_text().split()[0])
    ports = list(range(_FIRST, end))
    random.Random(os.urandom(8)).shuffle(ports)
    for port in ports:
        with contextlib.suppress(OSError):
            _reserved.enter_context(_reserve(port))
            return port
    raise OSError(f"no port from {_FIRST} to {end} is free")


def _reserve(port: int) -> socket.socket:
    with socket.create_server(("0.0.0.0", port)):
        name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            name.bind(f"\0torchmuster-test-port-{port}")
        except OSError:
            name.close()
            raise
        return name
