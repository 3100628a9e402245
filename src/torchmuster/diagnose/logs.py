"""Logs as blocks of whole lines: files, folders, streams, archives, in bounded memory.

Nothing is unpacked to disk, no link is followed out of a folder, and what is not text is left out
with a note. Nodes don't use it. zstd is unpacked by Python's module (from 3.14), the package `zstandard` or the program `zstd`.
"""

import ast
import gzip
import importlib
import os
import shlex
import shutil
import tarfile
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import IO, Any, Protocol

from torchmuster.core import proc
from torchmuster.diagnose.explain.reading import ends
from torchmuster.diagnose.explain.reading.scan import LogRecord, read_sources
from torchmuster.errors import MusterError

_MAX_WINDOW_BYTES = 128 << 20  # the default limit of `zstd -d`
_PART_BYTES = 1 << 10  # becomes 32 MiB at most
_END_TIMEOUT_S = 10.0


def new_frame() -> Callable[[], Any] | None:
    """Return a constructor of decompressors for one frame, as lzma's; None without a module."""
    try:
        own = importlib.import_module("compression.zstd")
    except ImportError:
        pass
    else:
        frame: Callable[[], Any] = own.ZstdDecompressor
        return frame
    try:
        package = importlib.import_module("zstandard")
    except ImportError:
        return None
    return lambda: _Frame(package)


class _Frame:
    """A frame unpacked by `zstandard`, in small parts, because it accepts any input at once."""

    def __init__(self, package: Any) -> None:
        packer = package.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        self._engine = packer.decompressobj()
        self._failure = package.ZstdError
        self._input = self._output = b""

    @property
    def needs_input(self) -> bool:
        """Return whether nothing comes without more input."""
        return not self._input and not self._output

    @property
    def eof(self) -> bool:
        """Return whether the frame has ended and all of it was returned."""
        return bool(self._engine.eof) and not self._output

    @property
    def unused_data(self) -> bytes:
        """Return the input after the end of the frame."""
        return bytes(self._engine.unused_data) + self._input

    def decompress(self, data: bytes, most: int) -> bytes:
        """Return the next bytes.

        Raises:
            OSError: The file is damaged, or asks for too much memory.
        """
        self._input += data
        try:
            while self._input and not self._output and not self._engine.eof:
                part, self._input = self._input[:_PART_BYTES], self._input[_PART_BYTES:]
                self._output = self._engine.decompress(part)
        except self._failure as error:
            raise OSError(str(error)) from None
        found, self._output = self._output[:most], self._output[most:]
        return found


class ZstdProgram:
    """The program `zstd`, which gets a stream from a thread; it ends when nobody reads it any more.

    Raises:
        OSError: The program is not installed.
    """

    def __init__(self, file: "Readable") -> None:
        if shutil.which("zstd") is None:
            raise OSError("zstd is not unpacked here")
        packed, to_it = os.pipe2(os.O_CLOEXEC)
        from_it, plain = os.pipe2(os.O_CLOEXEC)
        quiet = proc.NOWHERE
        try:
            self._child = proc.start(["zstd", "-dcq"], stdin=packed, stdout=plain, stderr=quiet)
        except MusterError as error:
            os.close(to_it)
            os.close(from_it)
            raise OSError(str(error)) from None
        finally:
            for number in (packed, plain):
                os.close(number)
        self._plain: IO[bytes] = open(from_it, "rb")  # noqa: SIM115 - `close` closes it
        self._failure: Exception | None = None
        self._feeder = threading.Thread(target=self._feed, args=(file, to_it), daemon=True)
        self._feeder.start()

    def read(self, num_bytes: int, /) -> bytes:
        """Return the next bytes; nothing at the end.

        Raises:
            OSError: The file is damaged, ends too early, or asks for too much memory.
        """
        found = b"" if self._plain.closed else self._plain.read(num_bytes)
        if found:
            return found
        self.close()
        if self._failure is not None:
            raise OSError(str(self._failure)) from None
        if self._child.poll() != 0:
            raise OSError("zstd: it is damaged or ends too early")
        return b""

    def close(self) -> None:
        """End the program, even in the middle of the stream."""
        self._plain.close()
        self._child.wait(_END_TIMEOUT_S)
        self._feeder.join(_END_TIMEOUT_S)

    def _feed(self, file: "Readable", number: int) -> None:
        try:
            with open(number, "wb", buffering=0) as pipe:
                while data := file.read(_READ_BYTES):
                    left = memoryview(data)
                    while left:
                        left = left[pipe.write(left) :]
        except BrokenPipeError:
            pass  # it has ended, or nobody reads it: its status tells which
        except (OSError, EOFError, ValueError) as error:
            self._failure = error


# Streams that can't be rewound: packed ones are unpacked in small parts, and archives can't fill
# the memory.


