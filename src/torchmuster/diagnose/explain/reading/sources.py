"""Logs as blocks of whole lines: files, folders, standard input, packed ones and archives, in bounded memory.

Nothing is unpacked to disk, no link is followed out of a folder, and what is not text is left out with a note.
"""

import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import IO, Any

from torchmuster.diagnose.explain.reading.unpack import (
    DAMAGES,
    ArchiveMember,
    Readable,
    Stream,
    by_hand,
    packing_of,
    unpacked,
)
from torchmuster.diagnose.explain.reading.zstd import ZstdProgram

STDIN = "stdin"  # its name in messages
BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 16
MAX_FILES = 20_000
MAX_UNPACKED_BYTES = 4 << 30  # of an archive or a gzip file, all together; a bomb ends here
_MAX_COUNTED_BYTES = 32 << 20  # takes less than 0.1 s
_MAX_MEMBERS = 100_000
_MAX_PACKINGS = 3  # inside of each other
_BINARY_SAMPLE = 8192
_CONTROLS = bytes(byte for byte in range(1, 27) if byte < 9 or byte > 13)
_MOST_NOISE, _MOST_NOISE_WITH_ZEROS = (
    0.25,
    0.05,
)  # seen: text with holes 0, shared libraries from 0.1 on
_HOLE = re.compile(rb"(\n?)\0{8,}(\n?)")
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
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
class LogSource:
    """One log: its name for messages, and its blocks, each ending at the end of a line.

    A line of a block that ends with a carriage return is a part of one of the log: the next goes on with it.

    Attributes:
        num_before: Lines of the log that stand before the first block.
    """

    path: str
    blocks: Iterator[bytes]
    num_before: int = 0


def open_sources(
    paths: Iterable[str], notes: Notes, streams: Iterable[tuple[str, Readable]] = ()
) -> Iterator[LogSource]:
    """Yield every log below these paths, in a natural order; at most 20,000.

    Args:
        paths: Files and folders.
        notes: Gets what could not be read.
        streams: What is open already, such as standard input, with its name.
    """
    for name, stream in streams:
        yield from _open_stream(name, stream, notes, _Budget())
    num_files = num_sources = 0
    for path in paths:
        for found in _files_below(path, notes):
            num_files += 1
            for source in _open(found, notes):
                num_sources += 1
                if max(num_files, num_sources) > MAX_FILES:
                    break
                yield source
            if max(num_files, num_sources) > MAX_FILES:
                notes.add(found, f"more than {MAX_FILES} files")
                return


