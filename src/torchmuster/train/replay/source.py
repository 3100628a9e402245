"""The snapshots of the run that is replayed: those before the step, and nothing is written."""

from typing import NoReturn

from torchmuster.train.snapshot.folder import Folder, Sink, open_folder
from torchmuster.train.snapshot.state import SnapshotError


class SnapshotsBefore(Folder):
    """A folder as it was before a step; it belongs to a run that may still go on.

    Args:
        url: Of the earlier run's folder.
        step: The one that is made again.
    """

    is_foreign = True

    def __init__(self, url: str, step: int) -> None:
        self._folder, self._step = open_folder(url), step
        self.url = self._folder.url

    def steps(self) -> list[int]:
        """Return the steps of the snapshots that the step can be made from, the newest first."""
        return [step for step in self._folder.steps() if step < self._step]

    def size(self, step: int, name: str) -> int:
        """Return the size of a committed file in bytes."""
        return self._folder.size(step, name)

    def read_into(self, step: int, name: str, buffer: memoryview, begin: int = 0) -> int:
        """Fill `buffer` from a committed file."""
        return self._folder.read_into(step, name, buffer, begin)

    def set_aside(self, step: int) -> str:
        """Refuse."""
        self._refuse()

    def _names(self) -> list[str]:
        return self._folder._names()

    def claim_generation(self, at_least: int = 1) -> int:
        """Refuse."""
        self._refuse()

    def begin(self, step: int, generation: int) -> None:
        """Refuse."""
        self._refuse()

    def create(self, step: int, generation: int, name: str) -> Sink:
        """Refuse."""
        self._refuse()

    def commit(self, step: int, generation: int, manifest: bytes) -> None:
        """Refuse."""
        self._refuse()

    def abandon(self, step: int, generation: int) -> None:
        """Refuse."""
        self._refuse()

    def delete(self, step: int) -> None:
        """Refuse."""
        self._refuse()

    def tidy(self, generation: int) -> None:
        """Refuse."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise SnapshotError(
            "a replay was about to change the snapshots of the run that it replays",
            where=self.url,
            fix="this is a bug of torchmuster; nothing was changed",
        )
