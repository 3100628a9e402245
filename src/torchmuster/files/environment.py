"""A virtual environment as one archive, named by its content: packed once here, unpacked on nodes at another path.

What names its own place is noted while packing and written anew while unpacking: scripts, `pyvenv.cfg`, `.pth` files and the finders
of editable installs. A base interpreter of the user's own (uv, pyenv) travels too; one of the system has to be there.
"""

import contextlib
import glob
import gzip
import hashlib
import io
import json
import os
import re
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from torchmuster import proc
from torchmuster.errors import UsageError
from torchmuster.files import atomic, code_copy
from torchmuster.model import codec
from torchmuster.model.display.text import show_size
from torchmuster.model.installed import EnvironmentNeeds

RELOCATION_FILE = "relocation.json"
_KEPT = 3  # archives, in the cache of the client
_FACTS_LIMIT_S = 30.0
_SAY_EVERY_S = 5.0
_MAX_TEXT_BYTES = 1 << 20
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
    """Return the folder of a virtual environment: as named, the active one, or that of this interpreter.

    Raises:
        UsageError: There is none.
    """
    own = sys.prefix if sys.prefix != sys.base_prefix else ""
    folder = path or environ.get("VIRTUAL_ENV", "") or own
    where = f"--ship-env={path}" if path else "--ship-env"
    fix = "activate one, or name it: --ship-env=PATH"
    if not folder:
        why = environ.get("CONDA_PREFIX")
        raise UsageError(
            "there is no virtual environment to send",
            where=where,
            why=f"{why} is one of conda, which is not sent" if why else None,
            fix=fix,
        )
    folder = os.path.abspath(folder)
    if not os.path.exists(os.path.join(folder, "pyvenv.cfg")):
        is_conda = os.path.isdir(os.path.join(folder, "conda-meta"))
        why = "conda's are not sent" if is_conda else f"there is no {folder}/pyvenv.cfg"
        raise UsageError("this is no virtual environment", where=where, why=why, fix=fix)
    return folder


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
    parts = _parts(prefix, facts)
    mark, num_bytes = _mark(parts)
    kept = os.path.join(cache, f"environment-{mark}.json")
    known = atomic.read_json(kept)
    if isinstance(known, dict):
        with contextlib.suppress(codec.CodecError):
            needs = codec.from_plain(EnvironmentNeeds, known)
            path = _archive_path(cache, needs.sha)
            if os.path.exists(path) and os.path.getsize(path) == needs.size_bytes:
                os.utime(path)
                return PackedEnvironment(needs, path)
    os.makedirs(cache, mode=0o700, exist_ok=True)
    temporary = os.path.join(cache, f".environment-{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            writer = _Writer(file, prefix, facts, _Progress(num_bytes, say))
            for part in parts:
                writer.add(part)
            needs = writer.finish(parts)
        path = _archive_path(cache, needs.sha)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    atomic.write_json(kept, asdict(needs))
    _forget_old(cache)
    return PackedEnvironment(needs, path)


def _archive_path(cache: str, sha: str) -> str:
    return os.path.join(cache, f"environment-{sha}.tar.gz")


def _forget_old(cache: str) -> None:
    """Remove the archives that were not used for longest, and what is noted of them."""
    found = sorted(
        glob.glob(glob.escape(cache) + "/environment-*.tar.gz"), key=os.path.getmtime, reverse=True
    )
    for path in found[_KEPT:]:
        with contextlib.suppress(OSError):
            os.unlink(path)
    living = {os.path.basename(path) for path in found[:_KEPT]}
    for path in glob.glob(glob.escape(cache) + "/environment-*.json"):
        known = atomic.read_json(path)
        sha = known.get("sha") if isinstance(known, dict) else None
        if f"environment-{sha}.tar.gz" not in living:
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
    parts = [_Part(prefix, "env", tuple(_files(prefix, "")))]
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
    """Say whether the base interpreter is the user's own; the system's is a part of the node."""
    return not f"{facts['base']}/".startswith(("/usr/", "/bin/", "/opt/"))


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
    whole, num_bytes = hashlib.sha256(b"1"), 0
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


class _Counted(io.RawIOBase):
    """A file that hashes what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash, self.size = hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.hash.update(data)
        self.size += len(data)
        return self._file.write(data)


class _Writer:
    """Writes an archive, and notes what has to be changed where it is unpacked."""

    def __init__(
        self, file: BinaryIO, prefix: str, facts: Mapping[str, Any], progress: _Progress
    ) -> None:
        self._prefix, self._facts, self._progress = prefix, facts, progress
        self._out = _Counted(file)
        self._zip = gzip.GzipFile(
            filename="", mode="wb", compresslevel=1, fileobj=self._out, mtime=0
        )
        self._tar = tarfile.open(fileobj=self._zip, mode="w|")  # noqa: SIM115 - closed in finish
        self._links: dict[str, str] = {}
        self._texts: list[str] = []
        self._glibc = self._unpacked = 0

    def add(self, part: _Part) -> None:
        """Write a folder."""
        for name in part.files:
            path, inside = os.path.join(part.folder, name), f"{part.name}/{name}"
            if os.path.islink(path) and self._is_link(part, path, inside):
                continue
            with open(path, "rb") as file:
                data = file.read()
            self._note(part, name, inside, data)
            info = self._tar.gettarinfo(os.path.realpath(path), inside)
            self._add(info, data)

    def _add(self, info: tarfile.TarInfo, data: bytes) -> None:
        info.type, info.size = tarfile.REGTYPE, len(data)
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mtime = int(info.mtime)
        self._unpacked += len(data)
        self._progress.note(self._unpacked)
        self._tar.addfile(info, io.BytesIO(data))

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
        info = tarfile.TarInfo(inside)
        info.type, info.linkname = tarfile.SYMTYPE, link
        self._tar.addfile(info)
        return True

    def _note(self, part: _Part, name: str, inside: str, data: bytes) -> None:
        if data[:4] == b"\x7fELF":
            found = [int(number) for number in set(_GLIBC.findall(data))]
            self._glibc = max([self._glibc, *found])
        elif part.name == "env" and len(data) <= _MAX_TEXT_BYTES and _may_name_places(name):
            self._texts.append(inside)

    def finish(self, parts: Sequence[_Part]) -> EnvironmentNeeds:
        """Write the end; return what the environment needs."""
        moves = {part.folder: part.name for part in parts}
        noted = {"links": self._links, "texts": self._texts, "moves": moves}
        self._add(tarfile.TarInfo(RELOCATION_FILE), json.dumps(noted).encode())
        self._tar.close()
        self._zip.close()
        facts = self._facts
        site = glob.glob(glob.escape(self._prefix) + "/lib/python3*/site-packages/torch")
        return EnvironmentNeeds(
            sha=self._out.hash.hexdigest(),
            machine=str(facts["machine"]),
            glibc=self._glibc,
            python=".".join(map(str, facts["python"])),
            base="" if _base_travels(facts) else str(facts["executable"]),
            size_bytes=self._out.size,
            unpacked_bytes=self._unpacked,
            has_torch=bool(site),
        )


def _may_name_places(name: str) -> bool:
    """Say whether a file of an environment may hold the path of its folder, as scripts and settings do."""
    if os.path.dirname(name) == "bin" or name == "pyvenv.cfg":
        return True
    return name.endswith(".pth") or os.path.basename(name).startswith("__editable__")


def relocate(root: str, place: str) -> None:
    """Write the place where it will be into what was unpacked below `root`.

    Raises:
        ValueError: What is noted of it is damaged.
        OSError: A file can't be written.
    """
    with open(os.path.join(root, RELOCATION_FILE), "rb") as file:
        noted = json.loads(file.read())
    for name, target in noted["links"].items():
        if ".." in name.split("/") or name.startswith("/"):
            raise ValueError(f"{name!r} leaves its folder")
        os.symlink(target, os.path.join(root, name))
    # The longest first: an environment may lie in the folder of an editable install.
    moves = sorted(noted["moves"].items(), key=lambda move: -len(move[0]))
    new = {old.encode(): os.path.join(place, name).encode() for old, name in moves}
    pattern = re.compile(b"|".join(map(re.escape, new)))
    for name in noted["texts"]:
        path = os.path.join(root, name)
        with open(path, "rb") as file:
            before = file.read()
        if b"\0" in before:
            continue
        after = pattern.sub(lambda found: new[found[0]], before)
        if after != before:
            with open(path, "wb") as file:
                file.write(after)
