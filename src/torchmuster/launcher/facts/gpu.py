"""Query a node's GPUs: nvidia-smi, NVML, PCI and the kernel's log. Nothing initializes CUDA."""

import contextlib
import ctypes
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from torchmuster.core import proc
from torchmuster.core.node import kernel
from torchmuster.errors import MusterError

# Utilization and used memory of a GPU, from the driver's library NVML.
#
# We load NVML by ctypes: nodes have only the standard library, and every machine with NVIDIA's
# driver has libnvidia-ml.so.1. It makes no CUDA context. We look it up once; if it is missing, the
# values are unknown.


_LIBRARY = "libnvidia-ml.so.1"
_MIB = 1 << 20


# Source: nvml.h. Both structures have been the same since the first version of the library.
class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """The use of one GPU at one moment; None if the driver doesn't report it (MIG utilization)."""

    percent: int | None = None
    mib: int | None = None


class GpuUseReader:
    """Reads the use of GPUs from the driver; use it in one thread.

    It raises no errors: what can't be read is None.

    Args:
        load: Returns the library.
    """

    def __init__(self, load: Callable[[], Any] = lambda: ctypes.CDLL(_LIBRARY)) -> None:
        self._load = load
        self._nvml: Any = None
        self._is_loaded = False
        self._handles: dict[str, ctypes.c_void_p | None] = {}

    def read(self, gpu_id: str) -> GpuUse:
        """Return the use of a GPU, named by an index or a UUID as in `CUDA_VISIBLE_DEVICES`."""
        if not self._is_loaded:
            self._is_loaded = True
            with contextlib.suppress(OSError, AttributeError):
                nvml = self._load()
                self._nvml = nvml if nvml.nvmlInit_v2() == 0 else None
        if self._nvml is None:
            return GpuUse()
        if gpu_id not in self._handles:
            self._handles[gpu_id] = self._find(gpu_id)
        handle = self._handles[gpu_id]
        if handle is None:
            return GpuUse()
        use, memory = _Utilization(), _Memory()
        knows_use = self._call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(use))
        knows_memory = self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return GpuUse(
            percent=int(use.gpu) if knows_use else None,
            mib=int(memory.used) // _MIB if knows_memory else None,
        )

    def _find(self, gpu_id: str) -> ctypes.c_void_p | None:
        handle = ctypes.c_void_p()
        if gpu_id.isdecimal():
            found = self._call(
                "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(gpu_id)), ctypes.byref(handle)
            )
        else:
            found = self._call("nvmlDeviceGetHandleByUUID", gpu_id.encode(), ctypes.byref(handle))
        return handle if found else None

    def _call(self, name: str, *arguments: Any) -> bool:
        try:
            return bool(getattr(self._nvml, name)(*arguments) == 0)
        except AttributeError:  # a library that lacks it
            return False


# How the GPUs of a node are connected (NVLink, PCIe, bridges), parsed from text.
#
# Sources: `nvidia-smi topo -m` and its legend, `nvidia-smi nvlink -s`, `nvidia-smi topo -p2p r`,
# the PCI Express base specification (extended capability 0x0D is ACS).


