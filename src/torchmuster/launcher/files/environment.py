"""Pack a virtual environment into one parcel, named by its content, for nodes with another path.

Packing notes which files contain the environment's own path; `relocate` rewrites them after
unpacking. A base interpreter that the user installed (uv, pyenv) is packed too, and conda's lies in
the environment; one of the system must exist on the node.

A parcel is one stream of pieces with checksums; its name is the checksum of the list of its pieces.
So a node verifies each piece by itself before it parses it, unpacks while the next pieces arrive,
and names the piece at which a sender has to continue. In the stream an entry is a kind, the lengths
of name and content, the name, the content: what may not be sent (devices, owners, absolute links)
can't be expressed, and many small files take less than half the time of a tar. Pieces that zlib
makes smaller are compressed. In a file the list comes last.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import mmap
import os
import re
import struct
import sys
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.model import codec
from torchmuster.core.model.plan import EnvironmentNeeds
from torchmuster.core.model.text import show_size
from torchmuster.errors import UsageError
from torchmuster.launcher.files import code_copy

# Find and rewrite an environment's own path: in scripts and settings, and in the binaries of conda.
#
# conda builds packages for a prefix of 255 letters, and overwrites it with the real prefix at
# installation: in text files as it is, in binaries padded with NULs after the string. It records
# both kinds in `conda-meta`, with the long prefix, so we know how much room a string has.


_MAX_RECORD_BYTES = 256 << 20


def may_contain_prefix(name: str) -> bool:
    """Return whether a file, such as a script or a setting, may contain its environment's path."""
    if os.path.dirname(name) == "bin" or name == "pyvenv.cfg":
        return True
    return name.endswith(".pth") or os.path.basename(name).startswith("__editable__")


