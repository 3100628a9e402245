"""Starts a task's agent in another pod of its group, after copying what that pod lacks.

This process and the agent end together, as its session ends with either.
"""

import asyncio
import os
import shlex
import signal
import sys
from dataclasses import dataclass

from torchmuster.core.model.codec import from_arguments
from torchmuster.core.net.address import read_secret
from torchmuster.kubernetes.node.call import call_pod
from torchmuster.kubernetes.node.order import ORDER_VARIABLE, PROGRAMS_VARIABLE, read_order
from torchmuster.kubernetes.node.record import LACKS_CODE
from torchmuster.launcher.node.remote.files import mark_of

_COMMAND = f"exec ${PROGRAMS_VARIABLE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTaskWords:
    """The command line of `pod-task`: files of key and order, the task's pod, agent command."""

    key: str
    order: str
    index: int
    command: tuple[str, ...]


def main(arguments: list[str]) -> int:
    """Stand in for the agent in the first pod."""
    parsed = from_arguments(PodTaskWords, arguments)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    order, secret = read_order(parsed.order), read_secret(parsed.key)
    host = order.address(parsed.index)

    def run(command: str, stdin: int = 0) -> int:
        streams = (stdin, 1, 2)
        return asyncio.run(call_pod(host, order.port, secret, command, order.join_s, streams))

    head = mark_of(order.run_dir.path)
    place = f'{_COMMAND} pod-place --order="${ORDER_VARIABLE}" --head={head}'
    if not order.has_volume:
        status = run(f"{place} --check")
        if status == LACKS_CODE:
            with open(order.archive, "rb") as archive:
                status = run(place, archive.fileno())
        if status:
            sys.stderr.write(
                f"{order.host(parsed.index)}: what the task needs could not be put there\n"
            )
            return status
    words = shlex.join(parsed.command)
    reading, writing = os.pipe2(os.O_CLOEXEC)  # it closes when this process ends
    try:
        return run(f"{_COMMAND} {words}", reading)
    finally:
        os.close(writing)
