"""Starts the agent of a task in another pod of its group, after it has put there what the pod lacks.

    pod-task --key FILE --order FILE --index N WORD ...

It lives as long as the agent does, and the agent no longer than it: the session, which is its own, ends with either.
"""

import argparse
import asyncio
import os
import shlex
import signal
import sys

from torchmuster.net.secret import read_secret
from torchmuster.node.pod.call import call_pod
from torchmuster.node.pod.order import ORDER_VARIABLE, PROGRAMS_VARIABLE, read_order
from torchmuster.node.pod.place import LACKS_CODE
from torchmuster.node.remote.files import mark_of

_COMMAND = f"exec ${PROGRAMS_VARIABLE}"


def main(arguments: list[str]) -> int:
    """Be the agent's stand-in here."""
    parser = argparse.ArgumentParser(prog="pod-task")
    for option in ("--key", "--order", "--index"):
        parser.add_argument(option, required=True)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    order, secret = read_order(options.order), read_secret(options.key)
    host = order.address(int(options.index))

    def run(command: str, stdin: int = 0) -> int:
        streams = (stdin, 1, 2)
        return asyncio.run(call_pod(host, order.port, secret, command, order.join_s, streams))

    head = mark_of(order.run_dir.path)
    place = f'{_COMMAND} pod-place --order "${ORDER_VARIABLE}" --head {head}'
    if not order.has_volume:
        status = run(f"{place} --check")
        if status == LACKS_CODE:
            with open(order.archive, "rb") as archive:
                status = run(place, archive.fileno())
        if status:
            sys.stderr.write(
                f"{order.host(int(options.index))}: what the task needs could not be put there\n"
            )
            return status
    words = shlex.join(options.words[1:] if options.words[:1] == ["--"] else options.words)
    reading, writing = os.pipe2(os.O_CLOEXEC)  # its end is that of this process
    try:
        return run(f"{_COMMAND} {words}", reading)
    finally:
        os.close(writing)