def conda_records(prefix: str) -> tuple[frozenset[str], dict[str, int]]:
    """Return a conda environment's texts with its prefix, and binary -> length of the old prefix.

    The old prefix is the long one for which the binary was built.
    """
    texts, binaries = set(), {}
    for path in glob.glob(glob.escape(prefix) + "/conda-meta/*.json"):
        try:
            with open(path, "rb") as file:
                record = json.loads(file.read(_MAX_RECORD_BYTES))
            entries = record["paths_data"]["paths"]
            for entry in entries:
                placeholder = entry.get("prefix_placeholder")
                if not placeholder:
                    continue
                if entry.get("file_mode") == "binary":
                    binaries[str(entry["_path"])] = len(os.fsencode(placeholder))
                else:
                    texts.add(str(entry["_path"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # a record that conda can't read either
    return frozenset(texts), binaries


def relocate(root: str, place: str, noted: Mapping[str, Any]) -> None:
    """Write an environment's final path into the files that were unpacked below `root`.

    Args:
        root: The folder where it is now.
        place: The path at which it will be.
        noted: The packer's notes: `links` that lead out of it, `texts`, `binaries`, and `moves`,
            the packed folders.

    Raises:
        ValueError: The notes are damaged, or a binary has no room for the path.
        OSError: A file can't be written.
    """
    # The longest first: an environment may lie in the folder of an editable install.
    moves = sorted(noted["moves"].items(), key=lambda move: -len(move[0]))
    new = {os.fsencode(old): os.fsencode(os.path.join(place, name)) for old, name in moves}
    # A longer name with the same beginning is another folder.
    pattern = re.compile(b"(" + b"|".join(map(re.escape, new)) + rb")(?![A-Za-z0-9_.-])")
    for name in noted["texts"]:
        path = _file(root, name)
        with open(path, "rb") as file:
            data = file.read()
        if b"\0" not in data:
            _write(path, data, pattern.sub(lambda found: new[found[1]], data))
    prefix = next((os.fsencode(old) for old, name in moves if name == "env"), b"")
    there = os.fsencode(os.path.join(place, "env"))
    for name, room in noted["binaries"].items():
        path = _file(root, name)
        with open(path, "rb") as file:
            data = file.read()
        _write(path, data, in_binary(data, prefix, there, int(room), name))
    for name, target in noted["links"].items():
        os.symlink(target, _file(root, name))


def _file(root: str, name: str) -> str:
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name!r} leaves its folder")
    path = os.path.join(root, name)
    inside = os.path.realpath(root)
    if os.path.commonpath([os.path.realpath(os.path.dirname(path)), inside]) != inside:
        raise ValueError(f"{name!r} leaves its folder through a link")
    return path


def _write(path: str, before: bytes, after: bytes) -> None:
    if after != before:
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "wb") as file:
            file.write(after)


def in_binary(data: bytes, old: bytes, new: bytes, room: int, name: str) -> bytes:
    """Return a binary with another prefix, of the same length: pad each string with NULs.

    Args:
        data: The binary.
        old: The prefix in the binary.
        new: The prefix to write.
        room: Length of the prefix for which the binary was built.
        name: The file's name, for errors.

    Raises:
        ValueError: The new prefix is longer than `room`, or the file lacks the padding that conda
            leaves.
    """
    if len(new) > room:
        raise ValueError(f"{os.fsdecode(new)} is {len(new)} bytes long, {name} has room for {room}")
    # Strings with several paths, such as RPATHs, are padded after the last one.
    string = re.compile(re.escape(old) + rb"[^\0]*\0+")

    def replaced(found: re.Match[bytes]) -> bytes:
        whole = found[0]
        text = whole.rstrip(b"\0")
        count = text.count(old)
        if len(whole) - len(text) < count * (room - len(old)) + 1:
            raise ValueError(f"{name} has another string than conda has written there")
        after = text.replace(old, new)
        return after.ljust(len(whole), b"\0")

    return string.sub(replaced, data)


_BEGUN = ".environment-"
_KEPT = 3  # archives in the client's cache
_FACTS_LIMIT_S = 30.0
_SAY_EVERY_S = 5.0
_MAX_TEXT_BYTES = 1 << 20
_MAPPED_BYTES = 1 << 20
_GLIBC = re.compile(rb"GLIBC_2\.(\d{1,3})\b")
_FOLDER_IN_FINDER = re.compile(r"""['"](/[^'"\n]+)['"]""")
_ASK = """
import json, os, sys
print(json.dumps({"prefix": sys.prefix, "base": sys.base_prefix, "python": list(sys.version_info[:2]),
    "executable": os.path.realpath(sys.executable), "machine": os.uname().machine}))
"""
# Files of a base interpreter that no program needs, and packages that its environments don't see.
_LEFT_OUT = re.compile(
    r"lib/python3\.\d+/(?:test|idlelib|lib2to3|ensurepip|site-packages|config-[^/]+)/|share/|lib/[^/]+\.a$"
)
_CONDA = "conda-meta"
# Folders of conda's base environment: its package cache, and the other environments.
_NOT_OF_CONDA = ("pkgs/", "envs/")


@dataclass(frozen=True, slots=True)
class PackedEnvironment:
    """The archive of an environment, and its needs."""

    needs: EnvironmentNeeds
    path: str


@dataclass(frozen=True, slots=True)
class _Part:
    """A folder that is packed: its path, its name in the archive, and its files."""

    folder: str
    name: str
    files: tuple[str, ...]


def find_prefix(path: str, environ: Mapping[str, str]) -> str:
    """Return the folder of an environment: `path`, else the active, else that of this interpreter.

    Raises:
        UsageError: There is no environment.
    """
    own = sys.prefix if sys.prefix != sys.base_prefix else ""
    active = environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX") or own
    folder = path or active
    where = f"--ship-env={path}" if path else "--ship-env"
    fix = "activate one, or name it: --ship-env=PATH"
    if not folder:
        raise UsageError("there is no virtual environment to send", where=where, fix=fix)
    folder = os.path.abspath(folder)
    if not is_conda(folder) and not os.path.exists(os.path.join(folder, "pyvenv.cfg")):
        why = f"there is no {folder}/pyvenv.cfg, and no {folder}/{_CONDA}"
        raise UsageError("this is no virtual environment", where=where, why=why, fix=fix)
    return folder


def is_conda(prefix: str) -> bool:
    """Return whether conda, mamba or pixi has made an environment."""
    return os.path.isdir(os.path.join(prefix, _CONDA))


def pack(prefix: str, cache: str, say: Callable[[str], object] = str) -> PackedEnvironment:
    """Return the archive of an environment; reuse one that was made from the same files.

    Args:
        prefix: The environment's folder.
        cache: The folder of archives.
        say: Shows sentences on the progress to the user.

    Raises:
        UsageError: The environment can't be packed.
        OSError: The environment can't be read, or the cache can't be written.
    """
    facts = _ask(prefix)
    for sentence in _unsent_packages(prefix, facts):
        say(sentence)
    parts = _parts(prefix, facts)
    mark, num_bytes = _mark(parts)
    kept = os.path.join(cache, f"environment-{mark}.json")
    known = atomic.read_json(kept)
    if isinstance(known, dict):
        with contextlib.suppress(codec.CodecError):
            needs = codec.from_plain(EnvironmentNeeds, known)
            path = archive_path(cache, needs.sha)
            if os.path.exists(path) and os.path.getsize(path) == needs.size_bytes:
                os.utime(path)
                return PackedEnvironment(needs, path)
    os.makedirs(cache, mode=0o700, exist_ok=True)
    _remove_abandoned(cache)
    fd, temporary = tempfile.mkstemp(prefix=_BEGUN, dir=cache)
    try:
        with open(fd, "wb", buffering=1 << 20) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            writer = _Writer(file, prefix, facts, _Progress(num_bytes, say))
            try:
                for part in parts:
                    writer.add(part)
                needs = writer.finish(parts)
            finally:
                writer.close()
            file.flush()
            path = archive_path(cache, needs.sha)
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    atomic.write_json(kept, asdict(needs))
    _forget_old(cache)
    return PackedEnvironment(needs, path)


def archive_path(cache: str, sha: str) -> str:
    """Return the path of an environment's archive."""
    return os.path.join(cache, f"environment-{sha}.parcel")


def _remove_abandoned(cache: str) -> None:
    """Remove the unlocked temporary files of packers that were killed."""
    for path in glob.glob(os.path.join(glob.escape(cache), f"{_BEGUN}*")):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)


