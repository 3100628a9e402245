"""Processes whose end can be asked for: those that we started, forked ourselves, or had forked by a door."""

import os
import select
import time
from typing import Protocol

from torchmuster.proc import kill_quietly


class HasStatus(Protocol):
    """A process whose end can be asked for."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit status (negative for a signal), or None while the process runs."""

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; return the exit status or None when the time is up."""

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the process has been reaped already."""


class ForkedChild:
    """A child that we forked ourselves."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status (negative for a signal), or None while the process runs."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has reaped it
                pid, status = self.pid, 0
            if pid != 0:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; return the exit status or None when the time is up."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < deadline:
            select.select([], [], [], 0.005)
        return self._status

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the process has been reaped already."""
        if self.poll() is None:
            kill_quietly(self.pid, signum)
