"""The GPUs of a node from nvidia-smi, and the kernel's messages about them; nothing here initialises CUDA."""

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchmuster import proc
from torchmuster.diagnose.facts.gpu_links import (
    GpuLinks,
    count_redirecting,
    read_nvlinks,
    read_p2p,
    read_topology,
)
from torchmuster.diagnose.facts.gpus import count_devices, visible_gpus
from torchmuster.diagnose.facts.kernel import list_folder, log_records, read_text
from torchmuster.errors import MusterError

Ask = Callable[[Sequence[str], float], proc.Answered]
# Fields of `nvidia-smi --query-gpu`; a driver that does not know one refuses them all.
_BASIC = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used", "compute_mode")
_HEALTH = (
    "index",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.hw_thermal_slowdown",
    "clocks_throttle_reasons.hw_power_brake_slowdown",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
# Of Ampere and later: bad rows of memory that wait to be replaced, or could not be.
_ROWS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
_MORE: Mapping[str, Sequence[str]] = {
    "rows": (
        "nvidia-smi",
        f"--query-remapped-rows={','.join(_ROWS)}",
        "--format=csv,noheader,nounits",
    ),
    "plain": ("nvidia-smi",),
    "topology": ("nvidia-smi", "topo", "-m"),
    "p2p": ("nvidia-smi", "topo", "-p2p", "r"),
    "nvlink": ("nvidia-smi", "nvlink", "-s"),
}
_MIB = 1 << 20
_LEAST_S = 0.3
_MAX_GPUS = 64
_MAX_XIDS = 32
_XID = re.compile(rb"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")
_MAX_KERNEL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU.

    Attributes:
        num_ecc_errors: Uncorrected errors since the driver was loaded; None if it does not count them.
        throttled: Why its clocks are lowered by the hardware, in words.
        must_be_reset: Faulty rows of its memory wait to be replaced, or could not be.
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
        xids: The kernel's messages about GPUs: device and number.
        links: The links between them; the long form only.
        why_not: Why nvidia-smi gave no more facts.
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
    """Return the GPUs of this node; without devices in /proc and /dev, nvidia-smi is not run."""
    num_devices = count_devices(root)
    visible = tuple(visible_gpus(environment, root)[:_MAX_GPUS])
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
    """Return what nvidia-smi says of all GPUs, the driver, and why it named none; empty where it did."""
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
    """Run several queries in parallel: each wakes up the driver, which takes up to a second. Late answers are empty."""
    answers: dict[str, str] = {}

    def run(name: str, argv: Sequence[str]) -> None:
        answers[name] = _ask(ask, argv, limit_s)[0]

    threads = [
        threading.Thread(target=run, args=question, name=f"ask-{question[0]}", daemon=True)
        for question in questions.items()
    ]
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    said = dict(answers)
    return {name: said.get(name, "") for name in questions}


def driver_version(root: str = "/") -> str:
    """Return the version of the kernel's driver."""
    text = read_text(os.path.join(root, "proc/driver/nvidia/version"))
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found.group(1) if found else ""


def _query(names: Sequence[str]) -> tuple[str, ...]:
    return ("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")


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
    """Return GPUs and driver from the answer to the query; skip invalid rows."""
    gpus, driver = [], ""
    for row in text.splitlines()[:_MAX_GPUS]:
        cells = [cell.strip() for cell in row.split(",")]
        if len(cells) != len(_BASIC) or not cells[0].isdecimal():
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
    """Return the GPUs with the facts of the second query."""
    rows = {}
    for row in text.splitlines()[:_MAX_GPUS]:
        cells = [cell.strip() for cell in row.split(",")]
        if len(cells) == len(_HEALTH) and cells[0].isdecimal():
            rows[int(cells[0])] = cells
    return tuple(_with_health(gpu, rows[gpu.index]) if gpu.index in rows else gpu for gpu in gpus)


def add_rows(gpus: Sequence[Gpu], text: str) -> tuple[Gpu, ...]:
    """Return the GPUs with whether faulty rows of their memory wait for a reset; older GPUs don't report it."""
    bad = set()
    for row in text.splitlines()[:_MAX_GPUS]:
        cells = [cell.strip() for cell in row.split(",")]
        if len(cells) == len(_ROWS) and {"yes", "1"} & {cell.lower() for cell in cells[1:]}:
            bad.add(cells[0])
    return tuple(replace(gpu, must_be_reset=gpu.uuid in bad) for gpu in gpus)


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
    """Return device and number of every kind of Xid in the kernel's log."""
    found = {f"{device.decode()} {number.decode()}" for device, number in _XID.findall(log)}
    return tuple(sorted(found))[:_MAX_XIDS]


def _log_of_driver(root: str) -> bytes:
    """Return the driver's messages in the kernel's log, if it is readable."""
    parts, size = [], 0
    for record in log_records(root):
        if size > _MAX_KERNEL_BYTES:
            break
        if b"NVRM" in record:
            parts.append(record)
            size += len(record)
    return b"".join(parts)


def _has_iommu(root: str) -> bool:
    """Return whether the kernel translates devices' addresses, which makes direct copies between GPUs fail or slow."""
    words = read_text(os.path.join(root, "proc/cmdline")).split()
    passes = any("iommu" in word and word.endswith(("=pt", "=off")) for word in words)
    return bool(words and list_folder(os.path.join(root, "sys/class/iommu"))) and not passes