def _forget_old(cache: str) -> None:
    """Remove all archives but the most recently used ones, and their notes."""
    for path in kept_archives(cache)[_KEPT:]:
        with contextlib.suppress(OSError):
            os.unlink(path)
    forget_notes(cache)


def kept_archives(cache: str) -> list[str]:
    """Return the paths of all archives, the most recently used first."""
    found = glob.glob(glob.escape(cache) + "/environment-*.parcel")
    return sorted(found, key=os.path.getmtime, reverse=True)


def forget_notes(cache: str) -> None:
    """Remove the notes of archives that no longer exist."""
    living = {os.path.basename(path) for path in kept_archives(cache)}
    for path in glob.glob(glob.escape(cache) + "/environment-*.json"):
        known = atomic.read_json(path)
        sha = known.get("sha") if isinstance(known, dict) else None
        if f"environment-{sha}.parcel" not in living:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _ask(prefix: str) -> dict[str, Any]:
    python = os.path.join(prefix, "bin", "python")
    answered = proc.ask_spared([python, "-I", "-c", _ASK], _FACTS_LIMIT_S)
    try:
        facts = json.loads(answered.stdout)
    except ValueError:
        words = answered.stderr.decode(errors="replace").strip().splitlines()[-3:]
        raise UsageError(
            "the interpreter of the environment does not run",
            where=python,
            why="\n".join(words) or None,
        ) from None
    if not isinstance(facts, dict):
        raise UsageError("the interpreter of the environment says nothing of itself", where=python)
    return facts


# Collect the folders and files to pack.


def _parts(prefix: str, facts: Mapping[str, Any]) -> list[_Part]:
    out = _NOT_OF_CONDA if is_conda(prefix) else ()
    own = tuple(name for name in _files(prefix, "") if not name.startswith(out))
    parts = [_Part(prefix, "env", own)]
    if _base_travels(facts):
        base = str(facts["base"])
        names = tuple(name for name in _files(base, "") if not _LEFT_OUT.match(name))
        parts.append(_Part(base, "base", names))
    for number, folder in enumerate(_editable_folders(prefix)):
        code = code_copy.find_code(folder)
        below = os.path.relpath(os.path.realpath(folder), os.path.realpath(code.root))
        begin = "" if below == "." else f"{below}/"
        names = tuple(n.removeprefix(begin) for n in code.names if n.startswith(begin))
        parts.append(_Part(folder, f"extra/{number}", names))
    return parts


def _base_travels(facts: Mapping[str, Any]) -> bool:
    """Return whether to pack the base interpreter: not the system's, nor conda's own."""
    if facts["base"] == facts["prefix"]:
        return False
    return not f"{facts['base']}/".startswith(("/usr/", "/bin/", "/opt/"))


