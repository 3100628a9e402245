"""The memory of GPUs, by the numbers in torch's message; and losses that are no numbers any more."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.events import LogEvent, LogFinding
from torchmuster.diagnose.explain.rules.rows import HIGH, MEDIUM, Row, Weight, found_by, words_of

_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "bytes": 1}
_SIZE = r"(?P<{0}>[\d.]+) (?P<{0}_unit>[KMGT]iB|bytes|B)"
# torch 1.x to 2.0: (GPU 0; 23.65 GiB total capacity; 12.87 GiB already allocated; 496.00 MiB free; 13.06 GiB reserved ...
# torch 2.1 on: GPU 0 has a total capacity of 79.19 GiB of which 41.50 MiB is free. ... this process has 4.28 GiB memory in use
_ASKED = re.compile(r"Tried to allocate " + _SIZE.format("asked"))
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
_ALLOWED = re.compile(rf"\b{_SIZE.format('allowed')} allowed")
_MUCH = 0.3  # of the GPU
_LEAST_NAN_LINES = 2

_TAKEN = Row(
    cause="gpu-memory-taken",
    error="GPU {gpu} has no memory left because other processes hold {others} of its {total}; this one has {own}",
    hint="end the others or choose a free GPU: a leftover of an earlier run, another user, or several ranks on one GPU"
    " (torch.cuda.set_device(LOCAL_RANK))",
    confirm="nvidia-smi   on that node",
    confidence=MEDIUM,
    weight=Weight.PROGRAM + 3,
    num_lines=1,
)
_FRAGMENTED = Row(
    cause="cuda-out-of-memory",
    error="the memory of GPU {gpu} ran out by fragmentation: {unused} are reserved by torch and unused, {asked} in one piece were wanted",
    hint="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or batches of more even size",
    confirm="torch.cuda.memory_summary()",
    confidence=MEDIUM,
    weight=Weight.PROGRAM + 3,
    num_lines=1,
)
_CAPPED = Row(
    cause="cuda-out-of-memory",
    error="the process has reached its own cap of {allowed} on GPU {gpu}, not the end of the GPU's memory",
    hint="raise the cap: torch.cuda.set_per_process_memory_fraction, or the option of the program that calls it",
    confidence=MEDIUM,
    weight=Weight.PROGRAM + 3,
    num_lines=1,
)
_DIVERGED = Row(
    cause="not-finite",
    error="the loss is no finite number any more: the training has diverged, or its data has NaN in it",
    hint="lower the learning rate or warm up longer, clip gradients, prefer bf16 to fp16; look at the batch of the first such step",
    confirm="torch.autograd.set_detect_anomaly(True)   names the operation",
    confidence=MEDIUM,
    weight=Weight.COLLECTIVE + 3,
    num_lines=2,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """What torch's message says of a GPU, in bytes; None where it does not."""

    gpu: str
    asked: float | None
    total: float | None
    free: float | None
    own: float | None
    unused: float | None

    @property
    def others(self) -> float:
        """What neither is free nor belongs to the process that wrote the message."""
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
    )


def gpu_memory(case: Case) -> Iterator[LogFinding]:
    """A GPU that others fill, or memory in pieces that are too small: a smaller batch would help neither."""
    for event in case.of("cuda_oom"):
        memory = read_memory(words_of(event))
        allowed = _bytes(_ALLOWED, words_of(event))
        if allowed is not None and memory.free and memory.free > (memory.asked or 0):
            names = {**_names(memory), "allowed": f"{allowed / (1 << 30):.1f} GiB"}
            yield found_by(case, _CAPPED, [event], names)
            return
        if memory.total is None:
            continue
        if memory.others > _MUCH * memory.total:
            yield found_by(case, _TAKEN, [event], _names(memory))
            return
        if (
            memory.unused
            and memory.asked
            and memory.unused > max(memory.asked, _MUCH * memory.total)
        ):
            yield found_by(case, _FRAGMENTED, [event], _names(memory))
            return


def not_finite(case: Case) -> Iterator[LogFinding]:
    """Losses that are NaN or infinite to the end; one step that the scaler skips is none."""
    found = case.of("not_finite")
    if len(found) < _LEAST_NAN_LINES or _was_finite_again(case, found[-1]):
        return
    yield found_by(case, _DIVERGED, found, confidence=HIGH if len(found) > 20 else MEDIUM)


def _was_finite_again(case: Case, last: LogEvent) -> bool:
    return any(
        step.line.order > last.line.order and re.search(r"loss\W{0,3}\d", step.line.text)
        for log in case.record.logs
        if log.path == last.line.path
        for step in log.last_progress.values()
    )


def _bytes(regex: re.Pattern[str], text: str) -> float | None:
    found = regex.search(text)
    if found is None:
        return None
    name = next(
        key for key, value in found.groupdict().items() if value and not key.endswith("_unit")
    )
    return float(found[name]) * _SIZES[found[f"{name}_unit"]]


def _names(memory: GpuMemory) -> dict[str, str]:
    sizes = {
        "others": memory.others,
        "total": memory.total,
        "own": memory.own,
        "unused": memory.unused,
        "asked": memory.asked,
    }
    words = {
        name: f"{size / (1 << 30):.1f} GiB" for name, size in sizes.items() if size is not None
    }
    return {"gpu": memory.gpu, **words}