_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU(\d{1,3})$")
_KIND = re.compile(r"(NV\d{1,2}|PIX|PXB|PHB|NODE|SYS)$")
_LINK_GPU = re.compile(r"^GPU (\d{1,3}):")
_LINK = re.compile(r"^\s+Link (\d{1,2}):\s*(.*?)\s*$")
_P2P = re.compile(r"(OK|CNS|GNS|TNS|NS|DR|U)$")
_MAX_LINES = 2000
_MAX_BRIDGES = 512
_ACS_ID, _FIRST_EXTENDED = 0x0D, 0x100
_REDIRECT = 0x04 | 0x08  # redirects requests and completions to the root
_BRIDGE_CLASS = "0x0604"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLinks:
    """The links between the GPUs of a node.

    Attributes:
        kinds: The kinds of links between pairs, each once: `NV18`, `PIX`, `SYS`; empty with one
            GPU.
        nvlinks: For each GPU by index, how many of its NVLinks are up, and how many it has.
        no_p2p: Pairs that can't read each other's memory, with the tool's code for the reason: `0-1
            CNS`.
        num_redirecting: Number of PCI bridges that send traffic between devices to the processor
            (ACS); None if unreadable.
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
    """Return the pairs that are not OK in `nvidia-smi topo -p2p r`, each once, as `0-1 CNS`."""
    cells = _matrix(text, _P2P)
    return tuple(f"{a}-{b} {word}" for a, b, word in cells if word != "OK" and a < b)


def read_nvlinks(text: str) -> tuple[tuple[int, int], ...]:
    """Return (links that are up, all links) of each GPU, from `nvidia-smi nvlink -s`."""
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
    """Yield (row, column, cell) of a table of GPUs, without other devices and columns."""
    columns: list[int | None] = []
    for line in _ANSI.sub("", text).splitlines()[:_MAX_LINES]:
        words = line.split()
        row = _GPU.match(words[0]) if words else None
        if row is not None and len(words) > 1 and _GPU.match(words[1]):
            columns = [int(m[1]) if (m := _GPU.match(word)) else None for word in words]
        elif row is not None and not columns:
            columns = [int(row[1])]  # the header on a node with one GPU
        elif row is not None:
            for column, word in zip(columns, words[1:], strict=False):
                if column is not None and cell.match(word):
                    yield int(row[1]), column, word


# PCI.


def redirects(config: bytes) -> bool | None:
    """Return whether a bridge redirects traffic between devices below it to the processor.

    Args:
        config: Its configuration space; without root the kernel gives only the first 64 bytes.

    Returns:
        None if the extended configuration can't be read.
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
    """Return how many PCI bridges redirect traffic; None if none of them can be read."""
    folder = os.path.join(root, "sys/bus/pci/devices")
    paths = (os.path.join(folder, name) for name in kernel.list_folder(folder))
    bridges = (
        p for p in paths if kernel.read_text(os.path.join(p, "class")).startswith(_BRIDGE_CLASS)
    )
    found: list[bool] = []
    for path in islice(bridges, _MAX_BRIDGES):
        said = redirects(kernel.read_bytes(os.path.join(path, "config")))
        found += [said] if said is not None else []
    return sum(found) if found else None


Ask = Callable[[Sequence[str], float], proc.CommandOutput]
# Fields of `nvidia-smi --query-gpu`; a driver that lacks one field refuses the whole query.
_BASIC = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used", "compute_mode")
_HEALTH = (
    "index",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.hw_thermal_slowdown",
    "clocks_throttle_reasons.hw_power_brake_slowdown",
    "pcie.link.width.current",
    "pcie.link.width.max",
)


def _query(names: Sequence[str], of: str = "gpu") -> tuple[str, ...]:
    return ("nvidia-smi", f"--query-{of}={','.join(names)}", "--format=csv,noheader,nounits")


