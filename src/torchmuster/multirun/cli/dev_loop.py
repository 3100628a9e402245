"""Decide what `muster dev` does after a saved file, a key or the end of a run; without I/O."""

from dataclasses import dataclass
from enum import Enum

AGAIN_KEYS = "\r\nr"
QUIT_KEYS = "q\x04"  # and Ctrl-D


class Act(Enum):
    """The next action."""

    START = "start"
    CANCEL = "cancel"
    QUIT = "quit"


@dataclass
class DevLoop:
    """The state of `muster dev`: whether a run is active, and what follows it.

    Attributes:
        until_error: Whether to start the next run after a successful one.
        is_running: Whether a run is active, or being ended.
    """

    until_error: bool = False
    is_running: bool = False
    _next: Act | None = None  # what follows the run that is being ended
    _is_ending: bool = False

    def start(self) -> Act:
        """Record that a run begins."""
        self.is_running, self._is_ending, self._next = True, False, None
        return Act.START

    def saved(self) -> Act | None:
        """Return what to do after a saved file."""
        return self._replace_by(Act.START)

    def pressed(self, keys: str) -> Act | None:
        """Return what to do after keys of a terminal, or letters on stdin."""
        for key in keys:
            if key in QUIT_KEYS:
                return self._replace_by(Act.QUIT)
            if key in AGAIN_KEYS:
                return self._replace_by(Act.START)
        return None

    def end_requested(self) -> Act | None:
        """Return what to do after a signal that ends the command."""
        return self._replace_by(Act.QUIT)

    def ended(self, code: int) -> Act | None:
        """Return what to do after the end of the run."""
        self.is_running = False
        if self._next is not None:
            return self._next
        return Act.START if self.until_error and code == 0 else None

    def _replace_by(self, act: Act) -> Act | None:
        if not self.is_running:
            return act
        if self._next is not Act.QUIT:
            self._next = act
        if self._is_ending:
            return None
        self._is_ending = True
        return Act.CANCEL


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRun:
    """The run that has ended.

    Attributes:
        code: Its exit code.
        took_s: The time from its start to its end.
        saved: The files saved before it, relative to the folder; `saved_at` is the time of day.
    """

    code: int
    took_s: float
    saved: tuple[str, ...] = ()
    saved_at: str = ""


def status_of(last: LastRun, *, has_keys: bool) -> str:
    """Return the status line below the output of a run."""
    parts = []
    if last.saved:
        more = f" and {len(last.saved) - 1} more" if len(last.saved) > 1 else ""
        parts.append(f"saved {last.saved[0]}{more} {last.saved_at}")
    took = f"{last.took_s:.1f} s" if last.took_s < 100 else f"{last.took_s / 60:.0f} min"
    parts.append(f"ran {took}" if last.code == 0 else f"failed in {took} (exit code {last.code})")
    keys = " (Enter: again, q: quit)" if has_keys else ""
    return "; ".join([*parts, f"waiting for a change{keys}"])


def name_for(folder: str, taken: dict[str, str]) -> str:
    """Return the session name for a folder.

    Args:
        folder: The path of the folder.
        taken: The folder of each live session, by its name.
    """
    own = folder.rstrip("/").rpartition("/")[2]
    word = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "-" for c in own)
    base = f"dev-{word.strip('-')[:24].strip('-') or 'root'}"
    names = [base, *(f"{base}-{number}" for number in range(2, 100))]
    return next((name for name in names if taken.get(name, folder) == folder), base)
