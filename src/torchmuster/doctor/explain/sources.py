"""Logs as blocks of whole lines: files, folders, gzip and tar archives, in bounded memory.

Nothing is unpacked to disk, no link is followed out of a folder, and what is not text is left out with a note.
"""

import gzip
import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO

BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 16
MAX_FILES = 20_000
MAX_UNPACKED_BYTES = 4 << 30  # of an archive or a gzip file, all together; a bomb ends here
_BINARY_SAMPLE = 8192
_MAX_NOTES = 50


@dataclass(slots=True)
class Notes:
    """What could not be read, and why, for the user."""

    lines: list[str] = field(default_factory=list)

    def add(self, path: str, why: str, *, part: bool = False) -> None:
        """Note a file that was left out, or of which a part was."""
        if len(self.lines) < _MAX_NOTES:
            self.lines.append(f"{path}: {why}" if part else f"{path} is left out: {why}")


@dataclass(slots=True)
class _Budget:
    """How many bytes may still be unpacked from one archive; None: it is no archive."""

    left: int | None = None

    def spend(self, num_bytes: int) -> bool:
        """Say whether so many bytes were left."""
        if self.left is None:
            return True
        self.left -= num_bytes
        return self.left >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One log: its name for messages, and its blocks, each ending at the end of a line."""

    path: str
    blocks: Iterator[bytes]


def open_sources(paths: Iterable[str], notes: Notes) -> Iterator[Source]:
    """Yield every log below these paths, in a natural order; at most 20,000."""
    num_files = 0
    for path in paths:
        for found in _files_below(path, notes):
            for source in _open(found, notes):
                num_files += 1
                if num_files > MAX_FILES:
                    notes.add(found, f"more than {MAX_FILES} files")
                    return
                yield source


def _files_below(path: str, notes: Notes) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            full = os.path.join(folder, name)
            if os.path.islink(full) or not os.path.isfile(full):
                continue
            if os.path.getsize(full) > 0:
                yield full


def _open(path: str, notes: Notes) -> Iterator[Source]:
    try:
        if not os.path.isfile(path):
            notes.add(path, "this is no file" if os.path.exists(path) else "there is no such file")
            return
        with open(path, "rb") as file:
            head = file.read(_BINARY_SAMPLE)
            file.seek(0)
            if head[:2] == b"\x1f\x8b":
                yield from _open_gzip(path, file, notes)
            elif _is_tar(head):
                yield from _open_tar(path, file, notes)
            elif _is_binary(head):
                notes.add(path, "it is no text")
            else:
                yield Source(path=path, blocks=_blocks(file, path, notes, _Budget()))
    except OSError as error:
        notes.add(path, error.strerror or str(error))


def _open_gzip(path: str, file: IO[bytes], notes: Notes) -> Iterator[Source]:
    with gzip.open(file) as plain:
        try:
            head = plain.read(_BINARY_SAMPLE)
            plain.seek(0)
        except (OSError, EOFError, zlib.error) as error:
            notes.add(path, f"the gzip file is damaged ({error})")
            return
        if _is_tar(head):
            yield from _open_tar(path, plain, notes)  # type: ignore[arg-type]
        elif _is_binary(head):
            notes.add(path, "it is no text")
        else:
            yield Source(path=path, blocks=_blocks(plain, path, notes, _Budget(MAX_UNPACKED_BYTES)))  # type: ignore[arg-type]


def _open_tar(path: str, file: IO[bytes], notes: Notes) -> Iterator[Source]:
    try:
        budget = _Budget(MAX_UNPACKED_BYTES)
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                name = f"{path}/{member.name}"
                content = archive.extractfile(member) if member.isreg() else None
                if content is None:
                    continue
                if member.size > (budget.left or 0):
                    notes.add(name, f"the archive holds more than {MAX_UNPACKED_BYTES >> 30} GiB")
                    return
                head = content.read(_BINARY_SAMPLE)
                if _is_binary(head):
                    notes.add(name, "it is no text")
                    continue
                yield Source(path=name, blocks=_blocks(content, name, notes, budget, head))
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        notes.add(path, f"the archive is damaged ({error})")


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def _is_binary(head: bytes) -> bool:
    """Say whether this is no text: zeros that are not UTF-16's, or mostly control characters."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return False
    if b"\0" in head:
        return True
    controls = sum(byte < 9 or 13 < byte < 27 for byte in head[:2048])
    return controls > len(head[:2048]) // 4 and len(head) > 16


def _blocks(
    file: IO[bytes], path: str, notes: Notes, budget: _Budget, head: bytes = b""
) -> Iterator[bytes]:
    """Yield whole lines of about 1 MiB; a longer line is cut."""
    rest, num_bytes = b"", 0
    is_utf16 = False
    while True:
        try:
            data = head or file.read(BLOCK_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            notes.add(path, f"it can be read in part only ({error})", part=True)
            data = b""
        head = b""
        if num_bytes == 0 and data.startswith((b"\xff\xfe", b"\xfe\xff")):
            is_utf16 = True
        num_bytes += len(data)
        if data and not budget.spend(len(data)):
            notes.add(
                path,
                f"it is larger than {MAX_UNPACKED_BYTES >> 30} GiB: the rest is not read",
                part=True,
            )
            data = b""
        if not data:
            if rest:
                yield rest
            return
        if is_utf16:  # logs are mostly ASCII: what is left without the zeros can be read
            data = data.replace(b"\0", b"")
        block = (rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        end = block.rfind(b"\n") + 1
        if end == 0 and len(block) > MAX_LINE_BYTES:
            yield block[:MAX_LINE_BYTES]
            rest = b""
            continue
        rest = block[end:]
        if end:
            yield block[:end]
