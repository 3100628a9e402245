"""Starts the agent of a task in another pod of its group, after it has put there what the pod lacks.

    pod-task --key FILE --order FILE --index N WORD ...

It lives as long as the agent does, and the agent no longer than it: the session between them ends with either.
"""

import argparse
import os
import shlex
import sys

from torchmuster import proc
from torchmuster.node.pod.call import call_argv
from torchmuster.node.pod.order import ORDER_VARIABLE, PROGRAMS_VARIABLE, PodOrder, read_order
from torchmuster.node.pod.place import LACKS_CODE
from torchmuster.node.remote.files import mark_of

_LOOK_S = 60.0
_COMMAND = f"exec ${PROGRAMS_VARIABLE}"


def pod_words(key: str, order: PodOrder, index: int, wait_s: float = 0.0) -> list[str]:
    """Return the command that runs another, which is its last word, in a pod of a group."""
    return [*call_argv(key, order.port, wait_s=wait_s), order.address(index)]


def main(arguments: list[str]) -> int:
    """Be the agent's stand-in here."""
    parser = argparse.ArgumentParser(prog="pod-task")
    for option in ("--key", "--order", "--index"):
        parser.add_argument(option, required=True)
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    order = read_order(options.order)
    call = pod_words(options.key, order, int(options.index), order.join_s)
    head = mark_of(order.run_dir.path)
    place = f'{_COMMAND} pod-place --order "${ORDER_VARIABLE}" --head {head}'
    if not order.has_volume:
        status = _run([*call, f"{place} --check"])
        if status == LACKS_CODE:
            with open(order.archive, "rb") as archive:
                status = _run([*call, place], archive.fileno())
        if status:
            sys.stderr.write(
                f"{order.host(int(options.index))}: what the task needs could not be put there\n"
            )
            return status
    words = shlex.join(options.words[1:] if options.words[:1] == ["--"] else options.words)
    reading, writing = os.pipe2(os.O_CLOEXEC)  # its end is that of this process
    try:
        return _run([*call, f"{_COMMAND} {words}"], reading)
    finally:
        os.close(writing)


def _run(argv: list[str], stdin: int | None = None) -> int:
    child = proc.start(argv, stdin=stdin)
    while (status := child.wait(_LOOK_S)) is None:
        continue
    return 128 - status if status < 0 else status