DAMAGES = (tarfile.TarError, OSError, EOFError, zlib.error)
ZSTD = "zstd"
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bz2",
    b"\x28\xb5\x2f\xfd": ZSTD,
}
_MAX_MEMORY_BYTES = 256 << 20  # what an xz file may ask for to be unpacked
_READ_BYTES = 1 << 16
_MAX_TAR_HEADER_BYTES = 1 << 20
# Members whose size is that of a header, which tarfile reads as a whole.
_LONG_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class Readable(Protocol):
    """A source of bytes; it returns fewer than requested only at the end."""

    def read(self, num_bytes: int, /) -> bytes | None:
        """Return the next bytes; nothing at the end."""


def packing_of(head: bytes) -> str | None:
    """Return how a file is packed, by its first bytes: `gzip`, `xz`, ...; None if it isn't."""
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return name
    return None


def by_hand(packing: str, path: str) -> str:
    """Return the command that unpacks a file where this Python can't."""
    return f"{packing} -dc {shlex.quote(path)} | muster explain -"


def unpacked(packing: str, file: Readable) -> Readable:
    """Return the content of a packed stream.

    Raises:
        OSError: This Python can't unpack it.
    """
    if packing == "gzip":
        return gzip.GzipFile(fileobj=file)  # type: ignore[call-overload, no-any-return]
    if packing == ZSTD:
        frame = new_frame()
        return ZstdProgram(file) if frame is None else _Unpacker(file, frame)
    try:
        module = importlib.import_module("lzma" if packing == "xz" else "bz2")
    except ImportError:
        raise OSError(f"this Python has no {packing}") from None
    if packing == "bz2":
        return _Unpacker(file, module.BZ2Decompressor)
    return _Unpacker(file, lambda: module.LZMADecompressor(memlimit=_MAX_MEMORY_BYTES))


def can_unpack(packing: str) -> bool:
    """Return whether this machine can unpack such a file."""
    return packing != ZSTD or new_frame() is not None or shutil.which("zstd") is not None


@dataclass(slots=True)
class Stream:
    """A stream whose first bytes have been read."""

    head: bytes
    file: Readable

    def read(self, num_bytes: int, /) -> bytes:
        """Return the next bytes; nothing at the end."""
        if self.head:
            found, self.head = self.head[:num_bytes], self.head[num_bytes:]
            return found
        return self.file.read(num_bytes) or b""


class _Unpacker:
    """An xz, bz2 or zstd stream, or several in a row; it unpacks no more than requested."""

    def __init__(self, file: Readable, new_engine: Callable[[], Any]) -> None:
        self._file = file
        self._new_engine = new_engine
        self._engine: Any = None
        self._rest = b""

    def read(self, num_bytes: int, /) -> bytes:
        """Return the next bytes: as many as requested, except at the end.

        Raises:
            OSError: The file is damaged, or needs too much memory.
        """
        parts: list[bytes] = []
        missing = num_bytes
        try:
            while missing > 0 and (part := self._some(missing)):
                parts.append(part)
                missing -= len(part)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - each module has its own type for damage
            raise OSError(str(error)) from None
        return b"".join(parts)

    def _some(self, most: int) -> bytes:
        while True:
            if self._engine is None:
                self._rest = self._rest or self._file.read(_READ_BYTES) or b""
                if not self._rest.strip(b"\0"):  # xz pads with zeros
                    return b""
                self._engine = self._new_engine()
            if self._engine.needs_input and not self._rest:
                self._rest = self._file.read(_READ_BYTES) or b""
                if not self._rest:
                    raise EOFError("it ends too early")
            part = self._engine.decompress(self._rest, most)
            self._rest = b""
            if self._engine.eof:
                self._rest, self._engine = self._engine.unused_data, None
            if part:
                return bytes(part)


class ArchiveMember(tarfile.TarInfo):
    """A member of an archive; it refuses headers that are too large to be read as a whole."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "ArchiveMember":
        """Return a member from its header.

        Raises:
            OSError: The header is a bomb's, or the file is sparse.
        """
        member = super().frombuf(buf, encoding, errors)
        if member.type in _LONG_HEADERS and member.size > _MAX_TAR_HEADER_BYTES:
            raise OSError(f"a header of {member.size} bytes")
        if member.type == tarfile.GNUTYPE_SPARSE:
            raise OSError("a file with holes, which is not read")
        return member


STDIN = "stdin"  # its name in messages
MAX_LINE_BYTES = 1 << 16
MAX_FILES = 20_000
MAX_UNPACKED_BYTES = 4 << 30  # of an archive or a gzip file, all together; a bomb ends here
_MAX_MEMBERS = 100_000
_MAX_PACKINGS = 3  # nested
_SOURCE = ".py"
_MAX_SOURCE_BYTES = 1 << 20


@dataclass(slots=True)
class _Budget:
    """How many bytes may still be unpacked from one archive; None if it is not an archive."""

    left: int | None = None

    def spend(self, num_bytes: int) -> bool:
        """Spend bytes; return whether so many were left."""
        if self.left is None:
            return True
        self.left -= num_bytes
        return self.left >= 0


def read_logs(
    paths: Iterable[str], *, year: int, streams: Iterable[tuple[str, Readable]] = ()
) -> LogRecord:
    """Return the events of logs, in bounded memory.

    Args:
        paths: Files, folders, packed files or tar archives.
        year: For times without a year.
        streams: Open streams, such as standard input, with their names.
    """
    notes = ends.Notes()
    return read_sources(open_sources(paths, notes, streams), year=year, notes=notes)


def open_sources(
    paths: Iterable[str], notes: ends.Notes, streams: Iterable[tuple[str, Readable]] = ()
) -> Iterator[ends.LogSource]:
    """Yield every log below these paths, in a natural order; at most 20,000.

    Args:
        paths: Files and folders.
        notes: Gets what could not be read.
        streams: Open streams, such as standard input, with their names.
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