def _unsent_packages(prefix: str, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence if the environment uses system packages, which are not sent."""
    with contextlib.suppress(OSError), open(os.path.join(prefix, "pyvenv.cfg")) as file:
        words = [line.replace(" ", "").strip().lower() for line in file]
        if "include-system-site-packages=true" in words:
            yield (
                f"the environment uses the packages of {facts['base']} (--system-site-packages): they are not sent, "
                "hosts have to have them"
            )


def _files(folder: str, below: str) -> Iterator[str]:
    """Yield the relative names of files and links, sorted; don't follow links to folders.

    Leave out compiled files: they come and go with each first import, and a node makes its own.
    """
    entries = sorted(os.scandir(os.path.join(folder, below)), key=lambda entry: entry.name)
    for entry in entries:
        name = os.path.join(below, entry.name)
        if entry.name == "__pycache__":
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files(folder, name)
        elif entry.is_symlink() or entry.is_file():
            yield name


def _editable_folders(prefix: str) -> list[str]:
    """Return the folders outside the environment to which editable installs refer."""
    site = glob.glob(glob.escape(prefix) + "/lib/python3*/site-packages")
    found: dict[str, None] = {}
    for folder in site:
        pattern = glob.escape(folder)
        for path in sorted(
            glob.glob(pattern + "/*.pth") + glob.glob(pattern + "/__editable__*.py")
        ):
            with open(path, errors="replace") as file:
                text = file.read(_MAX_TEXT_BYTES)
            words = _FOLDER_IN_FINDER.findall(text) if path.endswith(".py") else text.splitlines()
            for word in words:
                name = word.strip()
                outside = os.path.isabs(name) and not name.startswith(prefix + os.sep)
                if outside and os.path.isdir(name):
                    found[os.path.normpath(name)] = None
    return [
        name
        for name in found
        if not any(name.startswith(other + os.sep) for other in found if other != name)
    ]


def _mark(parts: Sequence[_Part]) -> tuple[str, int]:
    """Return a hash of the files' names and stats, and the total bytes; reading takes seconds."""
    whole, num_bytes = hashlib.sha256(b"2"), 0
    for part in parts:
        whole.update(f"{part.folder}\0{part.name}\0".encode(errors="surrogateescape"))
        for name in part.files:
            status = os.lstat(os.path.join(part.folder, name))
            num_bytes += status.st_size
            fields = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_mode}\0"
            whole.update(fields.encode(errors="surrogateescape"))
    return whole.hexdigest()[:32], num_bytes


class _Progress:
    """Reports at the beginning, and then every few seconds, how much is packed."""

    def __init__(self, num_bytes: int, say: Callable[[str], object]) -> None:
        self._whole, self._say = show_size(num_bytes), say
        self._said_at = time.monotonic()
        say(f"packing the environment: {self._whole}")

    def note(self, num_bytes: int) -> None:
        """Report how much is packed, if the last report is some seconds old."""
        if time.monotonic() - self._said_at >= _SAY_EVERY_S:
            self._said_at = time.monotonic()
            self._say(f"packing the environment: {show_size(num_bytes)} of {self._whole}")


