"""Which files a transfer takes, and which names are safe to write."""

import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torchmuster.data.faults import DataError

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFile:
    """A file to be sent: its name relative to the folder, and the path that it is read from."""

    name: str
    path: str
    size_bytes: int
    mode: int


def compile_regex(regex: str | None) -> Callable[[str], bool]:
    """Return the test of a relative path; `re.match`, as in the workflow format.

    Raises:
        DataError: The expression is none.
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
    """Return why a name from a store can't become a file here; None when it can."""
    if name.startswith("/"):
        return "it is absolute"
    if "\0" in name:
        return "it holds a zero byte"
    parts = name.split("/")
    if ".." in parts or "." in parts:
        return "it leads out of the folder" if ".." in parts else "it holds `.` as a folder"
    if "" in parts:
        return "a part of it is empty"
    if any(len(part.encode(errors="surrogateescape")) > 255 for part in parts):
        return "a part of it is longer than 255 bytes"
    return None


def check_names(names: Iterable[str], where: str) -> None:
    """Refuse names that could write elsewhere, or that can't all be files of one folder.

    Raises:
        DataError: It names the first few of them.
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
    """Return where a checked name is written; its parent folders exist then.

    Raises:
        DataError: A symlink in the folder leads out of it.
    """
    root = os.path.realpath(folder)
    path = os.path.join(root, name)
    parent = os.path.realpath(os.path.dirname(path))
    if not is_inside(parent, root):
        what = f"`{name}` would be written out of the folder"
        raise DataError(what, where=folder, why=f"a symlink in it leads to {parent}")
    os.makedirs(parent, exist_ok=True)
    return path


def is_inside(path: str, root: str) -> bool:
    """Say whether a real path is a real folder or below it."""
    return path == root or path.startswith(root.rstrip("/") + "/")


def local_files(
    folder: str, regex: str | None = None, paths: Sequence[str] | None = None
) -> tuple[list[LocalFile], list[str]]:
    """Return the files below a folder that are taken, and sentences about what is left out.

    Symlinks are followed inside the folder.

    Args:
        folder: A folder, or one file.
        regex: `re.match` on the relative path.
        paths: Only these files and folders, relative to `folder`.

    Raises:
        DataError: No such folder, or symlinks that lead out of it.
    """
    matches = compile_regex(regex)
    if os.path.isfile(folder):
        name = os.path.basename(folder)
        return ([_local_file(name, folder, os.stat(folder))] if matches(name) else []), []
    if not os.path.isdir(folder):
        raise DataError("there is no such file or folder", where=folder)
    walk = _Walk(folder, matches)
    for start in paths if paths is not None else [""]:
        walk.start(os.path.normpath(start) if start else "")
    if walk.leaving:
        shown = ", ".join(f"`{name}`" for name in sorted(walk.leaving)[:_SHOWN])
        what = f"symlinks lead out of the folder: {shown}"
        raise DataError(
            what, where=folder, fix="copy what they point to, or leave them out by regex"
        )
    return [walk.files[name] for name in sorted(walk.files)], walk.notes


class _Walk:
    def __init__(self, folder: str, matches: Callable[[str], bool]) -> None:
        self._folder = folder
        self._root = os.path.realpath(folder)
        self._matches = matches
        self.files: dict[str, LocalFile] = {}
        self.leaving: set[str] = set()
        self.notes: list[str] = []

    def start(self, name: str) -> None:
        path = os.path.join(self._folder, name)
        if name.startswith(("/", "..")):
            raise DataError(f"`{name}` is not inside the folder", where=self._folder)
        if not os.path.lexists(path):
            raise DataError(f"there is no `{name}` in the folder", where=self._folder)
        if os.path.isdir(path):
            self._enter(name, ())
        else:
            self._add(name)

    def _enter(self, name: str, above: tuple[str, ...]) -> None:
        path = os.path.join(self._folder, name)
        real = os.path.realpath(path)
        if not is_inside(real, self._root):
            if self._matches(name):
                self.leaving.add(name)
            return
        if real in above:  # a symlink to a folder that it lies in
            self.notes.append(f"`{name}` leads back to a folder above it: left out")
            return
        try:
            with os.scandir(path) as found:
                names = sorted((one.name, one.is_dir()) for one in found)
        except FileNotFoundError:  # removed while we walk
            return
        for base, is_folder in names:
            inner = f"{name}/{base}" if name else base
            if is_folder:
                self._enter(inner, (*above, real))
            else:
                self._add(inner)

    def _add(self, name: str) -> None:
        path = os.path.join(self._folder, name)
        if not self._matches(name):
            return
        if not is_inside(os.path.realpath(path), self._root):
            self.leaving.add(name)
            return
        try:
            facts = os.stat(path)
        except FileNotFoundError:
            self.notes.append(f"`{name}` is gone or points to nothing: left out")
            return
        if stat.S_ISREG(facts.st_mode):
            self.files[name] = _local_file(name, path, facts)
        else:
            self.notes.append(f"`{name}` is not a regular file: left out")


def _local_file(name: str, path: str, facts: os.stat_result) -> LocalFile:
    return LocalFile(
        name=name, path=path, size_bytes=facts.st_size, mode=stat.S_IMODE(facts.st_mode)
    )
