"""Stands here for an agent on another host: orders it, lives as long as it does, and ends as it ended.

    proxy DESK REQUEST

Who kills this process withdraws the order; it dies with its parent, and so does the agent.
"""

import json
import os
import sys
from typing import Any

from torchmuster import proc
from torchmuster.net.orders import place_order

DESK_VARIABLE = "MUSTER_DESK"
HOST_VARIABLE = "MUSTER_HOST"


def elsewhere_argv(desk: str, request: dict[str, Any]) -> list[str]:
    """Return the command of a process that stands for an agent on another host."""
    return proc.node_program("proxy", desk, json.dumps(request))


def main(arguments: list[str]) -> int:
    """Wait for the end of the agent; the exit code is its own, as a shell shows it."""
    parent = os.getppid()
    proc.die_with_parent(parent)
    status, why = place_order(arguments[0], json.loads(arguments[1]))
    if why is not None:
        sys.stderr.write(f"{why}\n")
    return 128 - status if status < 0 else status
