"""Writes one snapshot, usually in a background thread.

    all ranks    post their piece (random state, ledger, locations of their data) to the store
    writers      write and fsync their data file, computing the checksum during the write
    rank 0       waits for all pieces, writes the manifest, commits, tidies up, posts the outcome

No collective runs here: it would get between those of the training loop.
"""

import contextlib
import json
import os
import queue
import threading
import time
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar

import torch

from torchmuster.train.snapshot.folder import Destination, LocalFolder
from torchmuster.train.snapshot.layout import (
    Chunk,
    FileEntry,
    SnapshotManifest,
    TensorEntry,
    encode_manifest,
    plain_tensors,
)
from torchmuster.train.snapshot.staging import Staged
from torchmuster.train.snapshot.state import ChangedError, SnapshotError, vanished

Place_co = TypeVar("Place_co", bound=Destination, covariant=True)

_BLOCK_BYTES = 8 << 20
_MOST_BUFFER_BYTES = 64 << 20
_OK = b"ok"
_SOME, _NONE = b"+", b"-"  # precede rank 0's buffers, or the reason why there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOrder:
    """The part of one rank in one snapshot.

    Attributes:
        number: Counts the saves of this process group; equal on all ranks.
        staged: This rank's tensors, or None if another rank writes them.
        state: Packed state of the script's objects, on rank 0.
        rank_state: Packed state of this rank.
        buffers: Where the models' buffers are in the staged bytes: each rank's own, until rank 0's
            are broadcast.
    """

    number: int
    step: int
    epoch: int
    kind: str
    staged: Staged | None
    state: Any
    rank_state: Any
    buffers: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Writers(Generic[Place_co]):
    """The ranks that write, and this rank's role.

    Attributes:
        store: A separate connection to the group's store, so that the loop does not wait for it.
        copies: Whether this rank keeps a complete copy on its own node (no shared file system).
        confirms: Whether a write ends only when the snapshot is complete on all ranks.
    """

    folder: Place_co
    store: Any
    rank: int
    world_size: int
    generation: int
    keep: int
    timeout_s: float
    copies: bool = False
    confirms: bool = False


class Saver:
    """The background write of this rank; its errors are raised in the loop.

    Attributes:
        last_s: Duration of the last write in seconds.
        written_step: The step of the last order that was completed here; on rank 0: committed.
    """

    def __init__(self, writers: Writers[Destination]) -> None:
        self.writers = writers
        self.last_s = 0.0
        self.written_step: int | None = None
        self._orders: queue.SimpleQueue[WriteOrder] = queue.SimpleQueue()
        self._idle, self._copied = threading.Event(), threading.Event()
        self._idle.set()
        self._copied.set()
        self._thread: threading.Thread | None = None
        self._error: SnapshotError | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a write is running."""
        return not self._idle.is_set()

    def submit(self, order: WriteOrder) -> None:
        """Start writing `order` in the background; the last write must have ended."""
        self.wait()
        if self._thread is None:
            # One thread for all saves: starting another each time took longer than many copies.
            self._thread = threading.Thread(target=self._serve, name="muster-save", daemon=True)
            self._thread.start()
        self._idle.clear()
        self._copied.clear()
        self._orders.put(order)

    def wait(self) -> None:
        """Wait for the last write.

        Raises:
            SnapshotError: It failed.
        """
        self._idle.wait()
        self.check()

    def wait_for_copy(self) -> None:
        """Wait until the last order has its copy of all tensors, which may change from then on."""
        self._copied.wait()

    def check(self) -> None:
        """Raise the error of the last write, if any; only once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _serve(self) -> None:
        while True:
            order = self._orders.get()
            self._run(order)
            del order  # it holds memory
            self._idle.set()

    def _run(self, order: WriteOrder) -> None:
        began = time.monotonic()
        try:
            try:
                if order.staged is not None:
                    order.staged.finish()
            finally:
                self._copied.set()  # also if this rank has no part
            write(self.writers, order)
            if self.writers.confirms:
                wait_for_outcome(self.writers, order.number)
            self.written_step = order.step
        except ChangedError as error:
            refuse(self.writers, order.number, order.step, error)
            self._error = error
        except SnapshotError as error:
            self._error = error
        except RuntimeError as error:  # from the store
            self._error = SnapshotError(
                f"the snapshot of step {order.step} was given up",
                where=self.writers.folder.url,
                why=f"the store of the process group is gone: {error}",
            )
        except BaseException as error:  # noqa: BLE001 (a thread's traceback would go unseen)
            self._error = SnapshotError(
                f"the snapshot of step {order.step} failed", why=f"{type(error).__name__}: {error}"
            )
        finally:
            self.last_s = time.monotonic() - began


def write(writers: Writers[Destination], order: WriteOrder) -> None:
    """Write this rank's part of a snapshot; on rank 0 and on copying ranks, commit it.

    Raises:
        SnapshotError: It could not be written; older snapshots are unchanged.
    """
    try:
        _write(writers, order)
    except OSError as error:
        _give_up(writers, order, str(error))
        raise _explain(writers, order, error) from error
    except Exception as error:
        _give_up(writers, order, error.what if isinstance(error, SnapshotError) else repr(error))
        raise


