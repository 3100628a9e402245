"""Small collectives on the CPU for use outside the training loop, without pickles."""

import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

_BLOCK_BYTES = 64 << 20


def gather_ints(values: list[int]) -> list[list[int]]:
    """Return every rank's `values`; all ranks pass equally many."""
    mine = torch.tensor(values, dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [one.tolist() for one in everyone]


def gather_int(value: int) -> list[int]:
    """Return every rank's `value`."""
    return [row[0] for row in gather_ints([value])]


def gather_bytes(data: bytes) -> list[bytes]:
    """Return every rank's `data`, of any length."""
    lengths = gather_int(len(data))
    mine = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
    if data:
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(everyone, mine)
    return [one[:length].numpy().tobytes() for one, length in zip(everyone, lengths, strict=True)]


def gather_json(value: Any) -> list[Any]:
    """Return every rank's `value`."""
    return [json.loads(data) for data in gather_bytes(json.dumps(value).encode())]


def broadcast_bytes(data: bytes | None, source: int) -> bytes:
    """Return the source's `data` on every rank."""
    length = torch.tensor([len(data or b"")], dtype=torch.int64)
    dist.broadcast(length, source)
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if data and dist.get_rank() == source:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return broadcast_buffer(buffer, source).numpy().tobytes()


def broadcast_buffer(buffer: torch.Tensor, source: int) -> torch.Tensor:
    """Fill `buffer` on all ranks from the source's, and return it.

    It is uint8 on the CPU, with the same length on all ranks.
    """
    for begin in range(0, buffer.numel(), _BLOCK_BYTES):
        dist.broadcast(buffer[begin : begin + _BLOCK_BYTES], source)
    return buffer


def shift_bytes(data: bytes, shift: int) -> bytes:
    """Return the `data` of the rank `shift` places further around the ring; equal on all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    source, target = (rank + shift) % size, (rank - shift) % size
    if source == rank:
        return data
    lengths = gather_int(len(data))
    mine = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    theirs = torch.empty(lengths[source], dtype=torch.uint8)
    works = [dist.irecv(part, source) for part in theirs.split(_BLOCK_BYTES) if part.numel()]
    works += [dist.isend(part, target) for part in mine.split(_BLOCK_BYTES) if part.numel()]
    finish_all(works)
    return theirs.numpy().tobytes()


def finish_all(works: Iterable[Any]) -> None:
    """Wait for the ends of transfers; stacks of hangs name who asks, not this."""
    for work in works:
        work.wait()
