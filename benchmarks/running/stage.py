"""The stage of a benchmark: its own world, its progress on stderr, and an end within a limit.

Nothing of this machine's schedulers, settings and jobs reaches what is measured (`tests/kit/world.py`).
"""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "tests"))

from kit import world  # type: ignore[import-not-found]  # noqa: E402

MACHINE_PATH: str = world.MACHINE_PATH


class LimitError(SystemExit):
    """A benchmark was not done within its limit; its text says what it waited for."""


class Stage:
    """What is being done now."""

    def __init__(self, name: str, limit_s: float) -> None:
        self.name = name
        self.limit_s = limit_s
        self._began_s = time.monotonic()
        self._doing = "getting ready"

    def step(self, doing: str) -> None:
        """Note what begins now, and tell stderr: the limit names it."""
        self._doing = doing
        self.tell(doing)

    def tell(self, text: str) -> None:
        """Print a line of progress."""
        elapsed_s = time.monotonic() - self._began_s
        print(f"[{elapsed_s:4.0f} s] {self.name}: {text}", file=sys.stderr, flush=True)

    def expire(self, _signum: int, _frame: FrameType | None) -> NoReturn:
        """End the benchmark."""
        raise LimitError(
            f"{self.name}: not done within {self.limit_s:g} s; it waited for: {self._doing}"
        )


@contextmanager
def stage(name: str, limit_s: float) -> Iterator[Stage]:
    """Enter a world of its own and leave it, within a limit; SIGTERM ends it too, cleaned up."""
    home = world.make_home()
    world.enter(home)
    running = Stage(name, limit_s)
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGALRM, running.expire)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield running
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        world.remove_home(home)


def _leave(signum: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)
