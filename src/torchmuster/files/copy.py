"""Copy a tree of files on this machine: only regular files and folders, nothing from outside the tree."""

import os
import re
import shutil

from torchmuster.errors import MusterError


def copy_tree(source: str, target: str, regex: str | None = None) -> int:
    """Copy what `regex` matches (at the start of the path below `source`); return how many files.

    A symbolic link is followed when it stays inside `source`, to a folder too. Sockets, pipes, devices and links
    to nothing are left out.

    Raises:
        MusterError: A link leaves the tree or leads round in a circle, or a file can't be read or written.
    """
    root = os.path.realpath(source)
    wanted = re.compile(regex) if regex else None
    try:
        os.makedirs(target, exist_ok=True)
        return _copy_folders(root, target, wanted)
    except OSError as error:
        where = str(error.filename or source)
        raise MusterError("a file can't be copied", where=where, why=error.strerror) from error


def _copy_folders(root: str, target: str, wanted: "re.Pattern[str] | None") -> int:
    """Copy folder by folder: a stack, because trees can be deep."""
    num_files = 0
    open_folders = [""]
    while open_folders:
        inside = open_folders.pop()
        with os.scandir(os.path.join(root, inside) if inside else root) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            relative = os.path.join(inside, name)
            path = os.path.join(root, relative)
            _check_link(path, root)
            if os.path.isdir(path):
                open_folders.append(relative)
                if wanted is None:
                    os.makedirs(os.path.join(target, relative), exist_ok=True)
            elif os.path.isfile(path) and (wanted is None or wanted.match(relative)):
                _copy_file(path, os.path.join(target, relative))
                num_files += 1
    return num_files


def _copy_file(path: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copyfile(path, target)
    shutil.copymode(path, target)


def _check_link(path: str, root: str) -> None:
    if not os.path.islink(path):
        return
    real = os.path.realpath(path)
    if os.path.commonpath([real, root]) != root:
        raise MusterError(
            "a symbolic link leads out of the folder",
            where=path,
            why=f"it points to {real}",
            fix="put the file itself there",
        )
    if real in _folders_above(path, root):
        raise MusterError(
            "a symbolic link leads round in a circle",
            where=path,
            why=f"it points to {real}, which holds it",
            fix="remove the link",
        )


def _folders_above(path: str, root: str) -> set[str]:
    """Return where the folders on the way to `path` really are; some may be links themselves."""
    found = {root}
    while len(path := os.path.dirname(path)) > len(root):
        found.add(os.path.realpath(path))
    return found