def _files_below(path: str, notes: ends.Notes) -> Iterator[str]:
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


def _open(path: str, notes: ends.Notes) -> Iterator[ends.LogSource]:
    """Yield the logs of one file; wait neither for a pipe's writer nor for a growing file."""
    try:
        if not os.path.isfile(path):
            there = "this is no file; `muster explain -` reads standard input"
            notes.add(path, there if os.path.exists(path) else "there is no such file")
            return
        # Without O_NONBLOCK, open() would wait for a writer if a pipe took the file's place now.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            end = _UntilNow(file, status.st_size or MAX_UNPACKED_BYTES)
            yield from _open_stream(path, end, notes, _Budget())
    except OSError as error:
        notes.add(path, error.strerror or str(error))


@dataclass(slots=True)
class _UntilNow:
    """A file up to its size when it was opened: a growing file would have no end."""

    file: IO[bytes]
    left: int

    def read(self, num_bytes: int, /) -> bytes:
        data = self.file.read(min(num_bytes, self.left)) or b""
        self.left -= len(data)
        return data


def _open_stream(
    path: str, file: Readable, notes: ends.Notes, budget: _Budget, depth: int = 0
) -> Iterator[ends.LogSource]:
    """Yield the logs in a stream, however it is packed."""
    try:
        head = _first_bytes(
            file, _MAX_SOURCE_BYTES if path.endswith(_SOURCE) else ends.BINARY_SAMPLE
        )
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
    elif (noise := ends.noise_of_binary(head)) is not None:
        share = f"{noise:.0%} of the beginning is control characters and runs of zeros"
        notes.add(path, f"it is not text: {share}")
    elif path.endswith(_SOURCE) and _is_python(head):
        notes.add(path, "it is source code in Python, no log")
    else:
        yield ends.LogSource(path=path, blocks=_blocks(stream, path, notes, budget))


def _typed(path: str) -> str:
    return "-" if path == STDIN else path


def _first_bytes(file: Readable, most: int) -> bytes:
    """Return the first bytes of a stream; a pipe gives them in parts."""
    head = b""
    while len(head) < most and (data := file.read(most - len(head))):
        head += data
    return head


def _is_python(head: bytes) -> bool:
    """Return whether a whole file surely is source code: it compiles, and has statements."""
    try:
        with warnings.catch_warnings(action="ignore"):
            body = ast.parse(head).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return len(head) < _MAX_SOURCE_BYTES and any(not isinstance(one, ast.Expr) for one in body)


def _open_tar(
    path: str, file: Any, notes: ends.Notes, budget: _Budget, depth: int
) -> Iterator[ends.LogSource]:
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


def _blocks(file: Readable, path: str, notes: ends.Notes, budget: _Budget) -> Iterator[bytes]:
    """Yield whole lines in blocks of about 1 MiB; of a longer line only the first 64 KiB."""
    rest, is_within_line = b"", False
    for data in _decoded(_budgeted(file, path, notes, budget), path, notes):
        block = ends.plain_lines(rest + data)
        if is_within_line:
            _, found, block = block.partition(b"\n")
            is_within_line = not found
        end = block.rfind(b"\n") + 1
        rest = block[end:]
        if end:
            yield block[:end]
        if len(rest) > ends.BLOCK_BYTES:
            yield rest[:MAX_LINE_BYTES]
            rest, is_within_line = b"", True
    if rest:
        yield rest


def _decoded(parts: Iterator[bytes], path: str, notes: ends.Notes) -> Iterator[bytes]:
    """Yield text without zeros.

    UTF-16 is read as ASCII, which logs mostly are: without its zeros it is readable. In other text
    zeros are holes, and noted.
    """
    first = next(parts, b"")
    parts = chain([first], parts)
    if first.startswith(ends.UTF16_MARKS):
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
        open_end = text[len(whole) :][:9]  # a line's end and a hole, which may continue
        has_begun = has_begun or text != b""
        after_line_end = ends_line and whole.startswith(b"\0")
        yield ends.without_holes(b"\n" + whole)[1:] if after_line_end else ends.without_holes(whole)
        ends_line = whole.endswith(b"\n") if whole else ends_line
    yield open_end[:1].strip(b"\0")
    if num_zeros:
        share = f"{num_zeros / num_bytes:.1%}"
        notes.add(path, f"{num_zeros:,} zero bytes in it ({share}) were dropped", part=True)


def _budgeted(file: Readable, path: str, notes: ends.Notes, budget: _Budget) -> Iterator[bytes]:
    """Yield the bytes of a stream until its end, damage, or the end of the budget."""
    while True:
        try:
            data = file.read(ends.BLOCK_BYTES)
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
