"""What a run in the foreground hangs on: said before it is lost with it."""

import os
import signal
import sys
from collections.abc import Mapping

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
