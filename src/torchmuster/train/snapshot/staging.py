"""The copy that the loop waits for: tensors go into one buffer with the layout of the file.

The buffer is kept from save to save. The first save pays for its memory (page faults, or pinning
for a GPU), every later one only for the copy.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch

from torchmuster.train.snapshot.layout import TensorEntry, place, view_of
from torchmuster.train.snapshot.state import ChangedError, dtype_named

Box = tuple[str, torch.Tensor, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A copy of the state, ready to be written.

    Attributes:
        file: The name of the data file.
        data: `(num_bytes,)` uint8 on the CPU.
        tensors: The location of each tensor in it.
        rest: What `finish` still copies: path, source, target, and the source's version, which
            counts in-place changes.
    """

    file: str
    data: torch.Tensor
    tensors: dict[str, TensorEntry]
    rest: Sequence[tuple[str, torch.Tensor, torch.Tensor, int]] = ()

    def finish(self) -> None:
        """Copy what was left for the background.

        Raises:
            ChangedError: A tensor was changed in place meanwhile.
        """
        with torch.no_grad():
            for _, source, target, _ in self.rest:
                target.copy_(source)
        for path, source, _, version in self.rest:
            if source._version != version:
                raise ChangedError(
                    f"`{path}` was changed in place while it was copied, and not by optimizer.step()"
                )

    def places(self, paths: Container[str]) -> tuple[tuple[int, int], ...]:
        """Return begin and end of each of these tensors' bytes; skip empty ones."""
        found = []
        for path, entry in self.tensors.items():
            if path in paths:
                (chunk,) = entry.chunks
                itemsize = dtype_named(entry.dtype).itemsize
                if num_bytes := chunk.num_bytes(itemsize):
                    found.append((chunk.begin, chunk.begin + num_bytes))
        return tuple(found)


class Staging:
    """Owns the buffer.

    Args:
        room: Returns the permanent space of a file of this size, `(num_bytes,)` uint8; default:
            memory of this process.
    """

    def __init__(self, room: Callable[[str, int], torch.Tensor] | None = None) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._room = room

    def copy(self, boxes: Sequence[Box], file: str, later: Container[str] = ()) -> Staged:
        """Return a copy of `boxes`, except for the paths in `later`, which `Staged.finish` copies.

        The buffer is overwritten by the next call: the last copy must have been written by then.
        """
        entries, num_bytes = place(boxes, file)
        on_gpu = any(box[1].is_cuda for box in boxes)
        data = self._place(file, num_bytes, on_gpu)
        taken: dict[str, int] = {}
        rest: list[tuple[str, torch.Tensor, torch.Tensor, int]] = []
        with torch.no_grad():
            for path, tensor, _, _ in boxes:
                chunk = entries[path].chunks[taken.get(path, 0)]
                taken[path] = taken.get(path, 0) + 1
                target = view_of(data, chunk, tensor.dtype)
                if path in later and not tensor.is_cuda:
                    rest.append((path, tensor, target, tensor._version))
                    continue
                target.copy_(tensor, non_blocking=tensor.is_cuda)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return Staged(file=file, data=data, tensors=entries, rest=rest)

    def _place(self, file: str, num_bytes: int, on_gpu: bool) -> torch.Tensor:
        if self._room is not None:
            return self._room(file, num_bytes)
        if self._buffer.numel() < num_bytes:
            # Zeros: the gaps between tensors are written too, and must not contain old memory.
            self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        return self._buffer[:num_bytes]


def whole_boxes(tensors: dict[str, torch.Tensor]) -> list[Box]:
    """Return each tensor as one box."""
    return [
        (path, tensor, (0,) * tensor.dim(), tuple(tensor.shape)) for path, tensor in tensors.items()
    ]