class _Writer:
    """Writes a parcel, and notes what must be rewritten where it is unpacked."""

    def __init__(
        self, file: BinaryIO, prefix: str, facts: Mapping[str, Any], progress: _Progress
    ) -> None:
        self._prefix, self._facts, self._progress = prefix, facts, progress
        self._out = ParcelWriter(file)
        self._links: dict[str, str] = {}
        self._texts: list[str] = []
        self._conda_texts, self._conda_binaries = conda_records(prefix)
        self._binaries: dict[str, int] = {}
        self._glibc = 0

    def add(self, part: _Part) -> None:
        """Write the files of a folder."""
        for name in part.files:
            path, inside = os.path.join(part.folder, name), f"{part.name}/{name}"
            if os.path.islink(path) and self._handle_link(part, path, inside):
                continue
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                kind = PROGRAM if status.st_mode & 0o100 else FILE
                if status.st_size > _MAPPED_BYTES:
                    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                        self._note(part, name, inside, data)
                        self._out.add(kind, inside, data)
                else:
                    content = file.read()
                    self._note(part, name, inside, content)
                    self._out.add(kind, inside, content)
            self._progress.note(self._out.unpacked_bytes)

    def _handle_link(self, part: _Part, path: str, inside: str) -> bool:
        """Write or note a link and return True; return False if its file must be packed instead."""
        target = os.path.realpath(path)
        base = str(self._facts["base"])
        if target.startswith(os.path.realpath(part.folder) + os.sep):
            below = os.path.relpath(target, os.path.realpath(part.folder))
            link = os.path.relpath(os.path.join(part.name, below), os.path.dirname(inside))
        elif _base_travels(self._facts) and target.startswith(os.path.realpath(base) + os.sep):
            below = os.path.relpath(target, os.path.realpath(base))
            link = os.path.relpath(os.path.join("base", below), os.path.dirname(inside))
        elif inside.startswith("env/bin/python"):
            self._links[inside] = target
            return True
        elif os.path.isdir(target):
            raise UsageError(
                "a link to a folder leads out of the environment",
                where=path,
                why=f"it leads to {target}",
                fix="remove the link, or put the folder into the environment",
            )
        else:
            return not os.path.exists(target)  # leave out a broken link
        self._out.add(LINK, inside, os.fsencode(link))
        return True

    def _note(self, part: _Part, name: str, inside: str, data: bytes | mmap.mmap) -> None:
        if data[:4] == b"\x7fELF":
            found = [int(number) for number in set(_GLIBC.findall(data))]
            self._glibc = max([self._glibc, *found])
        is_text = len(data) <= _MAX_TEXT_BYTES and may_contain_prefix(name)
        if part.name != "env":
            return
        if name in self._conda_texts or (is_text and data[:4] != b"\x7fELF"):
            self._texts.append(inside)
        if name in self._conda_binaries:
            self._binaries[inside] = self._conda_binaries[name]

    def finish(self, parts: Sequence[_Part]) -> EnvironmentNeeds:
        """Write the end; return the environment's needs."""
        noted = {
            "links": self._links,
            "texts": self._texts,
            "binaries": self._binaries,
            "moves": {part.folder: part.name for part in parts},
        }
        sha, facts = self._out.finish(noted), self._facts
        site = glob.glob(glob.escape(self._prefix) + "/lib/python3*/site-packages/torch")
        is_there = not _base_travels(facts) and facts["base"] != facts["prefix"]
        return EnvironmentNeeds(
            sha=sha,
            machine=str(facts["machine"]),
            glibc=self._glibc,
            python=".".join(map(str, facts["python"])),
            base=str(facts["executable"]) if is_there else "",
            size_bytes=self._out.size_bytes,
            num_pieces=self._out.num_pieces,
            unpacked_bytes=self._out.unpacked_bytes,
            num_files=self._out.num_files,
            has_torch=bool(site),
        )

    def close(self) -> None:
        """End the writer's threads."""
        self._out.close()


PIECE_BYTES = 1 << 20
MAX_PIECES = 100_000
LISTED = struct.Struct(">32sI")
_ENTRY = struct.Struct(">cHQ")
FILE, PROGRAM, LINK, NOTES = b"f", b"x", b"l", b"n"
_IS_COMPRESSED = 1 << 31
_SAMPLE_BYTES = 64 << 10
_PAYS = 0.9
_MOST_FOLDERS = 200  # nested; the code that removes them is recursive
_MAX_NAME_BYTES = 4096
_MAX_NOTES_BYTES = 64 << 20
_AHEAD = 8


class ParcelError(ValueError):
    """The received or stored data does not match the name of the parcel."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece in the list; `length` is that of its bytes as sent, perhaps compressed."""

    digest: bytes
    length: int
    is_compressed: bool

    def check(self, data: bytes | memoryview) -> bool:
        """Return whether the data is this piece's."""
        return len(data) == self.length and hashlib.sha256(data).digest() == self.digest

    def content(self, data: bytes) -> bytes:
        """Return the piece's part of the stream, decompressed, from checked data.

        Raises:
            ParcelError: It can't be decompressed, or is larger than a piece may be.
        """
        if not self.is_compressed:
            return data
        opening = zlib.decompressobj()
        try:
            content = opening.decompress(data, PIECE_BYTES)
        except zlib.error as error:
            raise ParcelError(f"a piece can't be decompressed: {error}") from None
        if opening.unconsumed_tail or not opening.eof:
            raise ParcelError("a piece is larger than pieces are")
        return content


def read_list(data: bytes, sha: str) -> tuple[Piece, ...]:
    """Return the pieces of a list.

    Raises:
        ParcelError: It is not the list of this parcel.
    """
    if hashlib.sha256(data).hexdigest() != sha or len(data) % LISTED.size:
        raise ParcelError("the list of the environment's pieces came damaged")
    pieces = []
    for digest, word in LISTED.iter_unpack(data):
        length = word & ~_IS_COMPRESSED
        if not 0 < length <= PIECE_BYTES:
            raise ParcelError("a piece is larger than pieces are")
        pieces.append(Piece(digest, length, bool(word & _IS_COMPRESSED)))
    return tuple(pieces)


