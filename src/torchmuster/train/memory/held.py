"""This node's side of snapshots in memory: files that the agent holds, each with a header page.

A file has one part of one snapshot: the tensors of one rank, or the manifest. It is written in
place:

    byte 0      `torchmuster-held 1 crc32=<8 hex digits> bytes=<n>`, then n bytes of JSON: the part
    byte 4096   the bytes of the part

The header page is cleared before the part is written, and filled after it: a part is complete or
absent. Two files take turns, so that the last part stays until the next one is complete on all
nodes.
"""

import json
import mmap
import os
import re
import weakref
import zlib
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torchmuster.core.model import codec, contract
from torchmuster.core.net import ipc
from torchmuster.core.net.ipc import AgentAnswer, AskMemory, CallFailed, MemoryHeld
from torchmuster.core.node.kernel import free_bytes
from torchmuster.train.snapshot.state import NoRoomError, SnapshotError

PAGE_BYTES = 4096
_HEADER = re.compile(rb"torchmuster-held 1 crc32=([0-9a-f]{8}) bytes=(\d{1,4})\n")
_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a file holds; the checksum is in the snapshot's manifest.

    Attributes:
        name: The name of the file in a snapshot: `manifest.json` or `data-00003.bin`.
    """

    generation: int
    step: int
    name: str
    num_bytes: int

    @property
    def age(self) -> tuple[int, int]:
        """The order of parts: a later start's is newer, whatever its step."""
        return self.generation, self.step


class HeldFile:
    """One memory-mapped file of the agent."""

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._map: mmap.mmap | None = None
        self.part = self._read_part()

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return os.fstat(self._descriptor).st_size

    def begin(self, num_bytes: int) -> torch.Tensor:
        """Forget its part, and return the space for a new one, `(num_bytes,)` uint8.

        Raises:
            SnapshotError: The node lacks memory for it.
        """
        self.forget()
        whole = PAGE_BYTES + num_bytes
        if self._map is None or len(self._map) < whole:
            self._grow(whole)
        return self._bytes(num_bytes)

    def _grow(self, num_bytes: int) -> None:
        """Make room. Check free memory first: a write without memory gets a process killed."""
        more, free = num_bytes - self.size, free_bytes()
        why = f"{free / 1e6:.1f} MB are free" if free is not None and more > free else ""
        if not why:
            try:
                os.ftruncate(self._descriptor, num_bytes)
                self._map = mmap.mmap(self._descriptor, num_bytes)
            except (OSError, ValueError) as error:
                why = str(error)
        if why:
            raise NoRoomError(
                f"this node has no memory for {num_bytes / 1e6:.1f} MB of a snapshot", why=why
            )

    def forget(self) -> None:
        """Mark it as empty."""
        os.pwrite(self._descriptor, bytes(PAGE_BYTES), 0)
        self.part = None

    def commit(self, part: Part) -> None:
        """Record what it holds; from now on the part can be found."""
        plain = json.dumps(asdict(part)).encode()
        head = b"torchmuster-held 1 crc32=%08x bytes=%d\n" % (zlib.crc32(plain), len(plain))
        os.pwrite(self._descriptor, (head + plain).ljust(PAGE_BYTES, b"\0"), 0)
        self.part = part

    def read(self) -> torch.Tensor:
        """Return its part without a copy and unverified, `(num_bytes,)` uint8."""
        return self._bytes(self.part.num_bytes if self.part is not None else 0)

    def _bytes(self, num_bytes: int) -> torch.Tensor:
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, 0)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes, offset=PAGE_BYTES)

    def _read_part(self) -> Part | None:
        size = os.fstat(self._descriptor).st_size
        page = os.pread(self._descriptor, PAGE_BYTES, 0)
        found = _HEADER.match(page)
        if found is None:
            return None
        plain = page[found.end() : found.end() + int(found[2])]
        if zlib.crc32(plain) != int(found[1], 16):
            return None
        try:
            part = Part(**json.loads(plain))
        except (ValueError, TypeError):
            return None
        return part if size >= PAGE_BYTES + part.num_bytes else None


class NodeMemory:
    """The memory that this node's agent holds; files are opened when first used."""

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._files: dict[str, HeldFile] = {}

    def open(self, *names: str) -> list[HeldFile]:
        """Return files by name; create missing ones.

        Raises:
            SnapshotError: The agent can't hold any.
        """
        missing = [name for name in names if name not in self._files]
        if missing:
            self._take(self._ask(AskMemory(names=tuple(missing))), missing)
        return [self._files[name] for name in names]

    def all(self) -> list[HeldFile]:
        """Return all files that the agent holds, of this attempt and of earlier ones."""
        held = self._ask(AskMemory())
        self._take(held, [name for name in held.descriptors if name not in self._files])
        return [self._files[name] for name in sorted(held.descriptors)]

    def drop(self, names: list[str]) -> None:
        """Make the agent free these files."""
        for name in names:
            self._files.pop(name, None)
        if names:
            self._ask(AskMemory(drop=tuple(names)))

    def _take(self, held: MemoryHeld, names: list[str]) -> None:
        for name in names:
            path = f"/proc/{held.pid}/fd/{held.descriptors[name]}"
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise _cant_hold(error.strerror or str(error)) from error
            self._files[name] = HeldFile(name, descriptor)

    def _ask(self, ask: AskMemory) -> MemoryHeld:
        try:
            answer = self._call(ask)
        except (OSError, EOFError, codec.CodecError) as error:
            raise _cant_hold(str(error) or "its agent hung up") from error
        if isinstance(answer, MemoryHeld):
            return answer
        why = answer.why or answer.what if isinstance(answer, CallFailed) else "it is another one"
        raise _cant_hold(why)

    def _call(self, ask: AskMemory) -> AgentAnswer:
        with ipc.connect(self._socket_path) as agent:
            agent.settimeout(_ANSWER_S)
            agent.sendall(ipc.pack(ask))
            return ipc.receive(agent, AgentAnswer)


def _cant_hold(why: str) -> SnapshotError:
    return SnapshotError(
        "the agent of this node can't hold snapshots in memory",
        where="World.resume(memory_every_steps=...)",
        why=why,
        fix="leave memory_every_steps out; or is an agent of an older torchmuster there?",
    )


def agent_socket(environ: Any = os.environ) -> str | None:
    """Return the socket of this worker's agent; None without muster."""
    return environ.get(contract.SOCKET_VARIABLE) or None
