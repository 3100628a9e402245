"""Slurm's short forms: `n[01-03,7]-ib[0-1]` for names, `8(x2),4` for numbers."""

import re
from collections.abc import Iterable
from itertools import groupby, product

MAX_NODES = 65536
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Return the names of a host list, in its own order.

    Raises:
        ValueError: It is not a valid host list, or one of more than 65536 names.

    Source: https://slurm.schedmd.com/scontrol.html, "show hostnames".
    """
    names: list[str] = []
    for word in _split_outside_brackets(text.strip()):
        names += _expand_word(word, MAX_NODES - len(names))
    return tuple(names)


def expand_counts(text: str) -> tuple[int, ...]:
    """Return the number of each node from `8(x2),4`.

    Raises:
        ValueError: It has another form, or is too long.

    Source: https://slurm.schedmd.com/sbatch.html, SLURM_JOB_CPUS_PER_NODE.
    """
    counts: list[int] = []
    for word in text.split(","):
        match = _COUNT.fullmatch(word)
        repeat = int(match.group(2) or 1) if match else 0
        if match is None or repeat > MAX_NODES - len(counts):
            raise ValueError(f"`{text}` is not a valid list of counts")
        counts += [int(match.group(1))] * repeat
    return tuple(counts)


def compress_counts(counts: Iterable[int]) -> str:
    """Return `2(x2),1` for 2, 2, 1."""
    runs = [(count, len(list(same))) for count, same in groupby(counts)]
    return ",".join(f"{count}(x{length})" if length > 1 else str(count) for count, length in runs)


def _split_outside_brackets(text: str) -> list[str]:
    words = [""]
    depth = 0
    for char in text:
        depth += {"[": 1, "]": -1}.get(char, 0)
        if depth not in (0, 1):
            break
        if char == "," and depth == 0:
            words.append("")
        else:
            words[-1] += char
    if depth != 0 or "" in words:
        raise ValueError(f"`{text}` is not a valid host list")
    return words


def _expand_word(word: str, room: int) -> list[str]:
    """Expand one name; several brackets give every combination, the last running fastest."""
    pieces = _BRACKETS.split(word)
    choices: list[list[str]] = []
    total = 1
    for position, piece in enumerate(pieces):
        choices.append(_expand_range(piece, room) if position % 2 else [piece])
        total *= len(choices[-1])
        if total > room:
            raise ValueError(f"`{word}` are more than {MAX_NODES} names")
    return ["".join(parts) for parts in product(*choices)]


def _expand_range(text: str, room: int) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"`[{text}]` is not a range of numbers")
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        if last < first or last - first >= room:
            raise ValueError(f"`[{text}]` is not a range, or is one of more than {MAX_NODES}")
        width = len(match.group(1))  # zeros in front are part of the name
        numbers += [f"{number:0{width}d}" for number in range(first, last + 1)]
    return numbers
