"""What workers leave for the agent of their node: heartbeats, and memory that outlives them.

The memory is anonymous files held by the agent. Workers map them, so no data passes through the
agent. The workers of the next attempt find them there. The kernel frees them when the agent ends in
any way, while a file in /dev/shm would remain.
"""

import os
import re

from torchmuster.core.model import progress as heartbeat
from torchmuster.core.model.progress import HeartbeatRecord
from torchmuster.core.net.ipc import AgentAnswer, AskMemory, CallFailed, MemoryHeld

MOST_FILES = 512
_NAME = re.compile(r"[a-z0-9.-]{1,64}")


class HeldMemory:
    """The memory files that an agent holds, by name; empty ones take no memory."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def close(self) -> None:
        """Release all memory."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    @property
    def is_used(self) -> bool:
        """Return whether anything is held."""
        return bool(self._descriptors)

    def answer(self, ask: AskMemory) -> AgentAnswer:
        """Drop the files in `ask.drop`, create those missing in `ask.names`; return all held."""
        for name in ask.drop:
            if name in self._descriptors:
                os.close(self._descriptors.pop(name))
        wanted = [name for name in dict.fromkeys(ask.names) if name not in self._descriptors]
        if any(not _NAME.fullmatch(name) for name in wanted):
            return CallFailed(what="memory has a name of small letters, digits, dots and hyphens")
        if len(self._descriptors) + len(wanted) > MOST_FILES:
            return CallFailed(what=f"an agent holds {MOST_FILES} pieces of memory at most")
        try:
            for name in wanted:
                self._descriptors[name] = os.memfd_create(f"muster-{name}", os.MFD_CLOEXEC)
        except OSError as error:
            return CallFailed(what="the node gives no memory", why=os.strerror(error.errno or 0))
        return MemoryHeld(pid=os.getpid(), descriptors=dict(self._descriptors))


def last_step(folder: str, attempt: int, rank: int) -> int | None:
    """Return the last step that a rank has done, also after its end; None if it reported none."""
    beat = read_beat(folder, attempt, rank)
    return beat.step if beat is not None and beat.steps_here else None


def read_beat(folder: str, attempt: int, rank: int) -> HeartbeatRecord | None:
    """Return the last heartbeat of a rank; None if there is none."""
    path = heartbeat.heartbeat_path(folder, attempt, rank)
    for _ in range(3):  # it may be half-written
        try:
            with open(path, "rb") as file:
                page = file.read(heartbeat.PAGE_BYTES)
        except OSError:
            return None
        beat = heartbeat.unpack(page)
        if beat is not None:
            return beat
    return None
