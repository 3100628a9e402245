"""Output that `muster data` and `muster dataset` share: progress, notes and results."""

import shutil
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

import click

if TYPE_CHECKING:
    from torchmuster.workflow.data.progress import TransferProgress, TransferResult

_REDRAW_S = 0.2
_BAR_WIDTH = 30


class Bar:
    """A progress bar on one line of standard error, if that is a terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._next_s = 0.0
        self._is_drawn = False
        self._began_at: float | None = None
        self._began_bytes = 0

    def update(self, state: "TransferProgress") -> None:
        """Draw the progress, at limited intervals."""
        now_s = time.monotonic()
        if not self._is_terminal or now_s < self._next_s:
            return
        from torchmuster.core.model.text import show_transfer

        share = state.bytes_done / state.total_bytes if state.total_bytes else 1.0
        full = int(_BAR_WIDTH * min(max(share, 0.0), 1.0))
        if self._began_at is None:
            self._began_at, self._began_bytes = now_s, state.bytes_done
        elapsed_s, before = now_s - self._began_at, self._began_bytes
        words = show_transfer(state.bytes_done, state.total_bytes, elapsed_s, before_bytes=before)
        files = f"{state.files_done}/{state.num_files} files"
        with self._lock:
            self._next_s = now_s + _REDRAW_S
            self._is_drawn = True
            bar = "#" * full + "." * (_BAR_WIDTH - full)
            line = f"[{bar}] {words}, {files}"[: shutil.get_terminal_size().columns - 1]
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        if self._is_drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def say(sentence: str) -> None:
    """Print a sentence that is not a result, to standard error."""
    click.echo(sentence, err=True)


def describe(moved: "TransferResult", verb: str) -> str:
    """Return a line about the result of a transfer."""
    from torchmuster.core.model.text import show_size

    skipped = f", {moved.num_skipped} were there already" if moved.num_skipped else ""
    return f"{moved.num_files} files {verb}, {show_size(moved.total_bytes)}{skipped}"
