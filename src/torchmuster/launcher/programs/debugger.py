"""Connect a user's client, on our standard input and output, to the debugger in a worker.

The agent starts this program for an authenticated client, like the commands of `muster exec`. The
worker listens on a Unix socket. If its debugger needs a port, it calls back on a loopback port,
where only this user's connection is accepted.
"""

import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Sequence

from torchmuster.core.model import contract
from torchmuster.launcher.net.interfaces import is_own_connection

_CALL_S = 30.0
_CHUNK_BYTES = 64 << 10


def main(words: Sequence[str]) -> int:
    """Carry one debugger session of the worker that listens at the path; return the exit code."""
    (path,) = words
    with socket.socket(socket.AF_UNIX) as worker:
        try:
            worker.connect(path)
        except OSError:
            sys.stderr.write("this rank waits for no debugger now\n")
            return 1
        if worker.recv(1) != contract.CALLS_BACK:
            _carry(worker)
            return 0
        stream = _called_back(worker)
        if stream is None:
            sys.stderr.write(f"debugpy did not call back within {_CALL_S:g} s\n")
            return 1
        with stream:
            _carry(stream)
    return 0


def _called_back(worker: socket.socket) -> socket.socket | None:
    """Send the worker a port; return this user's connection to it, None if none comes."""
    with socket.create_server(("127.0.0.1", 0), backlog=4) as listener:
        worker.sendall(struct.pack("!H", listener.getsockname()[1]))
        listener.settimeout(_CALL_S)
        while True:
            try:
                stream, _ = listener.accept()
            except TimeoutError:
                return None
            stream.settimeout(None)
            if is_own_connection(stream):
                return stream
            stream.close()


def _carry(stream: socket.socket) -> None:
    """Copy both ways until the worker closes its side."""
    threading.Thread(target=_send, args=(stream,), daemon=True).start()
    with contextlib.suppress(OSError):
        while data := stream.recv(_CHUNK_BYTES):
            view = memoryview(data)
            while view:
                view = view[os.write(1, view) :]


def _send(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(0, _CHUNK_BYTES):
            stream.sendall(data)
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)  # the user has left
