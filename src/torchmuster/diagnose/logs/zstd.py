"""Unpacks zstd: by Python's module (from 3.14), the package `zstandard` or the program `zstd`."""

import importlib
import os
import shutil
import threading
from collections.abc import Callable
from typing import IO, Any, Protocol

from torchmuster.core import proc
from torchmuster.errors import MusterError

_MAX_WINDOW_BYTES = 128 << 20  # the default limit of `zstd -d`
_PART_BYTES = 1 << 10  # becomes 32 MiB at most
_READ_BYTES = 1 << 16
_END_TIMEOUT_S = 10.0


class _Source(Protocol):
    def read(self, num_bytes: int, /) -> bytes | None: ...


def is_there() -> bool:
    """Return whether anything here unpacks zstd."""
    return new_frame() is not None or shutil.which("zstd") is not None


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

    def __init__(self, file: _Source) -> None:
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

    def _feed(self, file: _Source, number: int) -> None:
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
