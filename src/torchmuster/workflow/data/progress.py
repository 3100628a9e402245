"""Count what several threads transfer, and run work in threads until the first error."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferProgress:
    """The progress of a transfer."""

    files_done: int
    num_files: int
    bytes_done: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferResult:
    """The result of a transfer.

    Attributes:
        num_files: The number of files that exist now.
        total_bytes: Their total size.
        num_skipped: The number of those that existed before.
    """

    num_files: int
    total_bytes: int
    num_skipped: int


ProgressCallback = Callable[[TransferProgress], None]
NoteCallback = Callable[[str], None]


class TransferMeter:
    """Sums the progress of a transfer's threads and passes it to the callback."""

    def __init__(self, num_files: int, total_bytes: int, callback: ProgressCallback | None) -> None:
        self._lock = threading.Lock()
        self._callback = callback
        self._num_files = num_files
        self._total_bytes = total_bytes
        self._files = self._bytes = self._skipped = 0

    def add(self, size_bytes: int = 0, *, files: int = 0, skipped: int = 0) -> None:
        """Count bytes (negative when they have to be transferred again) and complete files."""
        with self._lock:
            self._bytes += size_bytes
            self._files += files
            self._skipped += skipped
            if self._callback is not None:
                self._callback(
                    TransferProgress(
                        files_done=self._files,
                        num_files=self._num_files,
                        bytes_done=self._bytes,
                        total_bytes=self._total_bytes,
                    )
                )

    def result(self) -> TransferResult:
        """Return the result of the transfer."""
        return TransferResult(
            num_files=self._files, total_bytes=self._total_bytes, num_skipped=self._skipped
        )


def run_all(
    work: Callable[[_T], Any], items: Iterable[_T], num_parallel: int, stop: threading.Event
) -> list[Any]:
    """Call `work` for all items in threads; return the results in the order of the items.

    After the first error, start no further item, set `stop`, and raise the error.
    """
    given = list(items)
    results: list[Any] = [None] * len(given)
    # Each thread takes the next item: 100,000 futures would cost more than the work.
    numbers = iter(range(len(given)))
    errors: list[BaseException] = []

    def drain() -> None:
        for number in numbers:
            if errors:
                return
            try:
                results[number] = work(given[number])
            except BaseException as error:
                errors.append(error)
                stop.set()
                raise

    num_threads = max(1, min(num_parallel, len(given)))
    with ThreadPoolExecutor(num_threads, thread_name_prefix="muster-data") as pool:
        try:
            wait([pool.submit(drain) for _ in range(num_threads)])
        except BaseException as error:  # e.g. Ctrl-C
            errors.append(error)
            stop.set()
            raise
    if errors:
        raise errors[0]
    return results
