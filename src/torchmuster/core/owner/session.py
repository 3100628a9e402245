"""What a run in the foreground hangs on, its terminal and its session; and a stop that comes before its owner listens."""

import os
import signal
import sys
from collections.abc import Mapping

from torchmuster.core.model.lines import Terminal

_OWN_SESSION = ("TMUX", "STY")  # tmux and screen outlive the connection


def hangup_ignored() -> bool:
    """Say whether whoever started us wants us to outlive the terminal, as `nohup` does."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def note_on_session(*, may_detach: bool = True) -> str | None:
    """Return what to say of this process, before it follows a run in the foreground.

    Args:
        may_detach: Whether `--detach` is there for this kind of run.
    """
    note = _note(os.environ, on_terminal=sys.stderr.isatty(), outlives=hangup_ignored())
    return note if may_detach or note is None else note.replace("--detach, tmux", "tmux")


def _note(environment: Mapping[str, str], *, on_terminal: bool, outlives: bool) -> str | None:
    """Return the sentence for a run that ends with the ssh session it was started in; None for others."""
    in_ssh = any(environment.get(name) for name in ("SSH_CONNECTION", "SSH_TTY"))
    outlives = outlives or any(environment.get(name) for name in _OWN_SESSION)
    if not in_ssh or not on_terminal or outlives:
        return None
    return "this run ends with your ssh session: --detach, tmux or screen keep it"


class EarlyStop:
    """A signal that asks to stop before the owner's loop listens: workers that have just begun get their grace too.

    Attributes:
        signum: The first that came; 0 for none.
    """

    def __init__(self) -> None:
        self.signum = 0
        for signum in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._take)

    def _take(self, signum: int, _: object) -> None:
        self.signum = self.signum or signum


def own_terminal() -> Terminal | None:
    """Return the terminal of this process's output; None if there is none."""
    streams = frozenset(fd for fd in (1, 2) if os.isatty(fd))
    if not streams:
        return None
    columns, rows = os.get_terminal_size(min(streams))
    return Terminal(streams=streams, columns=columns or 80, rows=rows or 24)
