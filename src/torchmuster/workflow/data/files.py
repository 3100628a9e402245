"""What all transfers share: which files they move, how far they are, and threads until the first error."""

import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from torchmuster.workflow.data.faults import DataError
from torchmuster.workflow.data.tree import LocalFile, is_inside, local_file, walk_tree

_SHOWN = 5


def compile_regex(regex: str | None) -> Callable[[str], bool]:
    """Return a test for relative paths, with `re.match` as in the workflow format.

    Raises:
        DataError: The expression is invalid.
    """
    if regex is None:
        return lambda name: True
    try:
        pattern = re.compile(regex)
    except re.error as error:
        what = f"`{regex}` is not a valid regular expression"
        raise DataError(what, where="regex", why=str(error)) from error
    return lambda name: pattern.match(name) is not None


def unsafe_reason(name: str) -> str | None:
    """Return why a name from a store can't be a local file; None when it can."""
    if name.startswith("/"):
        return "it is absolute"
    if "\0" in name:
        return "it contains a zero byte"
    parts = name.split("/")
    if ".." in parts or "." in parts:
        return "it is outside the folder" if ".." in parts else "it contains `.` as a folder"
    if "" in parts:
        return "a part of it is empty"
    if any(len(part.encode(errors="surrogateescape")) > 255 for part in parts):
        return "a part of it is longer than 255 bytes"
    return None


def check_names(names: Iterable[str], where: str) -> None:
    """Refuse names that lead out of the folder, or that can't all be files of one folder.

    Raises:
        DataError: Names are unsafe; the message has the first few.
    """
    known = set(names)
    bad = [f"`{name}`: {why}" for name in sorted(known) if (why := unsafe_reason(name))]
    for name in sorted(known):
        parts = name.split("/")
        above = ("/".join(parts[:depth]) for depth in range(1, len(parts)))
        bad += [f"`{name}`: `{folder}` is a file" for folder in above if folder in known]
    if bad:
        more = f"; {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        what = (
            f"{len(bad)} names can't be files of one folder" if len(bad) > 1 else "a name is unsafe"
        )
        raise DataError(what, where=where, why="; ".join(bad[:_SHOWN]) + more)


def target_path(folder: str, name: str) -> str:
    """Return the path for a checked name and create its parent folders.

    Raises:
        DataError: A symlink in the folder points outside it.
    """
    root = os.path.realpath(folder)
    path = os.path.join(root, name)
    parent = os.path.realpath(os.path.dirname(path))
    if not is_inside(parent, root):
        what = f"`{name}` would be written outside the folder"
        raise DataError(what, where=folder, why=f"a symlink in it points to {parent}")
    os.makedirs(parent, exist_ok=True)
    return path


def local_files(
    folder: str, regex: str | None = None, paths: Sequence[str] | None = None
) -> tuple[list[LocalFile], list[str]]:
    """Return the selected files in a folder, and messages about skipped ones.

    Symlinks within the folder are followed.

    Args:
        folder: A folder, or one file.
        regex: Applied with `re.match` to the relative path.
        paths: Only these files and folders, relative to `folder`.

    Raises:
        DataError: There is no such file or folder, or symlinks point outside it.
    """
    matches = compile_regex(regex)
    if os.path.isfile(folder):
        name = os.path.basename(folder)
        return ([local_file(name, folder)] if matches(name) else []), []
    if not os.path.isdir(folder):
        raise DataError("there is no such file or folder", where=folder)
    starts = [os.path.normpath(path) for path in paths] if paths is not None else [""]
    for name in starts:
        if name.startswith(("/", "..")):
            raise DataError(f"`{name}` is not inside the folder", where=folder)
        if not os.path.lexists(os.path.join(folder, name)):
            raise DataError(f"there is no `{name}` in the folder", where=folder)
    tree = walk_tree(folder, ["" if name == "." else name for name in starts])
    leaving = [name for name in sorted(tree.leaving) if matches(name)]
    if leaving:
        shown = ", ".join(f"`{name}`" for name in leaving[:_SHOWN])
        what = f"symlinks point outside the folder: {shown}"
        fix = "copy their targets, or exclude them with a regex"
        raise DataError(what, where=folder, fix=fix)
    notes = [f"`{name}` links to a folder above it: skipped" for name in tree.circles]
    notes += [f"`{name}` {why}: skipped" for name, why in tree.left_out.items() if matches(name)]
    return [tree.files[name] for name in sorted(tree.files) if matches(name)], sorted(notes)


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
