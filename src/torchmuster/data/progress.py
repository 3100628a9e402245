"""Counts what several threads have transferred, and runs work in threads until the first error."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
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
class Moved:
    """The result of a transfer.

    Attributes:
        num_files: Number of files that exist now.
        total_bytes: Their total size.
        num_skipped: Number of those that existed before.
    """

    num_files: int
    total_bytes: int
    num_skipped: int


ProgressCallback = Callable[[TransferProgress], None]
NoteCallback = Callable[[str], None]


class TransferMeter:
    """Sums the work of the threads of a transfer and calls the callback."""

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

    def result(self) -> Moved:
        """Return the result of the transfer."""
        return Moved(
            num_files=self._files, total_bytes=self._total_bytes, num_skipped=self._skipped
        )


def run_all(
    work: Callable[[_T], Any], items: Iterable[_T], num_parallel: int, stop: threading.Event
) -> list[Any]:
    """Call `work` for all items in threads; return the results in the order of the items.

    After the first error no further item is started, `stop` is set, and the error is raised.
    """
    pool = ThreadPoolExecutor(max(1, num_parallel), thread_name_prefix="muster-data")
    try:
        futures = [pool.submit(work, item) for item in items]
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        failed = [future for future in futures if future in done and future.exception()]
        if failed or waiting:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
        return [future.result() for future in (failed[:1] or futures)]
    except BaseException:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    finally:
        pool.shutdown(wait=True)
