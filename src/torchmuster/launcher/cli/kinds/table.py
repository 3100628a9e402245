"""What commands do with each kind of record: no command asks what a folder is the record of."""

from typing import TYPE_CHECKING, Protocol

from torchmuster.core import plugs

if TYPE_CHECKING:
    from torchmuster.launcher.views.run_view import RunView


class KindCommands(Protocol):
    """What the module has that a kind plugs in as its `commands`."""

    def print_status(self, view: "RunView", *, as_json: bool) -> int:
        """Print where it stands, and return the exit code."""

    def check_logs(self, view: "RunView", task: str | None) -> None:
        """Refuse, with a `MusterError`, logs that it does not have."""

    def check_replay(self, view: "RunView") -> None:
        """Refuse, with a `MusterError`, to make a step again of what has none."""


class Restart(Protocol):
    """Starts what a folder is the record of again, and returns the exit code."""

    def __call__(self, view: "RunView", *, detach: bool) -> int:
        """Start it again."""


def restart_of(view: "RunView") -> Restart:
    """Return what starts a record of this kind again."""
    found: Restart = plugs.find("kinds", f"{view.kind.value} restart")
    return found


def commands_of(view: "RunView") -> KindCommands:
    """Return what commands do with a record of this kind."""
    found: KindCommands = plugs.find("kinds", f"{view.kind.value} commands")
    return found
