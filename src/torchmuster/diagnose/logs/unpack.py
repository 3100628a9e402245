"""Streams that can't be turned back: packed ones unpacked in small parts, and archives that can't fill the memory."""

import gzip
import importlib
import shlex
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torchmuster.diagnose.logs import zstd

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
# Their size is that of a header, which tarfile reads as a whole.
_LONG_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class Readable(Protocol):
    """What bytes come from; fewer than asked for only at the end."""

    def read(self, num_bytes: int, /) -> bytes | None:
        """Return the next bytes; nothing at the end."""


def packing_of(head: bytes) -> str | None:
    """Return how a file is packed, by its first bytes: `gzip`, `xz`, `bz2`, `zstd`; None if it isn't."""
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return name
    return None


def by_hand(packing: str, path: str) -> str:
    """Return what to type where this Python can't unpack a file."""
    return f"{packing} -dc {shlex.quote(path)} | muster explain -"


def unpacked(packing: str, file: Readable) -> Readable:
    """Return what a packed stream holds.

    Raises:
        OSError: This Python can't unpack it.
    """
    if packing == "gzip":
        return gzip.GzipFile(fileobj=file)  # type: ignore[call-overload, no-any-return]
    if packing == ZSTD:
        new_frame = zstd.new_frame()
        return zstd.ZstdProgram(file) if new_frame is None else _Unpacker(file, new_frame)
    try:
        module = importlib.import_module("lzma" if packing == "xz" else "bz2")
    except ImportError:
        raise OSError(f"this Python has no {packing}") from None
    if packing == "bz2":
        return _Unpacker(file, module.BZ2Decompressor)
    return _Unpacker(file, lambda: module.LZMADecompressor(memlimit=_MAX_MEMORY_BYTES))


def can_unpack(packing: str) -> bool:
    """Say whether this machine can unpack a file that is packed so."""
    return packing != ZSTD or zstd.is_there()


@dataclass(slots=True)
class Stream:
    """A stream of which the first bytes have been looked at."""

    head: bytes
    file: Readable

    def read(self, num_bytes: int, /) -> bytes:
        """Return the next bytes; nothing at the end."""
        if self.head:
            found, self.head = self.head[:num_bytes], self.head[num_bytes:]
            return found
        return self.file.read(num_bytes) or b""


class _Unpacker:
    """An xz, bz2 or zstd stream, or several after each other; never more than asked for at once."""

    def __init__(self, file: Readable, new_engine: Callable[[], Any]) -> None:
        self._file = file
        self._new_engine = new_engine
        self._engine: Any = None
        self._rest = b""

    def read(self, num_bytes: int, /) -> bytes:
        """Return the next bytes, as many as asked for but at the end.

        Raises:
            OSError: The file is damaged, or asks for too much memory.
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
    """A file of an archive, whose own header is not too large to be read as a whole."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "ArchiveMember":
        """Return a member from its header.

        Raises:
            OSError: It is a bomb, or sparse.
        """
        member = super().frombuf(buf, encoding, errors)
        if member.type in _LONG_HEADERS and member.size > _MAX_TAR_HEADER_BYTES:
            raise OSError(f"a header of {member.size} bytes")
        if member.type == tarfile.GNUTYPE_SPARSE:
            raise OSError("a file with holes, which is not read")
        return member
