"""Waiting for a condition, with a limit: what the tests of all labs do."""

import threading
import time


def wait_until(condition, what, limit_s=30.0):
    """Return the first true value of `condition()`."""
    deadline = time.monotonic() + limit_s
    pause = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {limit_s:g} s for {what}"
        pause.wait(0.05)
    return value