def refuse(writers: Writers[Destination], number: int, step: int, error: SnapshotError) -> None:
    """Report that this rank has no part, and why; the others give the snapshot up at once."""
    order = WriteOrder(
        number=number, step=step, epoch=0, kind="", staged=None, state=None, rank_state=None
    )
    _give_up(writers, order, error.what)


def _give_up(writers: Writers[Destination], order: WriteOrder, why: str) -> None:
    """Free the space, and tell the waiting ranks."""
    if writers.rank == 0 or writers.copies:
        with contextlib.suppress(OSError, SnapshotError):
            writers.folder.abandon(order.step, writers.generation)
    _post(writers, order, {"error": why})
    if writers.rank == 0:
        with contextlib.suppress(RuntimeError):
            for name, mark in (("begun", b""), ("outcome", b""), ("buffers", _NONE)):
                writers.store.set(_key(order, name), mark + why.encode())


def _write(writers: Writers[Destination], order: WriteOrder) -> None:
    commits = writers.rank == 0 or writers.copies
    file: FileEntry | None = None
    if commits:
        writers.folder.begin(order.step, writers.generation)
        _announce(writers, order)
    if order.staged is not None:
        if not commits:
            _wait_for_rank_0(writers, order, "begun")
        if order.buffers and writers.copies:
            _share_buffers(writers, order, order.staged)
        file = _write_file(writers, order)
    piece = {"rank_state": order.rank_state}
    if file is not None and order.staged is not None and order.kind == "sharded":
        piece |= {
            "file": [order.staged.file, file.num_bytes, file.crc32],
            "tensors": plain_tensors(order.staged.tensors),
        }
    _post(writers, order, piece)
    if commits:
        _commit(writers, order, file)
    if writers.rank == 0:
        writers.store.set(_key(order, "outcome"), _OK)


def _share_buffers(writers: Writers[Destination], order: WriteOrder, staged: Staged) -> None:
    """Copy rank 0's buffers to every rank's copy: DDP continues with rank 0's running means."""
    if sum(end - begin for begin, end in order.buffers) > _MOST_BUFFER_BYTES:
        return  # no running means are that large
    key = _key(order, "buffers")
    if writers.rank == 0:
        parts = [staged.data[begin:end].numpy().tobytes() for begin, end in order.buffers]
        writers.store.set(key, _SOME + b"".join(parts))
        return
    _wait(writers, key, order)
    data = writers.store.get(key)
    if not data.startswith(_SOME):
        raise _given_up(writers, order, data.removeprefix(_NONE))
    at = len(_SOME)
    for begin, end in order.buffers:
        part = torch.frombuffer(bytearray(data[at : at + end - begin]), dtype=torch.uint8)
        staged.data[begin:end].copy_(part)
        at += end - begin


def _announce(writers: Writers[Destination], order: WriteOrder) -> None:
    if writers.rank == 0:
        writers.store.set(_key(order, "begun"), _OK)


def _write_file(writers: Writers[Destination], order: WriteOrder) -> FileEntry:
    staged = order.staged
    assert staged is not None
    sink = writers.folder.create(order.step, writers.generation, staged.file)
    data = memoryview(staged.data.numpy())
    crc = _Checksum() if len(data) > _BLOCK_BYTES else None
    try:
        for begin in range(0, len(data), _BLOCK_BYTES):
            block = data[begin : begin + _BLOCK_BYTES]
            if crc is not None:
                crc.add(block)
            sink.write(block)
    finally:
        value = crc.value() if crc is not None else zlib.crc32(data)
        sink.finish()
    return FileEntry(num_bytes=len(data), crc32=value)


class _Checksum:
    """CRC-32 in a separate thread: both it and the write release the interpreter's lock."""

    def __init__(self) -> None:
        self._blocks: queue.Queue[memoryview | None] = queue.Queue()
        self._crc = 0
        self._thread = threading.Thread(target=self._run, name="muster-checksum", daemon=True)
        self._thread.start()

    def add(self, block: memoryview) -> None:
        self._blocks.put(block)

    def value(self) -> int:
        self._blocks.put(None)
        self._thread.join()
        return self._crc

    def _run(self) -> None:
        while (block := self._blocks.get()) is not None:
            self._crc = zlib.crc32(block, self._crc)


def _commit(writers: Writers[Destination], order: WriteOrder, file: FileEntry | None) -> None:
    pieces = {rank: _take_piece(writers, order, rank) for rank in range(writers.world_size)}
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    if order.kind == "whole" and order.staged is not None and file is not None:
        files[order.staged.file] = file
        tensors = order.staged.tensors
    for piece in pieces.values():
        if "file" in piece:
            name, num_bytes, crc = piece["file"]
            files[name] = FileEntry(num_bytes=num_bytes, crc32=crc)
            tensors = _merge(tensors, piece["tensors"])
    manifest = SnapshotManifest(
        step=order.step,
        epoch=order.epoch,
        generation=writers.generation,
        world_size=writers.world_size,
        kind=order.kind,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        files=files,
        tensors=tensors,
        state=order.state,
        ranks={rank: piece["rank_state"] for rank, piece in pieces.items()},
    )
    writers.folder.commit(order.step, writers.generation, encode_manifest(manifest))
    keep_newest(writers.folder, writers.keep)
    if writers.rank == 0:
        _forget(writers, order.number - 1)


