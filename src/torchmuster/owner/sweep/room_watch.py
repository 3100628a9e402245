"""Asks nvidia-smi for the memory of GPUs that slots share, and keeps slots closed for which there is no room."""

import asyncio
import time
from collections.abc import Callable

from torchmuster import proc
from torchmuster.diagnose.facts.gpu import Ask, Gpu, ask_gpus
from torchmuster.owner.sweep.gpu_room import GpuRoom, MemoryOfGpu
from torchmuster.owner.sweep.policy import SweepPolicy

_LOOK_EVERY_S = 2.0
_ASK_S = 10.0


class RoomWatch:
    """Closes and opens the slots of a sweep by what their GPUs have left.

    Args:
        room: Decides.
        say: Tells the user a sentence.
        ask: Runs a command.
    """

    def __init__(
        self, room: GpuRoom, say: Callable[[str], None], ask: Ask = proc.ask_beside
    ) -> None:
        self.room = room
        self._say, self._ask = say, ask
        self._closed: dict[int, str] = {}
        self._told: set[str] = set()

    async def look(self) -> None:
        """Ask once; where there is no answer nobody is kept waiting, and that is said."""
        gpus, _, why_not = await asyncio.to_thread(ask_gpus, self._ask, _ASK_S)
        self.room.looked(_by_names(gpus), time.monotonic())
        if not self.room.can_see and "" not in self._told:
            self._told.add("")
            why = why_not or "nvidia-smi does not name them as CUDA_VISIBLE_DEVICES does"
            self._say(
                f"members share GPUs whose memory can't be asked for ({why}): whether they fit is not known"
            )

    async def look_always(self, looked: Callable[[], None]) -> None:
        """Ask every few seconds while somebody may wait for it."""
        while self.room.can_see:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.look()
            looked()

    def fit(self, policy: SweepPolicy) -> None:
        """Close the free slots that have no room, and open those that have it again."""
        for slot in range(policy.num_slots):
            if slot in policy.running.values():
                continue
            why = self.room.why_not(slot)
            if why is None and self._closed.pop(slot, None) is not None:
                policy.opened(slot)
            elif why is not None:
                policy.closed(slot)
                self._closed[slot] = why
                self._tell(why)

    def _tell(self, why: str) -> None:
        gpu = why.partition(" has ")[0] if " has " in why else ""
        if gpu and gpu not in self._told:
            self._told.add(gpu)
            self._say(f"{why}: the next one waits")


def _by_names(gpus: tuple[Gpu, ...]) -> dict[str, MemoryOfGpu]:
    """Return the memory of GPUs by all that CUDA_VISIBLE_DEVICES may call them."""
    found: dict[str, MemoryOfGpu] = {}
    for gpu in gpus:
        memory = MemoryOfGpu(gpu.memory_bytes, gpu.used_bytes)
        found |= {str(gpu.index): memory, gpu.uuid: memory}
    return found