def first_and_last(path: str, first_bytes: int, last_bytes: int) -> Iterator[LogSource]:
    """Yield the beginning and the end of a log as two; of a short one all as one, of what is no text nothing.

    Lines between them are counted, so that those of the end have their numbers; of a very long log they are not, and
    its name says so.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(first_bytes)
            if _noise_of_binary(head[:_BINARY_SAMPLE]) is not None:
                return
            if size <= first_bytes + last_bytes:
                whole = _without_holes((head + file.read(last_bytes)).lstrip(b"\0"))
                yield LogSource(path=path, blocks=iter([_plain(whole)]))
                return
            head = head[: head.rfind(b"\n") + 1]
            yield LogSource(path=path, blocks=iter([_plain(_without_holes(head.lstrip(b"\0")))]))
            if size > _MAX_COUNTED_BYTES:
                path, num_before = f"{path}, last {last_bytes >> 10} KiB", 0
            else:
                file.seek(len(head))
                num_before = head.count(b"\n") + _count_lines(file, size - last_bytes - len(head))
            file.seek(size - last_bytes)
            cut, _, tail = _plain(_without_holes(file.read(last_bytes))).partition(b"\n")
            num_before += not cut.endswith(b"\r")
            yield LogSource(path=path, blocks=iter([tail]), num_before=num_before)
    except OSError:
        return


def _plain(data: bytes) -> bytes:
    """Return text with one kind of line end. What a carriage return ends, as progress bars do, becomes a line that keeps it."""
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\r\n")


def _count_lines(file: IO[bytes], num_bytes: int) -> int:
    num_lines = 0
    while num_bytes > 0 and (data := file.read(min(BLOCK_BYTES, num_bytes))):
        num_lines += data.count(b"\n")
        num_bytes -= len(data)
    return num_lines


def _files_below(path: str, notes: Notes) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
        return
    for folder, folders, names in os.walk(
        path, onerror=lambda error: notes.add(str(error.filename), error.strerror or str(error))
    ):
        folders.sort()
        for name in sorted(names):
            full = os.path.join(folder, name)
            if os.path.islink(full) or not os.path.isfile(full):
                continue
            if os.path.getsize(full) > 0:
                yield full


def _open(path: str, notes: Notes) -> Iterator[LogSource]:
    """Yield the logs of one file. What is no plain file is not waited for, nor what is still being written."""
    try:
        if not os.path.isfile(path):
            there = "this is no file; `muster explain -` reads standard input"
            notes.add(path, there if os.path.exists(path) else "there is no such file")
            return
        # Without O_NONBLOCK, a pipe that takes its place now would let us wait for its writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            end = _UntilNow(file, status.st_size or MAX_UNPACKED_BYTES)
            yield from _open_stream(path, end, notes, _Budget())
    except OSError as error:
        notes.add(path, error.strerror or str(error))


@dataclass(slots=True)
class _UntilNow:
    """A file as long as it was when it was opened: one that grows would have no end."""

    file: IO[bytes]
    left: int

    def read(self, num_bytes: int, /) -> bytes:
        data = self.file.read(min(num_bytes, self.left)) or b""
        self.left -= len(data)
        return data


def _open_stream(
    path: str, file: Readable, notes: Notes, budget: _Budget, depth: int = 0
) -> Iterator[LogSource]:
    """Yield the logs that a stream holds, whatever it is packed in."""
    try:
        head = _first_bytes(file)
    except DAMAGES as error:
        damage = "the file is damaged" if depth else "it can't be read"
        notes.add(path, f"{damage} ({getattr(error, 'strerror', None) or error})")
        return
    stream, packing = Stream(head, file), packing_of(head)
    if packing is not None and depth >= _MAX_PACKINGS:
        notes.add(path, "it is packed too many times")
    elif packing is not None:
        budget = budget if budget.left is not None else _Budget(MAX_UNPACKED_BYTES)
        try:
            plain = unpacked(packing, stream)
        except OSError as error:
            unpack_it = "unpack it first" if depth else by_hand(packing, _typed(path))
            notes.add(path, f"{error}: {unpack_it}")
            return
        try:
            yield from _open_stream(path, plain, notes, budget, depth + 1)
        finally:
            if isinstance(plain, ZstdProgram):
                plain.close()
    elif _is_tar(head):
        yield from _open_tar(path, stream, notes, budget, depth)
    elif (noise := _noise_of_binary(head)) is not None:
        share = f"{noise:.0%} of the beginning is control characters and runs of zeros"
        notes.add(path, f"it is not text: {share}")
    else:
        yield LogSource(path=path, blocks=_blocks(stream, path, notes, budget))


def _typed(path: str) -> str:
    return "-" if path == STDIN else path


def _first_bytes(file: Readable) -> bytes:
    """Return what a stream begins with; a pipe gives it in parts."""
    head = b""
    while len(head) < _BINARY_SAMPLE and (data := file.read(_BINARY_SAMPLE - len(head))):
        head += data
    return head


def _open_tar(
    path: str, file: Any, notes: Notes, budget: _Budget, depth: int
) -> Iterator[LogSource]:
    if budget.left is None:
        budget = _Budget(MAX_UNPACKED_BYTES)
    try:
        with tarfile.open(fileobj=file, mode="r|", tarinfo=ArchiveMember) as archive:
            num_members = 0
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # else all are kept
                num_members += 1
                if num_members > _MAX_MEMBERS:
                    notes.add(path, f"more than {_MAX_MEMBERS} files: the rest", part=True)
                    return
                content = archive.extractfile(member) if member.isreg() else None
                if content is None or member.size == 0:
                    continue
                name = f"{path}/{member.name}"
                if member.size > (budget.left or 0):
                    notes.add(name, f"the archive holds more than {MAX_UNPACKED_BYTES >> 30} GiB")
                    return
                yield from _open_stream(name, content, notes, budget, depth + 1)
    except DAMAGES as error:
        notes.add(path, f"the archive is damaged ({error})")


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def _noise_of_binary(head: bytes) -> float | None:
    """Return how much of a file's beginning no text has, where that is too much; None of a text.

    A crash on a network file system leaves runs of zeros in a log: few and long ones, with text around them. In binary
    data they are short and many, and other control characters stand between.
    """
    if head.startswith(_UTF16_MARKS):
        return None
    has_zeros = b"\0" in head
    sample = head if has_zeros else head[:2048]
    text = sample.replace(b"\0", b"")
    noise = len(text) - len(text.translate(None, _CONTROLS)) + len(re.findall(rb"\0+", sample))
    if len(text) <= 16:  # a number, or nothing but a hole: what follows is not known yet
        return None
    share = noise / len(text)
    return share if share > (_MOST_NOISE_WITH_ZEROS if has_zeros else _MOST_NOISE) else None


def _without_holes(data: bytes) -> bytes:
    """Return text without zeros. A run of them ends a line, since the line's own end may have been among them."""
    if b"\0" not in data:
        return data
    data = _HOLE.sub(lambda hole: hole[1] + hole[2] or b"\n", data)
    return data.replace(b"\0", b"")


