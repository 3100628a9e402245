"""The numbers in a message about GPU memory, as torch 1.x to 2.x words it."""

import re
from dataclasses import dataclass

_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "bytes": 1}
_SIZE = r"(?P<{0}>[\d.]+) (?P<{0}_unit>[KMGT]iB|bytes|B)"
# torch 1.x to 2.0: (GPU 0; 23.65 GiB total capacity; 12.87 GiB already allocated; 496.00 MiB free;
#   13.06 GiB reserved ...
# torch 2.1 on: GPU 0 has a total capacity of 79.19 GiB of which 41.50 MiB is free. ... this process
#   has 4.28 GiB memory in use
_ASKED = re.compile(r"[Tt]ried to allocate " + _SIZE.format("asked"))
_TOTAL = re.compile(
    rf"total capac?i?ty of {_SIZE.format('total')}|{_SIZE.format('old_total')} total capacity"
)
_FREE = re.compile(rf"of which {_SIZE.format('free')} is free|{_SIZE.format('old_free')} free")
_OWN = re.compile(
    rf"this process has {_SIZE.format('own')} memory in use|{_SIZE.format('old_own')} reserved in total by PyTorch"
)
_UNUSED = re.compile(rf"{_SIZE.format('unused')} is reserved by PyTorch but unallocated")
_ALLOCATED = re.compile(
    rf"Of the allocated memory {_SIZE.format('allocated')} is allocated by PyTorch"
)
_GPU = re.compile(r"\bGPU (?P<gpu>\d+)\b")
_OTHERS = re.compile(rf"\bProcess (?P<pid>\d+) has {_SIZE.format('used')} memory in use")
_ALLOWED = re.compile(rf"\b{_SIZE.format('allowed')} allowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """The numbers in torch's message about a GPU, in bytes; None for those that are missing.

    Attributes:
        allowed: The cap for the process.
        largest_other: The other process that holds most, with its size; empty when none is named.
    """

    gpu: str
    asked: float | None
    total: float | None
    free: float | None
    own: float | None
    unused: float | None
    allowed: float | None
    largest_other: str

    @property
    def others(self) -> float:
        """The bytes that are neither free nor held by the process that wrote the message."""
        if self.total is None or self.free is None or self.own is None:
            return 0.0
        return max(0.0, self.total - self.free - self.own)


def read_memory(text: str) -> GpuMemory:
    """Return the numbers of a message about a GPU's memory."""
    gpu = _GPU.search(text)
    own, allocated, unused = _bytes(_OWN, text), _bytes(_ALLOCATED, text), _bytes(_UNUSED, text)
    if own is None and allocated is not None:
        own = allocated + (unused or 0.0)
    return GpuMemory(
        gpu=gpu["gpu"] if gpu is not None else "?",
        asked=_bytes(_ASKED, text),
        total=_bytes(_TOTAL, text),
        free=_bytes(_FREE, text),
        own=own,
        unused=unused,
        allowed=_bytes(_ALLOWED, text),
        largest_other=_largest_other(text, _bytes(_TOTAL, text)),
    )


def in_gib(size: float) -> str:
    """Return a size for people."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 28 else f"{size / (1 << 20):.0f} MiB"


def _largest_other(text: str, total: float | None) -> str:
    """Return the process that holds most, without the impossible sizes that containers show."""
    sizes = {
        found["pid"]: float(found["used"]) * _SIZES[found["used_unit"]]
        for found in _OTHERS.finditer(text)
    }
    possible = {pid: size for pid, size in sizes.items() if total is None or size <= total}
    if not possible:
        return ""
    pid = max(possible, key=lambda pid: possible[pid])
    return f"process {pid} ({in_gib(possible[pid])})"


def _bytes(regex: re.Pattern[str], text: str) -> float | None:
    found = regex.search(text)
    if found is None:
        return None
    name = next(
        key for key, value in found.groupdict().items() if value and not key.endswith("_unit")
    )
    return float(found[name]) * _SIZES[found[f"{name}_unit"]]
