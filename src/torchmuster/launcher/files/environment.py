"""A virtual environment as one parcel, named by its content: packed once here, unpacked on nodes at another path.

What names its own place is noted while packing and written anew while unpacking (`launcher/files/environment.py`). A base interpreter of the
user's own (uv, pyenv) travels too, as that of a conda environment, which lies in it; one of the system has to be there.
"""

import contextlib
import fcntl
import glob
import hashlib
import json
import mmap
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.model import codec
from torchmuster.core.model.plan import EnvironmentNeeds
from torchmuster.core.model.text import show_size
from torchmuster.errors import UsageError
from torchmuster.launcher.files import code_copy, parcel

# Where an environment names its own place, and writing the new one there: scripts and settings of any, binaries of conda's.
#
# conda builds packages for a prefix of 255 letters, and writes the real one over it when it installs: into text as it is, into binaries with as many
# NULs behind the string as it is shorter. It notes both kinds in `conda-meta`, with the long prefix, so how much room a string has is known.


_MAX_RECORD_BYTES = 256 << 20


def may_name_places(name: str) -> bool:
    """Say whether a file of an environment may hold the path of its folder, as scripts and settings do."""
    if os.path.dirname(name) == "bin" or name == "pyvenv.cfg":
        return True
    return name.endswith(".pth") or os.path.basename(name).startswith("__editable__")


def conda_records(prefix: str) -> tuple[frozenset[str], dict[str, int]]:
    """Return the text files of a conda environment that hold its prefix, and its binaries with the length of the string that was made for it."""
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
    """Write the place where it will be into what was unpacked below `root`.

    Args:
        root: Where it is now.
        place: Where it will be.
        noted: By whoever packed it: `links` out of it, `texts`, `binaries`, and `moves`, the folders that it was made of.

    Raises:
        ValueError: What is noted is damaged, or a binary has no room for the place.
        OSError: A file can't be written.
    """
    # The longest first: an environment may lie in the folder of an editable install.
    moves = sorted(noted["moves"].items(), key=lambda move: -len(move[0]))
    new = {os.fsencode(old): os.fsencode(os.path.join(place, name)) for old, name in moves}
    # A longer name that begins so is another folder.
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
    """Return a binary with another prefix, of the same length: each string goes on to be ended by NULs.

    Args:
        data: The binary.
        old: The prefix that it holds.
        new: The one that it shall hold.
        room: How long the prefix was that it was built for.
        name: Of the file, for errors.

    Raises:
        ValueError: The new prefix is longer than that, or the file has not the room that conda leaves.
    """
    if len(new) > room:
        raise ValueError(f"{os.fsdecode(new)} is {len(new)} bytes long, {name} has room for {room}")
    # Strings with several places in them, such as RPATHs, end behind the last one.
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
_KEPT = 3  # archives, in the cache of the client
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
# Of a base interpreter: what no program needs, and what its environments do not see.
_LEFT_OUT = re.compile(
    r"lib/python3\.\d+/(?:test|idlelib|lib2to3|ensurepip|site-packages|config-[^/]+)/|share/|lib/[^/]+\.a$"
)
_CONDA = "conda-meta"
# Of conda's own environment: its cache of packages, and the other environments.
_NOT_OF_CONDA = ("pkgs/", "envs/")


@dataclass(frozen=True, slots=True)
class PackedEnvironment:
    """An archive, and what it needs."""

    needs: EnvironmentNeeds
    path: str


@dataclass(frozen=True, slots=True)
class _Part:
    """A folder that travels: where it is, and what it is called in the archive."""

    folder: str
    name: str
    files: tuple[str, ...]


