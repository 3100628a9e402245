"""Loader workers: they ignore the signals that ask the run to stop, and die with their parent.

A stop signal usually goes to the whole process group. If it ended a loader worker, the save would
fail too (KempnerForge 177). So the signals are blocked while workers are forked, and ignored in
them.
"""

import ctypes
import functools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP})
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def fork_quietly() -> Iterator[None]:
    """Block the stop signals in the body, so that a child forked there starts with them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def quiet_worker(then: Callable[[int], None] | None = None) -> Callable[[int], None]:
    """Return a `worker_init_fn` that ignores the stop signals, then calls the user's."""
    return functools.partial(_init_worker, then)


def _init_worker(then: Callable[[int], None] | None, worker_id: int) -> None:
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if then is not None:
        then(worker_id)
