"""Dispatch by kind of record, so that commands don't distinguish kinds themselves."""

from typing import TYPE_CHECKING, Protocol

from torchmuster.core import plugs

if TYPE_CHECKING:
    from torchmuster.launcher.views.run_view import RunView


class KindCommands(Protocol):
    """Interface of the module that a kind plugs in as its `commands`."""

    def print_status(self, view: "RunView", *, as_json: bool) -> int:
        """Print the state; return the exit code."""

    def check_logs(self, view: "RunView", task: str | None) -> None:
        """Refuse, with a `MusterError`, logs that it doesn't have."""

    def check_replay(self, view: "RunView") -> None:
        """Refuse, with a `MusterError`, a record without steps."""


class Restart(Protocol):
    """Restarts a record of this kind; returns the exit code."""

    def __call__(self, view: "RunView", *, detach: bool) -> int:
        """Restart it."""


def restart_of(view: "RunView") -> Restart:
    """Return the function that restarts a record of this kind."""
    found: Restart = plugs.find("kinds", f"{view.kind.value} restart")
    return found


def commands_of(view: "RunView") -> KindCommands:
    """Return the commands for a record of this kind."""
    found: KindCommands = plugs.find("kinds", f"{view.kind.value} commands")
    return found
