"""Claim the head's port, which this run's head, or an unrelated process, may already use.

Use it only if this machine owns the address: then whatever listens there is on this machine.
"""

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable

from torchmuster.core.net import channel
from torchmuster.core.net.address import bind
from torchmuster.errors import JoinTimeoutError, UsageError
from torchmuster.launcher.net.port_owner import port_owner

_FIRST_SAY_S = 4.0
_SAY_EVERY_S = 5.0
_TRY_EVERY_S = 0.2
_ANSWERS_WITHIN_S = 1.0


def claim(host: str, port: int, address: str) -> socket.socket:
    """Return a socket that listens on the head's port, for the only possible head.

    Raises:
        UsageError: The port can't be bound, for instance since another process listens there.
    """
    try:
        return bind(address, port)
    except OSError as error:
        raise UsageError(
            f"the head can't listen on port {port}",
            where=f"{host}:{port}",
            why=_because(error, port),
            fix="choose another port on all nodes",
        ) from error


def claim_or_find_head(
    host: str, port: int, address: str, limit_s: float, say: Callable[[str], None]
) -> socket.socket | None:
    """Return a socket that listens on the head's port; None when a head already answers there.

    Wait for a port that another process uses.

    Raises:
        JoinTimeoutError: The port was not free within `limit_s`.
    """
    begun = time.monotonic()
    say_at, pause = begun + _FIRST_SAY_S, threading.Event()
    while True:
        try:
            return bind(address, port)
        except OSError as error:
            why = _because(error, port)
        if is_muster(host, port):
            return None
        now = time.monotonic()
        if now - begun > limit_s:
            raise JoinTimeoutError(
                f"port {port} of this machine was not free within {limit_s:.0f} s",
                where=f"{host}:{port}",
                why=why,
                fix="choose another port on all nodes",
            )
        if now >= say_at:
            say_at = now + _SAY_EVERY_S
            left_s = limit_s - (now - begun)
            say(
                f"waiting for port {port} of this machine, where the head is to listen ({why});"
                f" {left_s:.0f} s left"
            )
        pause.wait(_TRY_EVERY_S)


def is_muster(host: str, port: int) -> bool:
    """Return whether a head of muster answers there."""
    with contextlib.suppress(OSError):
        limit_s = _ANSWERS_WITHIN_S
        with socket.create_connection((host, port), timeout=limit_s) as connection:
            connection.settimeout(limit_s)
            connection.sendall(channel.greeting())
            wanted = len(channel.MAGIC)
            return connection.recv(wanted, socket.MSG_WAITALL) == channel.MAGIC
    return False


def _because(error: OSError, port: int) -> str:
    if error.errno != errno.EADDRINUSE:
        return os.strerror(error.errno) if error.errno else str(error)
    owner = port_owner(port)
    if owner is not None:
        return f"{owner} listens there"
    return "the port is in use, though nothing listens there: an outgoing connection may hold it"
