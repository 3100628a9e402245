"""What the library tells muster's agent: over the worker socket, never in the way of a step."""

import contextlib
import json
import os
import socket
import struct
from typing import Any

from torchmuster.model import contract

_TIMEOUT_S = 2.0


def tell_agent(kind: str, **fields: Any) -> None:
    """Send one message to the agent of this node; without one, do nothing."""
    path = os.environ.get(contract.SOCKET_VARIABLE)
    if not path:
        return
    payload = json.dumps({"kind": kind, **fields}).encode()
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent,
    ):
        agent.settimeout(_TIMEOUT_S)
        agent.connect(path)
        agent.sendall(struct.pack("!I", len(payload)) + payload)
        agent.recv(1)  # the agent has it before it hears of our end