class ParcelWriter:
    """Writes a parcel to a file; threads compress and hash pieces: both release the GIL."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._pool = ThreadPoolExecutor(min(os.cpu_count() or 1, 4), "parcel")
        self._sealing: deque[Future[tuple[bytes, bytes]]] = deque()
        self._open = bytearray()
        self._list: list[bytes] = []
        self.size_bytes = self.unpacked_bytes = self.num_files = 0

    def add(self, kind: bytes, name: str, content: Any) -> None:
        """Write an entry; the content is bytes or an mmap."""
        raw, size = os.fsencode(name), len(content)
        if len(raw) > _MAX_NAME_BYTES:
            raise ParcelError(f"{name[:80]!r}... is too long a name")
        self._open += _ENTRY.pack(kind, len(raw), size) + raw
        self.unpacked_bytes += size
        self.num_files += 1
        at = 0
        while at < size:
            part = content[at : at + max(1, PIECE_BYTES - len(self._open))]
            self._open += part
            at += len(part)
            self._seal()
        self._seal()

    def _seal(self, *, all_of_it: bool = False) -> None:
        while len(self._open) >= PIECE_BYTES or (all_of_it and self._open):
            self._sealing.append(self._pool.submit(_sealed, bytes(self._open[:PIECE_BYTES])))
            del self._open[:PIECE_BYTES]
        while len(self._sealing) > (0 if all_of_it else _AHEAD):
            listed, data = self._sealing.popleft().result()
            self._list.append(listed)
            self._file.write(data)
            self.size_bytes += len(data)

    def finish(self, notes: dict[str, Any]) -> str:
        """Write the end, with the notes for the unpacker; return the parcel's name.

        Raises:
            ParcelError: The environment is too large.
        """
        self.add(NOTES, "", json.dumps(notes).encode())
        self._seal(all_of_it=True)
        if len(self._list) > MAX_PIECES:
            raise ParcelError(f"the environment is larger than {MAX_PIECES * PIECE_BYTES} bytes")
        whole = b"".join(self._list)
        self._file.write(whole)
        self.size_bytes += len(whole)
        return hashlib.sha256(whole).hexdigest()

    @property
    def num_pieces(self) -> int:
        """Return the number of pieces of a finished parcel."""
        return len(self._list)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _sealed(data: bytes) -> tuple[bytes, bytes]:
    """Return a piece's list entry and its bytes to send; try zlib on a sample first."""
    flag, sample = 0, data[:_SAMPLE_BYTES]
    if len(zlib.compress(sample, 1)) < _PAYS * len(sample):
        smaller = zlib.compress(data, 1)
        if len(smaller) < _PAYS * len(data):
            flag, data = _IS_COMPRESSED, smaller
    return LISTED.pack(hashlib.sha256(data).digest(), len(data) | flag), data


