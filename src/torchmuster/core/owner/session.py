"""The terminal and session of a foreground run, and stop signals before its owner listens."""

import os
import signal
import sys
from collections.abc import Mapping

from torchmuster.core.model.lines import Terminal

_OWN_SESSION = ("TMUX", "STY")  # tmux and screen outlive the connection


def hangup_ignored() -> bool:
    """Say whether the run should outlive the terminal, as after `nohup`."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def note_on_session(*, may_detach: bool = True) -> str | None:
    """Return a note about this process's session for a run in the foreground, or None.

    Args:
        may_detach: Whether this kind of run has `--detach`.
    """
    note = _note(os.environ, on_terminal=sys.stderr.isatty(), outlives=hangup_ignored())
    return note if may_detach or note is None else note.replace("--detach, tmux", "tmux")


def _note(environment: Mapping[str, str], *, on_terminal: bool, outlives: bool) -> str | None:
    in_ssh = any(environment.get(name) for name in ("SSH_CONNECTION", "SSH_TTY"))
    outlives = outlives or any(environment.get(name) for name in _OWN_SESSION)
    if not in_ssh or not on_terminal or outlives:
        return None
    return "this run ends with your ssh session: --detach, tmux or screen keep it"


class EarlyStop:
    """Catches stop signals before the owner's loop listens, so that new workers get their grace.

    Attributes:
        signum: The first signal; 0 for none.
    """

    def __init__(self) -> None:
        self.signum = 0
        for signum in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._take)

    def _take(self, signum: int, _: object) -> None:
        self.signum = self.signum or signum


def own_terminal() -> Terminal | None:
    """Return the terminal that shows this process's output, if any."""
    streams = frozenset(fd for fd in (1, 2) if os.isatty(fd))
    if not streams:
        return None
    columns, rows = os.get_terminal_size(min(streams))
    return Terminal(streams=streams, columns=columns or 80, rows=rows or 24)
