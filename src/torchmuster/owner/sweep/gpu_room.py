"""Whether the memory of a GPU has room for one more member of a sweep: decides without I/O, and is told what was seen.

A member that runs alone on its GPU always may. Another one starts beside it only while what is free is at least what one takes: what
the user says, or what the first was seen to use when that no longer grew. A member that has just begun has allocated nothing yet,
so each that runs counts with all that one takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchmuster.model.display.text import show_size

STEADY_S = 10.0  # without growth: the first steps have allocated what the others do
_GROWTH = 1.01
_MARGIN = 1.1  # of what was seen: a fragmented allocator, a larger batch


@dataclass(frozen=True, slots=True)
class MemoryOfGpu:
    """What nvidia-smi says of one GPU."""

    total_bytes: int
    used_bytes: int


@dataclass(slots=True)
class _Gpu:
    """One GPU.

    Attributes:
        others_bytes: Used by others than our members.
        most_bytes: The most that one of our members was seen to use.
        grown_at: When that last grew; None before a member was seen.
    """

    memory: MemoryOfGpu | None = None
    others_bytes: int = 0
    most_bytes: int = 0
    grown_at: float | None = None
    slots: set[int] = field(default_factory=set)


class GpuRoom:
    """The room on GPUs that slots share.

    Args:
        gpus: Those of each slot.
        need_bytes: What each worker takes, as the user says; None: as the first is seen to.
    """

    def __init__(self, gpus: Sequence[Sequence[str]], need_bytes: int | None = None) -> None:
        self._of_slot = [tuple(dict.fromkeys(ids)) for ids in gpus]
        self._gpus = {gpu: _Gpu() for ids in self._of_slot for gpu in ids}
        self._said_need = need_bytes
        self._need_bytes = need_bytes
        self._is_blind = False

    @property
    def is_shared(self) -> bool:
        """Say whether any GPU has more than one slot."""
        ids = [gpu for found in self._of_slot for gpu in found]
        return len(ids) > len(set(ids))

    @property
    def can_see(self) -> bool:
        """Say whether the memory of all these GPUs is known."""
        return not self._is_blind

    def started(self, slot: int) -> None:
        """Take that a member begins in a slot."""
        for gpu in self._of_slot[slot]:
            self._gpus[gpu].slots.add(slot)

    def ended(self, slot: int) -> None:
        """Take that it has ended: what it was seen to use is all that one uses."""
        for name in self._of_slot[slot]:
            gpu = self._gpus[name]
            gpu.slots.discard(slot)
            if gpu.most_bytes:
                self._note_need(gpu)

    def looked(self, found: Mapping[str, MemoryOfGpu], now: float) -> None:
        """Take what all GPUs have now; where it was never told nobody is kept waiting for it."""
        if not self._gpus.keys() <= found.keys():
            self._is_blind = any(gpu.memory is None for gpu in self._gpus.values())
            return
        for name, gpu in self._gpus.items():
            gpu.memory = memory = found[name]
            if not gpu.slots:
                gpu.others_bytes = memory.used_bytes
                continue
            use = max(0, memory.used_bytes - gpu.others_bytes) // len(gpu.slots)
            if gpu.grown_at is None or use > gpu.most_bytes * _GROWTH:
                gpu.grown_at = now
            gpu.most_bytes = max(gpu.most_bytes, use)
            # One that has allocated nothing is not steady: it imports torch, or reads its data.
            if gpu.most_bytes and now - gpu.grown_at >= STEADY_S:
                self._note_need(gpu)

    def _note_need(self, gpu: _Gpu) -> None:
        if self._said_need is None:
            self._need_bytes = max(self._need_bytes or 0, int(gpu.most_bytes * _MARGIN))

    def why_not(self, slot: int) -> str | None:
        """Return why no member can start in a slot now; None where one can."""
        if self._is_blind:
            return None
        for name in self._of_slot[slot]:
            gpu = self._gpus[name]
            beside = len(gpu.slots - {slot})
            if not beside:
                continue
            if self._need_bytes is None or gpu.memory is None:
                return f"what the first member takes of GPU {name} is not known yet"
            counted = gpu.memory.total_bytes - gpu.others_bytes - beside * self._need_bytes
            free = max(0, min(counted, gpu.memory.total_bytes - gpu.memory.used_bytes))
            if free < self._need_bytes:
                whose = "was seen to use" if self._said_need is None else "needs"
                return (
                    f"GPU {name} has {show_size(free)} left beside {beside}, a member {whose}"
                    f" {show_size(self._need_bytes)}"
                )
        return None
