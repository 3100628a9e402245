"""What commands do with each kind of record: two tables, so that no command asks what a folder is the record of."""

import importlib
from typing import TYPE_CHECKING, Protocol, cast

from torchmuster.core.files.layout import Kind

if TYPE_CHECKING:
    from torchmuster.launcher.views.run_view import RunView

_MODULES = {
    Kind.RUN: "torchmuster.launcher.cli.kinds.run",
    Kind.SESSION: "torchmuster.launcher.cli.kinds.run",
    Kind.WORKFLOW: "torchmuster.workflow.cli.record",
    Kind.SWEEP: "torchmuster.multirun.cli.sweep_record",
}


_RESTARTS = {
    Kind.RUN: ("torchmuster.launcher.cli.restart", "restart_run"),
    Kind.SESSION: ("torchmuster.launcher.cli.restart", "restart_run"),
    Kind.WORKFLOW: ("torchmuster.workflow.cli.record", "restart"),
    Kind.SWEEP: ("torchmuster.multirun.cli.sweep", "restart_sweep"),
}


class KindCommands(Protocol):
    """What a module of the table has."""

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
    module, name = _RESTARTS[view.kind]
    return cast("Restart", getattr(importlib.import_module(module), name))


def commands_of(view: "RunView") -> KindCommands:
    """Return what commands do with a record of this kind."""
    return cast("KindCommands", importlib.import_module(_MODULES[view.kind]))
