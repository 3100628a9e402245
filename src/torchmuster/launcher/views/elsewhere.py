"""Records that are kept on a cluster and come here as a copy: what views and commands ask of the room that keeps them."""

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


class HasPath(Protocol):
    """The folder of a run, or of a group."""

    @property
    def path(self) -> str:
        """Where it is."""


class NewLines(Protocol):
    """Tells the lines that have not been shown yet."""

    def new_of(self, way: str, text: str) -> str:
        """Return of a text that has come by a way the lines that have not come by another one."""


class RecordCopy(Protocol):
    """The copy of one run's record, while somebody follows the run."""

    @property
    def lines(self) -> NewLines:
        """What the terminal has shown of rank 0's lines."""

    def take_last_words(self) -> bool:
        """Return whether all has come that ever will; called when the run's owner has gone."""

    def has_news(self) -> bool:
        """Return whether something ended since the last question."""

    def look_after(self, view: "JobView | None") -> None:
        """Do what the run needs of its client, and copy what is new."""

    def join(self, result: Result) -> Result:
        """Return the result with what only the cluster knew."""

    def close(self) -> None:
        """End the copying; of a run that is over nothing stays on the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptElsewhere:
    """Where the nodes of a run keep what they write.

    Attributes:
        home: The folder of all runs there.
        path: That of the run.
        outlives: It is there when the nodes have gone.
    """

    home: str
    path: str
    outlives: bool


class RecordsElsewhere:
    """Where records lie that are not here; this one stands for none. The room of Kubernetes plugs in another."""

    def copied(self, run_dir: RunDir) -> "contextlib.AbstractContextManager[RecordCopy | None]":
        """Copy the record of a run while somebody looks at it; nothing is done for one that is here."""
        del run_dir
        return contextlib.nullcontext()

    def follow(
        self, run_dir: RunDir, say: Callable[[str], None], show: Callable[[str], None]
    ) -> RecordCopy | None:
        """Return the copy of a run, begun, for the client that follows it; None where there is nothing to copy.

        Args:
            run_dir: The run's.
            say: Gets sentences of muster's own.
            show: Gets what the first node writes, where its log is all that can be had.
        """
        del run_dir, say, show
        return None

    def catch_up(self, run_dir: RunDir) -> None:
        """Copy what is new of a record, once."""

    def find(self, word: str) -> RunDir | None:
        """Return the folder of a run that another machine has submitted, made here; None where nobody knows it."""
        del word
        return None

    def fetch(self, run_dir: RunDir, say: Callable[[str], None]) -> None:
        """Take all that is left of a run.

        Raises:
            UsageError: There is nothing to take.
        """
        del say
        raise UsageError("only a run in pods leaves something there", where=run_dir.path)

    def words_on_reach(self, run_dir: RunDir) -> str | None:
        """Return why a record is not as new as it could be; None where it is."""
        del run_dir
        return None

    def kept(self, run_dir: HasPath) -> KeptElsewhere | None:
        """Return where a run's nodes keep what they write; None where that is here."""
        del run_dir
        return None

    async def call_head(self, view: "RunView", group: str | None) -> "Channel | None":
        """Return a connection to the head of a run, or of a group; None where it is called as any other.

        Raises:
            ChannelError: It can't be reached.
        """
        del view, group
        return None

    def cancel_run(self, run_dir: RunDir) -> bool:
        """Cancel a run; say whether there was one."""
        del run_dir
        return False

    def cancel_groups(self, run_dir: RunDir) -> bool:
        """Cancel all groups of a workflow that another machine owns; say whether it is one."""
        del run_dir
        return False

    def remove_left(self, run_dir: RunDir) -> list[str]:
        """Remove what a run that is over has left, and return its names."""
        del run_dir
        return []

    def first_section(self, which: Callable[[str], str | None]) -> tuple[str, str] | None:
        """Return the name of a cluster that is found from here, and a section for it in a first muster.toml."""
        del which
        return None


def elsewhere() -> RecordsElsewhere:
    """Return what is plugged in."""
    found: Callable[[], RecordsElsewhere] | None = plugs.find("elsewhere", "pods")
    return found() if found is not None else RecordsElsewhere()


def is_elsewhere(run_dir: HasPath) -> bool:
    """Say whether the record of a run may be kept elsewhere: the usual case costs no import."""
    return os.path.isdir(os.path.join(run_dir.path, "pods"))


def copied(run_dir: RunDir) -> "contextlib.AbstractContextManager[RecordCopy | None]":
    """Copy the record of a run while somebody looks at it; nothing is done for one that is here."""
    return elsewhere().copied(run_dir)