def keep_newest(folder: Destination, keep: int) -> None:
    """Delete all but the newest `keep` snapshots; never the last one."""
    for step in folder.steps()[max(keep, 1) :]:
        folder.delete(step)


def wait_for_outcome(writers: Writers[Destination], number: int) -> None:
    """Return when rank 0 has committed save `number`.

    Raises:
        SnapshotError: It failed there, or did not report in time.
    """
    key = f"muster/save/{number}/outcome"
    try:
        writers.store.wait([key], timedelta(seconds=writers.timeout_s))
        outcome = writers.store.get(key)
    except RuntimeError as error:
        raise SnapshotError(
            "rank 0 did not confirm that the snapshot is complete",
            where=writers.folder.url,
            why=f"waited {writers.timeout_s:g} s at most: {error}",
        ) from error
    if outcome != _OK:
        raise SnapshotError(
            "rank 0 could not commit the snapshot", where=writers.folder.url, why=outcome.decode()
        )


def _forget(writers: Writers[Destination], number: int) -> None:
    """Delete the keys of a save that all ranks have finished: they have posted for the next one."""
    for name in (*range(writers.world_size), "begun", "outcome", "buffers"):
        writers.store.delete_key(f"muster/save/{number}/{name}")


def _wait_for_rank_0(writers: Writers[Destination], order: WriteOrder, name: str) -> None:
    _wait(writers, _key(order, name), order)
    word = writers.store.get(_key(order, name))
    if word != _OK:
        raise _given_up(writers, order, word)


def _given_up(writers: Writers[Destination], order: WriteOrder, why: bytes) -> SnapshotError:
    return SnapshotError(
        f"rank 0 gave the snapshot of step {order.step} up",
        where=writers.folder.url,
        why=why.decode(),
    )


def _take_piece(writers: Writers[Destination], order: WriteOrder, rank: int) -> dict[str, Any]:
    key = _key(order, str(rank))
    _wait(writers, key, order)
    piece = json.loads(writers.store.get(key))
    if "error" in piece:
        raise SnapshotError(
            f"rank {rank} could not write its part of the snapshot of step {order.step}",
            where=writers.folder.url,
            why=piece["error"],
        )
    return dict(piece)


def _wait(writers: Writers[Destination], key: str, order: WriteOrder) -> None:
    deadline, pause_s = time.monotonic() + writers.timeout_s, 0.001
    why = f"`{key}` did not arrive within {writers.timeout_s:g} s"
    try:
        # Not `store.wait`: torch prints two warnings at the end of each such wait.
        while not writers.store.check([key]):
            if time.monotonic() > deadline:
                raise SnapshotError(
                    f"the snapshot of step {order.step} was given up",
                    where=writers.folder.url,
                    why=why,
                )
            threading.Event().wait(pause_s)
            pause_s = min(2 * pause_s, 0.05)
    except RuntimeError as error:  # the store is gone with rank 0
        raise SnapshotError(
            f"the snapshot of step {order.step} was given up",
            where=writers.folder.url,
            why=f"{why}: {error}",
        ) from error


def _post(writers: Writers[Destination], order: WriteOrder, piece: dict[str, Any]) -> None:
    try:
        writers.store.set(_key(order, str(writers.rank)), json.dumps(piece))
    except RuntimeError:
        if "error" not in piece:  # an error is raised anyway; this was only to tell rank 0
            raise


def _key(order: WriteOrder, name: str) -> str:
    return f"muster/save/{order.number}/{name}"


def _merge(tensors: dict[str, TensorEntry], plain: dict[str, Any]) -> dict[str, TensorEntry]:
    merged = dict(tensors)
    for path, (dtype, shape, rows) in plain.items():
        chunks = tuple(
            Chunk(offsets=tuple(o), sizes=tuple(s), file=file, begin=begin)
            for o, s, file, begin in rows
        )
        before = merged[path].chunks if path in merged else ()
        merged[path] = TensorEntry(dtype=dtype, shape=tuple(shape), chunks=(*before, *chunks))
    return merged


def _explain(writers: Writers[Destination], order: WriteOrder, error: OSError) -> SnapshotError:
    import errno

    here = isinstance(writers.folder, LocalFolder)
    if here and error.errno == errno.ENOENT and not os.path.isdir(writers.folder.url):
        return vanished(writers.folder.url, order.step)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    num_bytes = order.staged.data.numel() if order.staged is not None else 0
    return SnapshotError(
        f"the snapshot of step {order.step} could not be written",
        where=writers.folder.url,
        why=f"{error.strerror or error} ({num_bytes / 1e6:.1f} MB were to be written)",
        fix="free some space, or choose another place with folder=...; older snapshots are intact"
        if full
        else "check that the folder exists and is writable; older snapshots are intact",
    )
