"""Local proxy process for an agent that runs on another host.

    proxy BROKER REQUEST

It asks the broker for the agent, and ends as the agent ended. When it is killed, or its parent dies, the agent is killed.
"""

import os
import sys

from torchmuster.core import proc
from torchmuster.launcher.net import remote_messages
from torchmuster.launcher.net.broker import request_agent
from torchmuster.launcher.net.remote_messages import StartNode, StartTask

BROKER_VARIABLE = "MUSTER_BROKER"
HOST_VARIABLE = "MUSTER_HOST"


def proxy_argv(broker: str, start: StartNode | StartTask) -> list[str]:
    """Return the command of the proxy of an agent."""
    return proc.node_program("proxy", broker, remote_messages.encode(start).decode())


def main(arguments: list[str]) -> int:
    """Wait for the end of the agent; the exit code is its own, as a shell shows it."""
    proc.die_with_parent(os.getppid())
    status, why = request_agent(arguments[0], arguments[1])
    if why is not None:
        sys.stderr.write(f"{why}\n")
    return 128 - status if status < 0 else status
