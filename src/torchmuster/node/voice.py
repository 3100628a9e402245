"""Where an agent speaks: its log in the run directory, or the terminal of `muster torchrun`.

Neither may ever hold the event loop: a log goes through the disk writer, a terminal through
`files.terminal`.
"""

from dataclasses import dataclass
from typing import Protocol

from torchmuster.files.disk import DiskWriter


class Voice(Protocol):
    """Something that sentences and output can be given to, without waiting."""

    def say(self, sentence: str) -> None:
        """Print one sentence of muster's own."""

    def print(self, text: str) -> None:
        """Print text as it is."""

    def show(self, rank: int, stream: int, text: str, left_out: int) -> None:
        """Print what a rank wrote."""

    def prefix_rank(self, rank: int, prefix: str) -> None:
        """Let the lines of a rank begin with this text, where lines are shown."""

    def flush(self, timeout_s: float) -> None:
        """Wait until all is printed, or the time is up."""


@dataclass(slots=True)
class LogVoice:
    """Speaks into a file of the run directory."""

    path: str
    disk: DiskWriter

    def say(self, sentence: str) -> None:
        """Append one line."""
        self.disk.append(self.path, f"muster: {sentence}\n".encode())

    def print(self, text: str) -> None:
        """Append the text."""
        self.disk.append(self.path, text.encode())

    def show(self, rank: int, stream: int, text: str, left_out: int) -> None:
        """Do nothing: the ranks have logs of their own."""

    def prefix_rank(self, rank: int, prefix: str) -> None:
        """Do nothing, likewise."""

    def flush(self, timeout_s: float) -> None:
        """Wait for the disk."""
        self.disk.flush(timeout_s)
