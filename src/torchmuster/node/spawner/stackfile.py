"""Let this worker write its stacks into a file when its agent asks by a signal: also while C code holds the GIL.

A descriptor far above those of a script, and a signal that nobody sends by chance. The script's own handlers, and
what it does with `faulthandler` itself, are not touched: one that takes this signal for itself keeps it.
"""

import contextlib
import fcntl
import os
import sys

from torchmuster.model import beats, contract

_kept: list[object] = []


def write_stacks_on_signal(socket_path: str) -> None:
    """Register; a worker never fails because this fails."""
    rank, attempt = os.environ.get("RANK"), os.environ.get(contract.ATTEMPT_VARIABLE)
    if not socket_path or rank is None or attempt is None:
        return
    path = beats.stacks_path(os.path.dirname(socket_path), attempt, rank)
    with contextlib.suppress(Exception):
        _register(path)


def _register(path: str) -> None:
    absent = "faulthandler" not in sys.modules
    import faulthandler

    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    low = os.open(path, flags, 0o600)
    try:
        fd = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, beats.STACK_FD)
    finally:
        os.close(low)
    if fd != beats.STACK_FD:  # the agent looks there and nowhere else
        os.close(fd)
        return
    faulthandler.register(beats.STACK_SIGNAL, file=fd, all_threads=True, chain=False)
    if absent:  # the script imports it when it wants it
        _kept.append(sys.modules.pop("faulthandler"))