def find_prefix(path: str, environ: Mapping[str, str]) -> str:
    """Return the folder of an environment: as named, the active one, or that of this interpreter.

    Raises:
        UsageError: There is none.
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
    """Say whether conda, mamba or pixi has made an environment."""
    return os.path.isdir(os.path.join(prefix, _CONDA))


def pack(prefix: str, cache: str, say: Callable[[str], object] = str) -> PackedEnvironment:
    """Return the archive of an environment; one that was made of the same files before is used again.

    Args:
        prefix: Its folder.
        cache: Where archives are kept.
        say: Hears what is done, and how far it is.

    Raises:
        UsageError: It can't be packed.
        OSError: It can't be read, or the cache can't be written.
    """
    facts = _ask(prefix)
    for sentence in _stays_here(prefix, facts):
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
    _forget_begun(cache)
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
    """Return where the archive of an environment is kept."""
    return os.path.join(cache, f"environment-{sha}.parcel")


def _forget_begun(cache: str) -> None:
    """Remove what packers that were killed have left: nobody holds it."""
    for path in glob.glob(os.path.join(glob.escape(cache), f"{_BEGUN}*")):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)


def _forget_old(cache: str) -> None:
    """Remove the archives that were not used for longest, and what is noted of them."""
    for path in kept_archives(cache)[_KEPT:]:
        with contextlib.suppress(OSError):
            os.unlink(path)
    forget_notes(cache)


def kept_archives(cache: str) -> list[str]:
    """Return the paths of all archives, the one that was used last first."""
    found = glob.glob(glob.escape(cache) + "/environment-*.parcel")
    return sorted(found, key=os.path.getmtime, reverse=True)


def forget_notes(cache: str) -> None:
    """Remove what is noted of archives that are gone."""
    living = {os.path.basename(path) for path in kept_archives(cache)}
    for path in glob.glob(glob.escape(cache) + "/environment-*.json"):
        known = atomic.read_json(path)
        sha = known.get("sha") if isinstance(known, dict) else None
        if f"environment-{sha}.parcel" not in living:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _ask(prefix: str) -> dict[str, Any]:
    python = os.path.join(prefix, "bin", "python")
    answered = proc.ask_beside([python, "-I", "-c", _ASK], _FACTS_LIMIT_S)
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


# What travels.


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
    """Say whether the base interpreter is the user's own; the system's is a part of the node, that of conda is in the environment."""
    if facts["base"] == facts["prefix"]:
        return False
    return not f"{facts['base']}/".startswith(("/usr/", "/bin/", "/opt/"))


def _stays_here(prefix: str, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for what the environment uses here and will not have there."""
    with contextlib.suppress(OSError), open(os.path.join(prefix, "pyvenv.cfg")) as file:
        words = [line.replace(" ", "").strip().lower() for line in file]
        if "include-system-site-packages=true" in words:
            yield (
                f"the environment uses the packages of {facts['base']} (--system-site-packages): they are not sent, "
                "hosts have to have them"
            )


def _files(folder: str, below: str) -> Iterator[str]:
    """Yield the relative names of files and links, sorted; links to folders are not followed.

    Compiled files are left out: they come and go with each first import, and a node makes its own.
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
    """Return the folders outside that editable installs name."""
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
    """Return what changes when a file does, and the bytes of all: reading them would take seconds."""
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
    """Says at the beginning, and then every few seconds, how much is packed."""

    def __init__(self, num_bytes: int, say: Callable[[str], object]) -> None:
        self._whole, self._say = show_size(num_bytes), say
        self._said_at = time.monotonic()
        say(f"packing the environment: {self._whole}")

    def note(self, num_bytes: int) -> None:
        """Note how much is packed."""
        if time.monotonic() - self._said_at >= _SAY_EVERY_S:
            self._said_at = time.monotonic()
            self._say(f"packing the environment: {show_size(num_bytes)} of {self._whole}")


class _Writer:
    """Writes a parcel, and notes what has to be changed where it is unpacked."""

    def __init__(
        self, file: BinaryIO, prefix: str, facts: Mapping[str, Any], progress: _Progress
    ) -> None:
        self._prefix, self._facts, self._progress = prefix, facts, progress
        self._out = parcel.ParcelWriter(file)
        self._links: dict[str, str] = {}
        self._texts: list[str] = []
        self._conda_texts, self._conda_binaries = conda_records(prefix)
        self._binaries: dict[str, int] = {}
        self._glibc = 0

    def add(self, part: _Part) -> None:
        """Write a folder."""
        for name in part.files:
            path, inside = os.path.join(part.folder, name), f"{part.name}/{name}"
            if os.path.islink(path) and self._is_link(part, path, inside):
                continue
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                kind = parcel.PROGRAM if status.st_mode & 0o100 else parcel.FILE
                if status.st_size > _MAPPED_BYTES:
                    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                        self._note(part, name, inside, data)
                        self._out.add(kind, inside, data)
                else:
                    content = file.read()
                    self._note(part, name, inside, content)
                    self._out.add(kind, inside, content)
            self._progress.note(self._out.unpacked_bytes)

    def _is_link(self, part: _Part, path: str, inside: str) -> bool:
        """Write a link that stays in the archive; of what leads elsewhere, the file itself goes."""
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
            return not os.path.exists(target)  # one that leads nowhere stays here
        self._out.add(parcel.LINK, inside, os.fsencode(link))
        return True

    def _note(self, part: _Part, name: str, inside: str, data: bytes | mmap.mmap) -> None:
        if data[:4] == b"\x7fELF":
            found = [int(number) for number in set(_GLIBC.findall(data))]
            self._glibc = max([self._glibc, *found])
        is_text = len(data) <= _MAX_TEXT_BYTES and may_name_places(name)
        if part.name != "env":
            return
        if name in self._conda_texts or (is_text and data[:4] != b"\x7fELF"):
            self._texts.append(inside)
        if name in self._conda_binaries:
            self._binaries[inside] = self._conda_binaries[name]

    def finish(self, parts: Sequence[_Part]) -> EnvironmentNeeds:
        """Write the end; return what the environment needs."""
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
        """End its threads."""
        self._out.close()
