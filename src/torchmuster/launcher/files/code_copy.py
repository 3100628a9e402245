"""Pack code for hosts that lack it, and unpack its outputs: the user's folder, and torchmuster itself.

Files of the folder that git ignores are left out. Archives are untrusted: unpacking writes nothing
outside its folder. The archive of torchmuster is named by its content; the package is pure Python,
so one serves every processor; a test checks that.
"""

import contextlib
import functools
import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import IO, Any

from torchmuster.core import plugs, proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import muster_home
from torchmuster.core.model.plan import Program, ScriptKind
from torchmuster.core.model.text import show_size
from torchmuster.core.plainfile import open_plain
from torchmuster.errors import MusterError, UsageError

MAX_CODE_BYTES = 512 << 20
MAX_OUTPUT_BYTES = 256 << 20
_GIT_LIMIT_S = 20.0
_SHOWN = 5
_NO_TIME = 315532800  # 1980-01-01, the earliest date of zip files: no tool rejects it
_LEFT_OUT = frozenset({".git", "__pycache__", ".hg", ".svn", ".mypy_cache", ".ruff_cache"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFolder:
    """The files to copy.

    Attributes:
        names: Files and links, relative to the root.
        by_git: Whether the names are those that git tracks or would add.
    """

    root: str
    names: tuple[str, ...]
    size_bytes: int
    by_git: bool

    def describe(self) -> str:
        """Return a description of what is copied, for the user."""
        how = "what git doesn't ignore" if self.by_git else "without .git and virtual environments"
        return f"{self.root} ({len(self.names)} files, {show_size(self.size_bytes)}, {how})"


def root_of(cwd: str) -> str:
    """Return the git work tree that a folder is in, else the folder itself."""
    top = ask_git(cwd, "rev-parse", "--show-toplevel")
    return os.path.realpath(cwd) if top is None else os.fsdecode(top.rstrip(b"\n"))


def find_code(cwd: str) -> CodeFolder:
    """Return the code folder of a working directory: its git work tree, or else itself.

    Raises:
        UsageError: It is larger than 512 MiB; the largest entries are named.
    """
    root = root_of(cwd)
    listed = ask_git(root, "ls-files", "-co", "--exclude-standard", "-z")
    if listed is not None:
        words = dict.fromkeys(os.fsdecode(word) for word in listed.split(b"\0") if word)
        names = list(_with_submodules(root, words))
    else:
        names = list(walk_code(root))
    names = list(_without_own(root, names))
    sizes = {name: size for name in names if (size := _size(root, name)) is not None}
    total = sum(sizes.values())
    if total > MAX_CODE_BYTES:
        raise _too_large(root, sizes, total)
    return CodeFolder(
        root=root, names=tuple(sorted(sizes)), size_bytes=total, by_git=listed is not None
    )


def _without_own(root: str, names: Iterable[str]) -> Iterator[str]:
    """Leave out a $MUSTER_HOME in the code folder: runs, secrets, and copies of earlier runs."""
    home = os.path.relpath(os.path.realpath(muster_home()), os.path.realpath(root))
    own = [home] if home != "." else ["runs", "cache", "credentials.toml"]
    for name in names:
        if not any(name == one or name.startswith(f"{one}/") for one in own):
            yield name


def ask_git(cwd: str, *words: str) -> bytes | None:
    """Return git's output; None if it fails or is not installed."""
    try:
        answer = proc.ask(["git", "-C", cwd, *words], b"", _GIT_LIMIT_S)
    except MusterError:  # there is no git here
        return None
    return answer.stdout if answer.status == 0 else None


def _with_submodules(root: str, words: Iterable[str]) -> Iterator[str]:
    for name in words:
        path = os.path.join(root, name)
        if os.path.isdir(path) and not os.path.islink(path):  # a submodule
            yield from (os.path.join(name, inner) for inner in walk_code(path))
        else:
            yield name


def walk_code(root: str) -> Iterator[str]:
    """Yield the relative paths of a folder's files, without caches, environments and .git."""
    for folder, names, files in os.walk(root):
        links = [name for name in names if os.path.islink(os.path.join(folder, name))]
        names[:] = sorted(
            name
            for name in names
            if name not in _LEFT_OUT
            and name not in links
            and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
        )
        for name in [*files, *links]:
            yield os.path.relpath(os.path.join(folder, name), root)


def _size(root: str, name: str) -> int | None:
    """Return the size of a file to copy, 0 for a link; None for special and missing files."""
    path = os.path.join(root, name)
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode) and not _stays_inside(root, path):
            status = os.stat(path)  # we copy its content instead of the link
    except OSError:
        return None
    if stat.S_ISLNK(status.st_mode):
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _stays_inside(root: str, link: str) -> bool:
    target = os.readlink(link)
    resolved = os.path.normpath(os.path.join(os.path.dirname(link), target))
    return not os.path.isabs(target) and resolved.startswith(root.rstrip("/") + "/")


def _too_large(root: str, sizes: dict[str, int], total: int) -> UsageError:
    below: dict[str, int] = {}
    for name, size in sizes.items():
        entry = name.partition("/")[0]
        below[entry] = below.get(entry, 0) + size
    largest = sorted(below.items(), key=lambda item: -item[1])[:_SHOWN]
    return UsageError(
        f"the code folder has {show_size(total)}; at most {show_size(MAX_CODE_BYTES)} are copied",
        where=root,
        why=", ".join(f"{name}: {show_size(size)}" for name, size in largest),
        fix="name the data in .gitignore, start in a smaller folder, or use a shared file system",
    )


def write_archive(
    root: str, names: Iterable[str], target: IO[bytes], *, has_times: bool = True
) -> None:
    """Write a tar.gz of files below a root, without owners; skip files that have vanished.

    Without times, equal names and contents give equal bytes; of the mode only what `read_archive`
    keeps is written.
    """
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=target, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        for name in names:
            path = os.path.join(root, name)
            follow = os.path.islink(path) and not _stays_inside(root, path)
            try:
                info = archive.gettarinfo(os.path.realpath(path) if follow else path, name)
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                if not has_times:
                    info.mtime = _NO_TIME
                    info.mode = 0o700 if info.mode & 0o100 else 0o600
                if info.islnk():  # a second name of a file: write it as a separate file
                    info.type = tarfile.REGTYPE
                    info.size = os.stat(path).st_size
                if not info.isreg():
                    archive.addfile(info)
                    continue
                with open(path, "rb") as file:
                    archive.addfile(info, file)
            except FileNotFoundError:
                continue


def read_archive(source: Any, root: str, limit_bytes: int) -> int:
    """Unpack a tar.gz from a stream; return the number of files.

    Raises:
        ValueError: It is damaged, holds a name or a link that leaves `root`, or more than
            `limit_bytes`.
    """
    count = total = 0
    try:
        with tarfile.open(fileobj=source, mode="r|gz") as archive:
            for member in archive:
                check_member(member)
                total += member.size
                if total > limit_bytes:
                    raise ValueError(f"more than {limit_bytes} bytes")
                _unpack(archive, member, root)
                count += 1
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"the archive is damaged: {error}") from error
    return count