class ParcelFile:
    """A parcel in a file.

    Raises:
        ParcelError: The file is damaged.
        OSError: The file can't be read.
    """

    def __init__(self, path: str, sha: str, num_pieces: int) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            length = num_pieces * LISTED.size
            end = os.fstat(self._fd).st_size - length
            self.list_bytes = os.pread(self._fd, length, max(0, end))
            self.pieces = read_list(self.list_bytes, sha)
        except BaseException:
            os.close(self._fd)
            raise
        self._offsets = [0]
        for piece in self.pieces:
            self._offsets.append(self._offsets[-1] + piece.length)

    def piece(self, index: int) -> bytes:
        """Return the bytes of a piece as sent.

        Raises:
            ParcelError: The file was changed or damaged.
        """
        piece = self.pieces[index]
        data = os.pread(self._fd, piece.length, self._offsets[index])
        if not piece.check(data):
            raise ParcelError("the kept archive of the environment is damaged")
        return data

    def offset(self, index: int) -> int:
        """Return the number of bytes before a piece."""
        return self._offsets[index]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class Unpacker:
    """Unpacks a stream, part by part, into an empty folder.

    Links are made after all files, so no file is written through a link.

    Args:
        root: An empty folder that nobody else writes to.
        max_bytes: Limit on the size of all contents; `max_files` limits the entries.
    """

    def __init__(self, root: str, max_bytes: int, max_files: int) -> None:
        self._root = root
        self._left_bytes, self._left_files = max_bytes, max_files
        self._head = bytearray()
        self._folders = {""}
        self._links: dict[str, str] = {}
        self._kind, self._name, self._left = b"", "", 0
        self._fd: int | None = None
        self._text = bytearray()
        self.notes: dict[str, Any] | None = None

    def feed(self, data: bytes) -> None:
        """Unpack the next part of the stream.

        Raises:
            ParcelError: An entry leaves the folder, has an unknown kind, or exceeds the limits.
            OSError: A file can't be written.
        """
        rest = memoryview(data)
        while rest:
            if self._left:
                part, rest = rest[: self._left], rest[self._left :]
                self._write(part)
                self._left -= len(part)
            else:
                rest = self._begin(rest)
            if not self._left and self._kind:
                self._end()

    def _begin(self, rest: memoryview) -> memoryview:
        """Read the header of an entry, or as much of it as has arrived; return the rest."""
        for size in (_ENTRY.size, 0):
            wanted = size or _ENTRY.size + _ENTRY.unpack_from(self._head)[1]
            lacks = max(0, wanted - len(self._head))
            self._head += rest[:lacks]
            rest = rest[lacks:]
            if len(self._head) < wanted:
                return rest
        kind, name_bytes, size = _ENTRY.unpack_from(self._head)
        name = os.fsdecode(bytes(self._head[_ENTRY.size :]))
        self._head.clear()
        self._left_bytes -= size
        self._left_files -= 1
        if self.notes is not None or self._left_bytes < 0 or self._left_files < 0:
            raise ParcelError("it holds more than was announced")
        small = _MAX_NAME_BYTES if kind == LINK else _MAX_NOTES_BYTES
        if name_bytes > _MAX_NAME_BYTES or (kind in (LINK, NOTES) and size > small):
            raise ParcelError(f"{name[:80]!r} is too long")
        if kind != NOTES:
            self._make_folder(os.path.dirname(_checked(name)))
        if kind in (FILE, PROGRAM):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            mode = 0o700 if kind == PROGRAM else 0o600
            self._fd = os.open(f"{self._root}/{name}", flags, mode)
        elif kind not in (LINK, NOTES):
            raise ParcelError(f"{name[:80]!r} is not a file")
        self._kind, self._name, self._left = kind, name, size
        return rest

    def _make_folder(self, name: str) -> None:
        if name in self._folders:
            return
        self._make_folder(os.path.dirname(name))
        try:
            os.mkdir(f"{self._root}/{name}", 0o700)
        except FileExistsError:
            raise ParcelError(f"{name[:80]!r} is a file and a folder") from None
        self._folders.add(name)

    def _write(self, part: memoryview) -> None:
        if self._fd is None:
            self._text += part
            return
        while part:
            part = part[os.write(self._fd, part) :]

    def _end(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        elif self._kind == LINK:
            self._links[self._name] = _inside(self._name, os.fsdecode(bytes(self._text)))
        else:
            try:
                notes = json.loads(self._text)
            except (ValueError, RecursionError):
                notes = None
            if not isinstance(notes, dict):
                raise ParcelError("what is noted of the environment is damaged")
            self.notes = notes
        self._kind = b""
        self._text.clear()

    def finish(self) -> dict[str, Any]:
        """Make the links; return the notes.

        Raises:
            ParcelError: The stream is incomplete.
        """
        if self.notes is None or self._head:
            raise ParcelError("the environment came in part only")
        for name, target in self._links.items():
            os.symlink(target, f"{self._root}/{name}")
        return self.notes

    def close(self) -> None:
        """Close the file that is being written."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


def _checked(name: str) -> str:
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ParcelError(f"{name[:80]!r} leaves its folder")
    if len(parts) > _MOST_FOLDERS:
        raise ParcelError(f"{name[:80]!r} lies in too many folders")
    return name


def _inside(name: str, target: str) -> str:
    """Return a checked link target.

    `..` may only begin it: after another link's name it would lead elsewhere.
    """
    parts: Sequence[str] = target.split("/")
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    is_plain = all(part not in ("", ".", "..") for part in parts[ups:])
    if "\0" in target or not is_plain or ups > name.count("/"):
        raise ParcelError(f"the link {name[:80]!r} leaves its folder")
    return target
