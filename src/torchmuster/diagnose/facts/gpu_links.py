"""How the GPUs of a node are connected: NVLink, PCIe and bridges. From text to values.

Sources: `nvidia-smi topo -m` and its legend, `nvidia-smi nvlink -s`, `nvidia-smi topo -p2p r`, the PCI Express base
specification (extended capability 0x0D is ACS).
"""

import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchmuster.diagnose.facts.kernel import list_folder, read_bytes, read_text

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU(\d{1,3})$")
_KIND = re.compile(r"(NV\d{1,2}|PIX|PXB|PHB|NODE|SYS)$")
_LINK_GPU = re.compile(r"^GPU (\d{1,3}):")
_LINK = re.compile(r"^\s+Link (\d{1,2}):\s*(.*?)\s*$")
_P2P = re.compile(r"(OK|CNS|GNS|TNS|NS|DR|U)$")
_MAX_LINES = 2000
_MAX_BRIDGES = 512
_ACS_ID, _FIRST_EXTENDED = 0x0D, 0x100
_REDIRECT = 0x04 | 0x08  # requests and completions go up to the root
_BRIDGE_CLASS = "0x0604"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLinks:
    """The links between the GPUs of a node.

    Attributes:
        kinds: The kinds of links between pairs, each once: `NV18`, `PIX`, `SYS`; empty with one GPU.
        nvlinks: For each GPU by index, how many of its NVLinks are up, and how many it has.
        no_p2p: Pairs that can't read each other's memory, and the tool's word for why: `0-1 CNS`.
        num_redirecting: PCI bridges that send traffic between devices up to the processor (ACS); None: not readable.
    """

    kinds: tuple[str, ...] = ()
    nvlinks: tuple[tuple[int, int], ...] = ()
    no_p2p: tuple[str, ...] = ()
    num_redirecting: int | None = None

    @property
    def is_all_nvlink(self) -> bool:
        """Return whether all pairs are connected by NVLink."""
        return bool(self.kinds) and all(kind.startswith("NV") for kind in self.kinds)


def read_topology(text: str) -> tuple[str, ...]:
    """Return the kinds of links between GPUs in `nvidia-smi topo -m`, each once."""
    return tuple(sorted({word for _, _, word in _matrix(text, _KIND)}))


def read_p2p(text: str) -> tuple[str, ...]:
    """Return the pairs that `nvidia-smi topo -p2p r` does not call OK, each once, as `0-1 CNS`."""
    cells = _matrix(text, _P2P)
    return tuple(f"{a}-{b} {word}" for a, b, word in cells if word != "OK" and a < b)


def read_nvlinks(text: str) -> tuple[tuple[int, int], ...]:
    """Return the number of links of each GPU that are up, and of all its links, from `nvidia-smi nvlink -s`."""
    found: dict[int, list[int]] = {}
    current: list[int] | None = None
    for line in text.splitlines()[:_MAX_LINES]:
        head, link = _LINK_GPU.match(line), _LINK.match(line)
        if head is not None:
            current = found.setdefault(int(head[1]), [0, 0])
        elif link is not None and current is not None:
            current[0] += "inactive" not in link[2].lower()
            current[1] += 1
    return tuple((found[index][0], found[index][1]) for index in sorted(found))


def _matrix(text: str, cell: re.Pattern[str]) -> Iterator[tuple[int, int, str]]:
    """Yield row, column and word of a table of GPUs, without other devices and columns."""
    columns: list[int | None] = []
    for line in _ANSI.sub("", text).splitlines()[:_MAX_LINES]:
        words = line.split()
        row = _GPU.match(words[0]) if words else None
        if row is not None and len(words) > 1 and _GPU.match(words[1]):
            columns = [int(m[1]) if (m := _GPU.match(word)) else None for word in words]
        elif row is not None and not columns:
            columns = [int(row[1])]  # the head of a node with one GPU
        elif row is not None:
            for column, word in zip(columns, words[1:], strict=False):
                if column is not None and cell.match(word):
                    yield int(row[1]), column, word


# PCI.


def redirects(config: bytes) -> bool | None:
    """Return whether a bridge redirects traffic between devices below it to the processor.

    Args:
        config: Its configuration space; without root the kernel gives the first 64 bytes only.

    Returns:
        None when that can't be read.
    """
    if len(config) <= _FIRST_EXTENDED:
        return None
    at, seen = _FIRST_EXTENDED, set()
    while at >= _FIRST_EXTENDED and at not in seen and at + 8 <= len(config):
        seen.add(at)
        (head,) = struct.unpack_from("<I", config, at)
        if head & 0xFFFF == _ACS_ID:
            (control,) = struct.unpack_from("<H", config, at + 6)
            return bool(control & _REDIRECT)
        at = head >> 20
    return False


def count_redirecting(root: str = "/") -> int | None:
    """Return how many PCI bridges redirect; None when none of them can be read."""
    folder = os.path.join(root, "sys/bus/pci/devices")
    found: list[bool] = []
    for path in _bridges([os.path.join(folder, name) for name in list_folder(folder)]):
        said = redirects(read_bytes(os.path.join(path, "config")))
        found += [said] if said is not None else []
    return sum(found) if found else None


def _bridges(paths: Sequence[str]) -> Iterator[str]:
    number = 0
    for path in paths:
        if read_text(os.path.join(path, "class")).startswith(_BRIDGE_CLASS):
            number += 1
            if number > _MAX_BRIDGES:
                return
            yield path
