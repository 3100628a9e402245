"""What workers leave for the agent of their node: heartbeats, and memory that outlives them.

The memory is files without a name in any folder, held by the agent. A worker writes into them by mapping them, so nothing
passes through the agent. They are there for the workers of the next attempt, and the kernel frees them with the agent, however
that ends: a file in /dev/shm would stay behind.
"""

import os
import re

from torchmuster.core.model import progress as heartbeat
from torchmuster.core.model.progress import HeartbeatRecord
from torchmuster.core.net.ipc import AgentAnswer, AskMemory, CallFailed, MemoryHeld

MOST_FILES = 512
_NAME = re.compile(r"[a-z0-9.-]{1,64}")


class HeldMemory:
    """The files that an agent holds, by name; empty ones take no memory."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def close(self) -> None:
        """Give all of it back."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    @property
    def is_used(self) -> bool:
        """Say whether anything is held."""
        return bool(self._descriptors)

    def answer(self, ask: AskMemory) -> AgentAnswer:
        """Drop what `ask.drop` names, make what `ask.names` names and is not there, and tell all that is held."""
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
    """Return the last step that a rank has done, also after its end; None where it did not say."""
    beat = read_beat(folder, attempt, rank)
    return beat.step if beat is not None and beat.steps_here else None


def read_beat(folder: str, attempt: int, rank: int) -> HeartbeatRecord | None:
    """Return the last heartbeat of a rank; None where it has made none."""
    path = heartbeat.heartbeat_path(folder, attempt, rank)
    for _ in range(3):  # it may be half written
        try:
            with open(path, "rb") as file:
                page = file.read(heartbeat.PAGE_BYTES)
        except OSError:
            return None
        beat = heartbeat.unpack(page)
        if beat is not None:
            return beat
    return None
