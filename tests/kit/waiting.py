"""Waiting for a condition, with a limit: tests never wait for a time to pass."""

import asyncio
import threading
import time

FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.05
LIMIT_S = 120.0


class Clock:
    """A clock that a test sets, or that a wait moves; it may stand for the module `time`, too."""

    paused_s = 0.0

    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now

    time = monotonic = __call__

    def wait(self, seconds):
        """Move it."""
        self.now += seconds


def wait_until(condition, what="the condition", limit_s=LIMIT_S):
    """Return the first true value of `condition()`; fail with `what` when the time is up."""
    never, pauses = threading.Event(), _pauses(what, limit_s)
    while not (value := condition()):
        never.wait(next(pauses))
    return value


async def wait_until_async(condition, what="the condition", limit_s=LIMIT_S):
    """Do as `wait_until`, for conditions that the event loop makes true."""
    pauses = _pauses(what, limit_s)
    while not (value := condition()):
        await asyncio.sleep(next(pauses))
    return value


def run(coroutine, limit_s=60.0):
    """Return what a coroutine comes to in a loop of its own; one that hangs fails."""

    async def limited():
        async with asyncio.timeout(limit_s):
            return await coroutine

    return asyncio.run(limited())


def _pauses(what, limit_s):
    deadline = time.monotonic() + limit_s
    pause_s = FIRST_PAUSE_S
    while time.monotonic() < deadline:
        yield pause_s
        pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
    raise AssertionError(f"waited {limit_s:g} s for {what}")
