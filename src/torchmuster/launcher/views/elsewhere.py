"""Interface to records that a cluster keeps and that are copied here; a plug-in implements it."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torchmuster.core import plugs
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.verdict import Result
from torchmuster.errors import UsageError

if TYPE_CHECKING:
    from torchmuster.core.net.channel import Channel
    from torchmuster.launcher.model.job import JobView
    from torchmuster.launcher.views.run_view import RunView


class RunFolder(Protocol):
    """The folder of a run, or of a group."""

    @property
    def path(self) -> str:
        """Its path."""


class NewLines(Protocol):
    """Filters lines, so that each is shown once."""

    def new_of(self, way: str, text: str) -> str:
        """Return the lines of a text from one source that no other source has delivered yet."""


class RecordCopy(Protocol):
    """The copy of a run's record while a client follows the run."""

    @property
    def lines(self) -> NewLines:
        """The lines of rank 0 that the terminal has shown."""

    def take_last_words(self) -> bool:
        """Fetch the rest after the run's owner has gone; return whether the record is complete."""

    def has_news(self) -> bool:
        """Return whether something ended since the last call."""

    def look_after(self, view: "JobView | None") -> None:
        """Do what the run needs from its client, and copy what is new."""

    def join(self, result: Result) -> Result:
        """Add what only the cluster knew to the result."""

    def close(self) -> None:
        """Stop copying; leave nothing of a finished run on the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFiles:
    """Where the nodes of a run keep their files.

    Attributes:
        home: The folder of all runs there.
        path: The folder of the run.
        outlives: Whether it remains when the nodes are gone.
    """

    home: str
    path: str
    outlives: bool


class ClusterRecords:
    """Access to records on clusters; this base has none, the room of Kubernetes another."""

    def copied(self, run_dir: RunDir) -> "contextlib.AbstractContextManager[RecordCopy | None]":
        """Copy the record of a run inside a `with` block; do nothing for a local one."""
        return contextlib.nullcontext()

    def follow(
        self, run_dir: RunDir, say: Callable[[str], None], show: Callable[[str], None]
    ) -> RecordCopy | None:
        """Start to copy a run for the client that follows it; None if there is nothing to copy.

        Args:
            run_dir: Directory of the run.
            say: Gets muster's own messages.
            show: Gets the first node's output, where its log is all there is.
        """
        return None

    def catch_up(self, run_dir: RunDir) -> None:
        """Copy what is new of a record, once."""

    def find(self, word: str) -> RunDir | None:
        """Return the folder, made here, of another machine's run; None if no cluster has it."""
        return None

    def fetch(self, run_dir: RunDir, say: Callable[[str], None]) -> None:
        """Fetch all that is left of a run.

        Raises:
            UsageError: There is nothing to fetch.
        """
        raise UsageError("only a run in pods leaves something there", where=run_dir.path)

    def words_on_reach(self, run_dir: RunDir) -> str | None:
        """Return why a record here is not up to date; None if it is."""
        return None

    def kept(self, run_dir: RunFolder) -> RemoteFiles | None:
        """Return where a run's nodes keep their files; None if that is here."""
        return None

    async def call_head(self, view: "RunView", group: str | None) -> "Channel | None":
        """Return a connection to the head of a run or a group; None if it is called like any other.

        Raises:
            ChannelError: The head can't be reached.
        """
        return None

    def cancel_run(self, run_dir: RunDir) -> bool:
        """Cancel a run; return whether there was one."""
        return False

    def cancel_groups(self, run_dir: RunDir) -> bool:
        """Cancel all groups of a workflow that another machine owns; return whether it is one."""
        return False

    def remove_left(self, run_dir: RunDir) -> list[str]:
        """Remove what a finished run has left on the cluster; return the names."""
        return []

    def first_section(self, which: Callable[[str], str | None]) -> tuple[str, str] | None:
        """Return the name and first muster.toml section of a cluster, if one is found from here."""
        return None


def elsewhere() -> ClusterRecords:
    """Return the implementation that is plugged in."""
    found: Callable[[], ClusterRecords] | None = plugs.find("elsewhere", "pods")
    return found() if found is not None else ClusterRecords()


def is_elsewhere(run_dir: RunFolder) -> bool:
    """Return whether a run's record may be kept on a cluster; costs no import in the usual case."""
    return os.path.isdir(os.path.join(run_dir.path, "pods"))


def copied(run_dir: RunDir) -> "contextlib.AbstractContextManager[RecordCopy | None]":
    """Copy the record of a run inside a `with` block; do nothing for a local one."""
    return elsewhere().copied(run_dir)