def _blocks(file: Readable, path: str, notes: Notes, budget: _Budget) -> Iterator[bytes]:
    """Yield whole lines of about 1 MiB; of a longer line only the first 64 KiB."""
    rest, is_within_line = b"", False
    for data in _decoded(_budgeted(file, path, notes, budget), path, notes):
        block = _plain(rest + data)
        if is_within_line:
            _, found, block = block.partition(b"\n")
            is_within_line = not found
        end = block.rfind(b"\n") + 1
        rest = block[end:]
        if end:
            yield block[:end]
        if len(rest) > BLOCK_BYTES:
            yield rest[:MAX_LINE_BYTES]
            rest, is_within_line = b"", True
    if rest:
        yield rest


def _decoded(parts: Iterator[bytes], path: str, notes: Notes) -> Iterator[bytes]:
    """Yield text without zeros.

    UTF-16 is read as if it were ASCII, which logs mostly are: what is left without the zeros can be read. In all else
    zeros are holes, and noted.
    """
    first = next(parts, b"")
    parts = chain([first], parts)
    if first.startswith(_UTF16_MARKS):
        yield from (data.replace(b"\0", b"") for data in parts)
        return
    num_bytes = num_zeros = 0
    open_end, has_begun, ends_line = b"", False, False
    for data in parts:
        num_bytes += len(data)
        num_zeros += data.count(0)
        text = open_end + (data if has_begun else data.lstrip(b"\0"))
        whole = text
        if text.endswith(b"\0"):
            whole = text.rstrip(b"\0").removesuffix(b"\n")
        open_end = text[len(whole) :][:9]  # an end of line and a hole, which may go on
        has_begun = has_begun or text != b""
        behind_end = ends_line and whole.startswith(b"\0")
        yield _without_holes(b"\n" + whole)[1:] if behind_end else _without_holes(whole)
        ends_line = whole.endswith(b"\n") if whole else ends_line
    yield open_end[:1].strip(b"\0")
    if num_zeros:
        share = f"{num_zeros / num_bytes:.1%}"
        notes.add(path, f"{num_zeros:,} zero bytes in it ({share}) were dropped", part=True)


def _budgeted(file: Readable, path: str, notes: Notes, budget: _Budget) -> Iterator[bytes]:
    """Yield what can be read, until the budget is spent."""
    while True:
        try:
            data = file.read(BLOCK_BYTES)
        except DAMAGES as error:
            notes.add(path, f"it can be read in part only ({error})", part=True)
            return
        if not data:
            return
        if not budget.spend(len(data)):
            most = f"{MAX_UNPACKED_BYTES >> 30} GiB"
            notes.add(path, f"it is larger than {most}: the rest is not read", part=True)
            return
        yield data