def check_member(member: tarfile.TarInfo) -> None:
    """Refuse (ValueError) entries that are not files or links, and those outside the folder."""
    if member.name.startswith("/") or ".." in member.name.split("/"):
        raise ValueError(f"{member.name!r} leaves its folder")
    if member.issym():
        inside = os.path.normpath(os.path.join(os.path.dirname(member.name), member.linkname))
        if member.linkname.startswith("/") or inside.split("/")[0] == "..":
            raise ValueError(f"the link {member.name!r} leaves its folder")
    elif not member.isreg():
        raise ValueError(f"{member.name!r} is not a file")


def _unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, root: str) -> None:
    path = os.path.join(root, member.name)
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    inside = os.path.realpath(root)
    if os.path.commonpath([os.path.realpath(folder), inside]) != inside:
        raise ValueError(f"{member.name!r} leaves its folder through a link")
    if os.path.lexists(path):
        os.unlink(path)
    if member.issym():
        os.symlink(member.linkname, path)
        return
    content = archive.extractfile(member)
    if content is None:
        raise ValueError(f"{member.name!r} has no content")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        while piece := content.read(1 << 20):
            file.write(piece)
    os.chmod(path, 0o700 if member.mode & 0o100 else 0o600)
    os.utime(path, (member.mtime, member.mtime))


def script_of(program: Program) -> str | None:
    """Return the program's file, or its function's module; None if that is no file of the user."""
    if program.call is not None:
        return program.call.module_file
    if program.kind is ScriptKind.FILE:
        return os.path.normpath(os.path.join(program.cwd, program.target))
    if program.kind is ScriptKind.MODULE:
        stem = os.path.join(program.cwd, *program.target.split("."))
        for path in (f"{stem}.py", os.path.join(stem, "__main__.py")):
            if os.path.isfile(path):
                return path
    return None


