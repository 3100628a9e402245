"""Reads a log as blocks of whole lines; of a failed run's long log, only the two ends."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

BLOCK_BYTES = 1 << 20
BINARY_SAMPLE = 8192
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_MAX_COUNTED_BYTES = 32 << 20  # takes less than 0.1 s
_CONTROLS = bytes(byte for byte in range(1, 27) if byte < 9 or byte > 13)
_MOST_NOISE, _MOST_NOISE_WITH_ZEROS = (
    0.25,
    0.05,
)  # seen: text with holes 0, shared libraries from 0.1 on
_HOLE = re.compile(rb"(\n?)\0{8,}(\n?)")
_MAX_NOTES = 50


@dataclass(slots=True)
class Notes:
    """What could not be read and why, for the user."""

    lines: list[str] = field(default_factory=list)

    def add(self, path: str, why: str, *, part: bool = False) -> None:
        """Note a file that was left out, wholly or in part."""
        if len(self.lines) < _MAX_NOTES:
            self.lines.append(f"{path}: {why}" if part else f"{path} is left out: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """One log: its name for messages, and its blocks, each ending at the end of a line.

    A block's line that ends with a carriage return is a part of a line: the next one continues it.

    Attributes:
        num_before: Number of the log's lines before the first block.
    """

    path: str
    blocks: Iterator[bytes]
    num_before: int = 0


def first_and_last(path: str, first_bytes: int, last_bytes: int) -> Iterator[LogSource]:
    """Yield the beginning and the end of a log; a short one whole, a binary file not at all.

    Lines between them are counted, so that those of the end have their numbers; in a very long log
    they are not, and its name says so.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(first_bytes)
            if noise_of_binary(head[:BINARY_SAMPLE]) is not None:
                return
            if size <= first_bytes + last_bytes:
                whole = without_holes((head + file.read(last_bytes)).lstrip(b"\0"))
                yield LogSource(path=path, blocks=iter([plain_lines(whole)]))
                return
            head = head[: head.rfind(b"\n") + 1]
            yield LogSource(
                path=path, blocks=iter([plain_lines(without_holes(head.lstrip(b"\0")))])
            )
            if size > _MAX_COUNTED_BYTES:
                path, num_before = f"{path}, last {last_bytes >> 10} KiB", 0
            else:
                file.seek(len(head))
                num_before = head.count(b"\n") + _count_lines(file, size - last_bytes - len(head))
            file.seek(size - last_bytes)
            cut, _, tail = plain_lines(without_holes(file.read(last_bytes))).partition(b"\n")
            num_before += not cut.endswith(b"\r")
            yield LogSource(path=path, blocks=iter([tail]), num_before=num_before)
    except OSError:
        return


def plain_lines(data: bytes) -> bytes:
    """Return text with newlines only; a part that ends with a carriage return becomes a line."""
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\r\n")


def _count_lines(file: IO[bytes], num_bytes: int) -> int:
    num_lines = 0
    while num_bytes > 0 and (data := file.read(min(BLOCK_BYTES, num_bytes))):
        num_lines += data.count(b"\n")
        num_bytes -= len(data)
    return num_lines


def noise_of_binary(head: bytes) -> float | None:
    """Return the share of binary noise in a file's beginning if it is too high; None for text.

    A crash on a network file system leaves runs of zeros in a log: few and long ones, with text
    around them. In binary data they are short and many, among other control characters.
    """
    if head.startswith(UTF16_MARKS):
        return None
    has_zeros = b"\0" in head
    sample = head if has_zeros else head[:2048]
    text = sample.replace(b"\0", b"")
    noise = len(text) - len(text.translate(None, _CONTROLS)) + len(re.findall(rb"\0+", sample))
    if len(text) <= 16:  # a number, or only a hole: too little to judge
        return None
    share = noise / len(text)
    return share if share > (_MOST_NOISE_WITH_ZEROS if has_zeros else _MOST_NOISE) else None


def without_holes(data: bytes) -> bytes:
    """Return text without zeros; a run of zeros ends a line, since it may hide the line's end."""
    if b"\0" not in data:
        return data
    data = _HOLE.sub(lambda hole: hole[1] + hole[2] or b"\n", data)
    return data.replace(b"\0", b"")