# On Ampere and later: bad memory rows that wait to be remapped, or could not be.
_ROWS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
_MORE: Mapping[str, Sequence[str]] = {
    "rows": _query(_ROWS, "remapped-rows"),
    "plain": ("nvidia-smi",),
    "topology": ("nvidia-smi", "topo", "-m"),
    "p2p": ("nvidia-smi", "topo", "-p2p", "r"),
    "nvlink": ("nvidia-smi", "nvlink", "-s"),
}
_LEAST_S = 0.3
_MAX_GPUS = 64
_MAX_XIDS = 32
_XID = re.compile(rb"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
_MAX_KERNEL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU.

    Attributes:
        num_ecc_errors: Uncorrected errors since the driver was loaded; None if it does not count
            them.
        throttled: Why the hardware has lowered its clocks.
        must_be_reset: Bad rows of its memory wait to be remapped, or could not be.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int
    used_bytes: int
    compute_mode: str = "Default"
    num_ecc_errors: int | None = None
    throttled: tuple[str, ...] = ()
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    must_be_reset: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """All GPUs of a node.

    Attributes:
        visible: The GPUs in CUDA_VISIBLE_DEVICES, or all.
        num_devices: The number of GPUs in /proc and /dev.
        cuda: The newest CUDA that the driver supports, as `12.4`; empty if unknown.
        xids: The kernel's error messages about GPUs: device and Xid number.
        links: The links between them; only in the long form.
        why_not: Why nvidia-smi listed no GPU.
    """

    gpus: tuple[Gpu, ...] = ()
    visible: tuple[str, ...] = ()
    num_devices: int = 0
    driver: str = ""
    cuda: str = ""
    xids: tuple[str, ...] = ()
    links: GpuLinks = field(default_factory=GpuLinks)
    has_iommu: bool = False
    why_not: str = ""


def collect_gpus(
    environment: Mapping[str, str],
    ask: Ask,
    limit_s: float,
    *,
    is_long: bool = False,
    root: str = "/",
) -> GpuFacts:
    """Return the GPUs of this node; run nvidia-smi only if /proc or /dev has devices."""
    num_devices = kernel.count_devices(root)
    visible = tuple(kernel.visible_gpus(environment, root)[:_MAX_GPUS])
    if not num_devices:
        return GpuFacts(visible=visible)
    began = time.monotonic()
    gpus, driver, why_not = ask_gpus(ask, limit_s)
    more: Mapping[str, str] = {}
    if gpus and is_long:
        left_s = limit_s - (time.monotonic() - began)
        more = _ask_all(ask, {"health": _query(_HEALTH), **_MORE}, max(left_s, _LEAST_S))
        gpus = add_rows(add_health(gpus, more["health"]), more["rows"])
    cuda = re.search(r"CUDA Version: ([0-9.]+)", more.get("plain", ""))
    return GpuFacts(
        gpus=gpus,
        visible=visible,
        num_devices=num_devices,
        driver=driver or driver_version(root),
        cuda=cuda.group(1) if cuda else "",
        xids=read_xids(_log_of_driver(root)) if is_long else (),
        links=_links(more, root) if len(gpus) > 1 and is_long else GpuLinks(),
        has_iommu=_has_iommu(root),
        why_not=why_not,
    )


def ask_gpus(ask: Ask, limit_s: float) -> tuple[tuple[Gpu, ...], str, str]:
    """Return all GPUs by nvidia-smi, the driver's version, and why there are none (else empty)."""
    answer, why_not = _ask(ask, _query(_BASIC), limit_s)
    gpus, driver = read_gpus(answer)
    return gpus, driver, "" if gpus else why_not or "nvidia-smi named no GPU"


def _links(said: Mapping[str, str], root: str) -> GpuLinks:
    return GpuLinks(
        kinds=read_topology(said["topology"])[:_MAX_XIDS],
        nvlinks=read_nvlinks(said["nvlink"])[:_MAX_GPUS],
        no_p2p=read_p2p(said["p2p"])[:_MAX_GPUS],
        num_redirecting=count_redirecting(root),
    )


def _ask_all(ask: Ask, questions: Mapping[str, Sequence[str]], limit_s: float) -> dict[str, str]:
    """Run several queries in parallel, as each wakes the driver for up to a second.

    Late answers are empty.
    """
    probes = {name: partial(_ask, ask, argv, limit_s) for name, argv in questions.items()}
    answers, _ = run_probes(probes, limit_s)
    return {name: answers[name][0] if name in answers else "" for name in questions}


def run_probes(
    parts: Mapping[str, Callable[[], Any]],
    limit_s: float,
    describe: Callable[[Exception], str] = lambda error: f"{type(error).__name__}: {error}"[:200],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run all probes in parallel; return their results, and the reasons for missing ones."""
    found: dict[str, Any] = {}
    unknown: dict[str, str] = {}

    def run(name: str, probe: Callable[[], Any]) -> None:
        try:
            found[name] = probe()
        except Exception as error:  # noqa: BLE001 - one failed probe must not affect the others
            unknown[name] = describe(error)

    threads = [
        threading.Thread(target=run, args=part, name=f"facts-{part[0]}", daemon=True)
        for part in parts.items()
    ]
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    found_now, unknown_now = dict(found), dict(unknown)
    for name in parts:
        if name not in found_now and name not in unknown_now:
            unknown_now[name] = f"no answer within {limit_s:g} s"
    return found_now, unknown_now


def driver_version(root: str = "/") -> str:
    """Return the version of NVIDIA's kernel driver; empty if unknown."""
    text = kernel.read_text(os.path.join(root, "proc/driver/nvidia/version"))
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found.group(1) if found else ""


def _ask(ask: Ask, argv: Sequence[str], limit_s: float) -> tuple[str, str]:
    """Return the output of a command, or why there is none."""
    try:
        answer = ask(argv, limit_s)
    except MusterError as error:
        return "", error.why or error.what
    if answer.status is None:
        return "", f"nvidia-smi did not answer within {limit_s:g} s"
    if answer.status != 0:
        said = (answer.stdout + answer.stderr).decode(errors="replace").strip().splitlines()
        return "", f"nvidia-smi: {said[-1][:200] if said else f'exit code {answer.status}'}"
    return answer.stdout.decode(errors="replace"), ""


def read_gpus(text: str) -> tuple[tuple[Gpu, ...], str]:
    """Return GPUs and driver version from the answer to the basic query; skip invalid rows."""
    gpus, driver = [], ""
    for cells in _rows_of(text, _BASIC):
        if not cells[0].isdecimal():
            continue
        total, used = _number(cells[4]), _number(cells[5])
        driver = cells[3]
        gpus.append(
            Gpu(
                index=int(cells[0]),
                uuid=cells[1],
                name=cells[2],
                memory_bytes=(total or 0) * _MIB,
                used_bytes=(used or 0) * _MIB,
                compute_mode=cells[6],
            )
        )
    return tuple(gpus), driver


def add_health(gpus: Sequence[Gpu], text: str) -> tuple[Gpu, ...]:
    """Return the GPUs with the facts of the health query."""
    rows = {int(cells[0]): cells for cells in _rows_of(text, _HEALTH) if cells[0].isdecimal()}
    return tuple(_with_health(gpu, rows[gpu.index]) if gpu.index in rows else gpu for gpu in gpus)


def add_rows(gpus: Sequence[Gpu], text: str) -> tuple[Gpu, ...]:
    """Return the GPUs, `must_be_reset` set if memory rows are bad; older ones don't report it."""
    rows = _rows_of(text, _ROWS)
    bad = {cells[0] for cells in rows if {"yes", "1"} & {cell.lower() for cell in cells[1:]}}
    return tuple(replace(gpu, must_be_reset=gpu.uuid in bad) for gpu in gpus)


def _rows_of(text: str, query: Sequence[str]) -> Iterator[list[str]]:
    """Yield the cells of each row that answers a query, whole rows only."""
    for row in text.splitlines()[:_MAX_GPUS]:
        cells = [cell.strip() for cell in row.split(",")]
        if len(cells) == len(query):
            yield cells


def _with_health(gpu: Gpu, cells: Sequence[str]) -> Gpu:
    reasons = {"thermal slowdown": cells[2], "power brake": cells[3]}
    return replace(
        gpu,
        num_ecc_errors=_number(cells[1]),
        throttled=tuple(word for word, state in reasons.items() if state == "Active"),
        pcie_width=_number(cells[4]),
        pcie_max_width=_number(cells[5]),
    )


def _number(text: str) -> int | None:
    found = re.match(r"\d+", text)
    return int(found.group()) if found else None


def read_xids(log: bytes) -> tuple[str, ...]:
    """Return device and number of each distinct Xid in the kernel's log."""
    found = {f"{device.decode()} {number.decode()}" for device, number in _XID.findall(log)}
    return tuple(sorted(found))[:_MAX_XIDS]


def _log_of_driver(root: str) -> bytes:
    """Return the driver's messages in the kernel's log, if it is readable."""
    parts, size = [], 0
    for record in kernel.log_records(root):
        if size > _MAX_KERNEL_BYTES:
            break
        if b"NVRM" in record:
            parts.append(record)
            size += len(record)
    return b"".join(parts)


def _has_iommu(root: str) -> bool:
    """Return whether an IOMMU translates addresses, which breaks or slows copies between GPUs."""
    words = kernel.read_text(os.path.join(root, "proc/cmdline")).split()
    passes = any("iommu" in word and word.endswith(("=pt", "=off")) for word in words)
    return bool(words and kernel.list_folder(os.path.join(root, "sys/class/iommu"))) and not passes