def identity(path: str) -> dict[str, Any] | None:
    """Return an identity that is equal on two hosts for the same file; None if it can't be read."""
    try:
        with open_plain(path) as file:
            status = os.fstat(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
    return {
        "path": path,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "sha256": digest,
    }


def check_inside(program: Program, root: str) -> None:
    """Refuse a script outside the folder that is copied.

    Raises:
        UsageError: The script is in another folder.
    """
    script = script_of(program)
    inside = f"{os.path.realpath(root)}/"
    if script is not None and not os.path.realpath(script).startswith(inside):
        raise UsageError(
            "the script is not in the folder that is copied to the hosts",
            where=script,
            why=f"the hosts don't share this file system; {root} is copied",
            fix="start muster in the folder of the script",
        )


def moved(program: Program, old_root: str, new_root: str) -> Program:
    """Return the program for a host whose code folder has another path."""
    old = os.path.realpath(old_root)
    cwd = os.path.relpath(os.path.realpath(program.cwd), old)
    target = program.target
    if program.kind is ScriptKind.FILE and os.path.isabs(target):
        target = os.path.join(new_root, os.path.relpath(os.path.realpath(target), old))
    return replace(program, cwd=os.path.normpath(os.path.join(new_root, cwd)), target=target)


def stamps(root: str) -> dict[str, tuple[int, int]]:
    """Return (size, modification time in ns) of every file below a root."""
    found: dict[str, tuple[int, int]] = {}
    for name in walk_code(root):
        try:
            status = os.lstat(os.path.join(root, name))
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            found[name] = (status.st_size, status.st_mtime_ns)
    return found


def outputs(
    root: str, before: dict[str, tuple[int, int]], limit_bytes: int
) -> tuple[list[str], list[str]]:
    """Return the new and changed files to copy back, smallest first, and those without room."""
    changed = {name: at for name, at in stamps(root).items() if before.get(name) != at}
    come: list[str] = []
    stay: list[str] = []
    total = 0
    for name, (size, _) in sorted(changed.items(), key=lambda item: (item[1][0], item[0])):
        fits = total + size <= limit_bytes
        (come if fits else stay).append(name)
        total += size if fits else 0
    return come, stay


# The package itself. Hosts import this module, too, but only clients send: the imports are late.

_FIXED_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest in a zip; fixed for reproducible archives


@functools.cache
def travels() -> dict[str, str]:
    """Return folders and files of the package that nodes need, and why; the rest is not sent."""
    return plugs.table("travels")


def is_sent(name: str) -> bool:
    """Return whether nodes need a file: any `__init__.py` or `plug.py`, or one of the table."""
    is_shared = "/" not in name or name.endswith(("/__init__.py", "/plug.py"))
    return is_shared or any(name == one or name.startswith(f"{one}/") for one in travels())


def package_files(package: str) -> list[tuple[str, bytes]]:
    """Return (relative name, content) of a package's files that nodes need, sorted."""
    found: list[tuple[str, bytes]] = []
    for folder, names, files in os.walk(package):
        names[:] = [name for name in names if name != "__pycache__"]
        for name in files:
            path = os.path.join(folder, name)
            relative = os.path.relpath(path, package)
            if is_sent(relative) and not name.endswith((".pyc", ".pyo")):
                with open(path, "rb") as file:
                    found.append((relative, file.read()))
    return sorted(found)


def content_hash(files: Iterable[tuple[str, bytes]]) -> str:
    """Return a hash of names, lengths and contents, as `launcher/node/remote/loader.py` does."""
    whole = hashlib.sha256()
    for name, data in sorted(files):
        whole.update(f"{name}\0{len(data)}\0".encode())
        whole.update(data)
    return whole.hexdigest()


def make_archive(files: Iterable[tuple[str, bytes]]) -> bytes:
    """Return a zip of the files; the same files give the same bytes."""
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, data in files:
            info = zipfile.ZipInfo(name, _FIXED_DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)
    return buffer.getvalue()


def place_package(path: str) -> None:
    """Write this package's archive to `path`, as a hard link to the one in the cache or as a copy.

    Raises:
        OSError: The archive can't be written.
    """
    if os.path.exists(path):
        return
    cache = os.path.join(muster_home(), "cache")
    files = package_files(proc.PACKAGE_FOLDER)
    sha = content_hash(files)
    data = cached_archive(cache, files, sha)
    try:
        os.link(os.path.join(cache, f"torchmuster-{sha}.zip"), path)
    except OSError:
        atomic.replace_file(path, data)


def cached_archive(cache: str, files: list[tuple[str, bytes]], sha: str) -> bytes:
    """Return the archive of the package; make it once per content and keep it in `cache`."""
    path = os.path.join(cache, f"torchmuster-{sha}.zip")
    try:
        with open(path, "rb") as file:
            data = file.read()
        if _holds(data, sha):
            return data
    except OSError:
        pass
    data = make_archive(files)
    with contextlib.suppress(OSError):  # without a cache it is made again next time
        os.makedirs(cache, mode=0o700, exist_ok=True)
        atomic.replace_file(path, data)
    return data


def _holds(data: bytes, sha: str) -> bool:
    import zipfile

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return content_hash((n, archive.read(n)) for n in archive.namelist()) == sha
    except (zipfile.BadZipFile, OSError, ValueError):
        return False
