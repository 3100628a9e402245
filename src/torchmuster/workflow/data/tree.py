"""Walk and copy a directory tree; follow links inside it, but none that point outside."""

import errno
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchmuster.core.plainfile import write_all
from torchmuster.errors import MusterError

_POINTS_TO_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_PIECE_BYTES = 16 << 20
# The kernel can't copy the file itself: other file systems, old kernels, special files.
_NO_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFile:
    """A regular file: its name relative to the tree, and its real path."""

    name: str
    path: str
    size_bytes: int
    mode: int


@dataclass(slots=True)
class Tree:
    """The result of a walk, by relative name.

    Attributes:
        root: The real path of the tree.
        files: Regular files, including targets of links inside the tree.
        folders: Folders, without the root.
        leaving: Links that point outside the tree, and their targets.
        circles: Links to a folder that contains them, and that folder.
        left_out: Entries that are neither file nor folder, and why.
    """

    root: str
    files: dict[str, LocalFile] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    leaving: dict[str, str] = field(default_factory=dict)
    circles: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def walk_tree(folder: str, starts: Sequence[str] = ("",)) -> Tree:
    """Return the contents of a folder, or of the given parts of it.

    Raises:
        OSError: A folder or file can't be read.
    """
    tree = Tree(os.path.realpath(folder))
    # A stack, because trees can be deep: (name, real path, real paths of the folders above it).
    waiting: list[tuple[str, str, tuple[str, ...]]] = [
        (start, os.path.realpath(os.path.join(folder, start)), ()) for start in starts
    ]
    while waiting:
        name, real, above = waiting.pop()
        path = os.path.join(folder, name) if name else folder
        if not is_inside(real, tree.root):
            tree.leaving[name] = real
        elif name and not os.path.isdir(path):
            _take_file(tree, name, path)
        elif real in above:
            tree.circles[name] = real
        else:
            tree.folders += [name] if name else []
            inner = (*above, real)
            waiting += [(n, r, inner) for n, r in _names_in(name, path, real)]
    return tree


def _names_in(name: str, path: str, real: str) -> list[tuple[str, str]]:
    """Return (name, real path) of the entries of a folder."""
    try:
        with os.scandir(path) as found:
            entries = [(one.name, one.is_symlink()) for one in found]
    except FileNotFoundError:
        if not name:
            raise
        return []  # removed while we walk
    return [
        (
            f"{name}/{base}" if name else base,
            os.path.realpath(os.path.join(path, base)) if is_link else os.path.join(real, base),
        )
        for base, is_link in entries
    ]


def _take_file(tree: Tree, name: str, path: str) -> None:
    try:
        tree.files[name] = local_file(name, path)
    except OSError as error:
        if error.errno in _POINTS_TO_NOTHING:
            tree.left_out[name] = "is gone or points to nothing"
        elif error.errno == errno.EINVAL:
            tree.left_out[name] = "is not a regular file"
        else:
            raise


def local_file(name: str, path: str) -> LocalFile:
    """Return the facts about a regular file.

    Raises:
        OSError: The file is not regular (EINVAL), or not accessible.
    """
    facts = os.stat(path)
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    mode = stat.S_IMODE(facts.st_mode)
    return LocalFile(name=name, path=path, size_bytes=facts.st_size, mode=mode)


def is_inside(path: str, root: str) -> bool:
    """Return whether a real path is `root`, also a real path, or below it."""
    return path == root or path.startswith(root.rstrip("/") + "/")


def copy_file(source: str, target: str, count: Callable[[int], object] = int) -> None:
    """Copy content and mode in the kernel, which may share blocks until either file is written.

    Args:
        source: A regular file.
        target: Overwritten if it exists.
        count: Called with the size of each piece; with a negative size before bytes are copied
            again.
    """
    with open(source, "rb", buffering=0) as reader, open(target, "wb", buffering=0) as writer:
        try:
            while size := os.copy_file_range(reader.fileno(), writer.fileno(), _PIECE_BYTES):
                count(size)
        except OSError as error:
            if error.errno not in _NO_COPY:
                raise
        if writer.tell() < os.fstat(reader.fileno()).st_size:
            # The kernel refused, or (some network file systems) ended early without an error.
            count(-writer.tell())
            reader.seek(0)
            writer.seek(0)
            writer.truncate()
            while piece := reader.read(_PIECE_BYTES):
                write_all(writer.fileno(), piece)
                count(len(piece))
        os.fchmod(writer.fileno(), stat.S_IMODE(os.fstat(reader.fileno()).st_mode))


def copy_tree(
    source: str,
    target: str,
    regex: str | None = None,
    tell: Callable[[int, int], object] = lambda done, total: None,
) -> int:
    """Copy the files whose relative path `regex` matches (from its start); return their number.

    Without a regex, copy empty folders too. Copy the targets of links; skip sockets, pipes, devices
    and broken links. Call `tell` repeatedly with the bytes copied and the total bytes.

    Raises:
        MusterError: A link points outside the tree or forms a cycle, or a file can't be read or
            written.
    """
    try:
        os.makedirs(target, exist_ok=True)
        tree = walk_tree(source)
        _refuse_links(tree)
        wanted = re.compile(regex or "")
        files = [file for file in tree.files.values() if wanted.match(file.name)]
        folders = tree.folders if regex is None else [os.path.dirname(file.name) for file in files]
        for name in dict.fromkeys(folders):
            os.makedirs(os.path.join(target, name), exist_ok=True)
        done, total = 0, sum(file.size_bytes for file in files)

        def count(size: int) -> None:
            nonlocal done
            done += size
            tell(done, total)

        for file in files:
            copy_file(file.path, os.path.join(target, file.name), count)
        return len(files)
    except OSError as error:
        where = str(error.filename or source)
        raise MusterError("a file can't be copied", where=where, why=error.strerror) from error


def _refuse_links(tree: Tree) -> None:
    for name, real in tree.leaving.items():
        raise MusterError(
            "a symbolic link points outside the folder",
            where=os.path.join(tree.root, name),
            why=f"it points to {real}",
            fix="put the file itself there",
        )
    for name, real in tree.circles.items():
        raise MusterError(
            "symbolic links form a cycle",
            where=os.path.join(tree.root, name),
            why=f"it points to {real}, which contains it",
            fix="remove the link",
        )
