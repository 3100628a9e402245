"""Starts the agent of a task in another pod of its group, after it has put there what the pod lacks.

It lives as long as the agent does, and the agent no longer than it: the session, which is its own, ends with either.
"""

import asyncio
import os
import shlex
import signal
import sys
from dataclasses import dataclass

from torchmuster.core.model.codec import from_words
from torchmuster.core.net.address import read_secret
from torchmuster.kubernetes.node.call import call_pod
from torchmuster.kubernetes.node.order import ORDER_VARIABLE, PROGRAMS_VARIABLE, read_order
from torchmuster.kubernetes.node.place import LACKS_CODE
from torchmuster.launcher.node.remote.files import mark_of

_COMMAND = f"exec ${PROGRAMS_VARIABLE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTaskWords:
    """The command line of `pod-task`: the files of the key and of this pod's order, which pod gets the task, and the agent's words."""

    key: str
    order: str
    index: int
    command: tuple[str, ...]


def main(arguments: list[str]) -> int:
    """Be the agent's stand-in here."""
    told = from_words(PodTaskWords, arguments)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    order, secret = read_order(told.order), read_secret(told.key)
    host = order.address(told.index)

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
                f"{order.host(told.index)}: what the task needs could not be put there\n"
            )
            return status
    words = shlex.join(told.command)
    reading, writing = os.pipe2(os.O_CLOEXEC)  # its end is that of this process
    try:
        return run(f"{_COMMAND} {words}", reading)
    finally:
        os.close(writing)
