"""The snapshots of a run: their contents, the ranks that write them, the outcome of each save."""

import array
import os
import sys
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

import torch

from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import contract
from torchmuster.train import rng
from torchmuster.train.batches.order import Sums
from torchmuster.train.exchange import gather_int
from torchmuster.train.memory import MemorySaves
from torchmuster.train.objects import OWN_NAME, Objects
from torchmuster.train.sinks import MetricsRecord
from torchmuster.train.snapshot import writer
from torchmuster.train.snapshot.folder import Folder, LocalFolder, open_folder
from torchmuster.train.snapshot.layout import SnapshotManifest
from torchmuster.train.snapshot.load import LoadedSnapshot, agree
from torchmuster.train.snapshot.staging import Staged, Staging, whole_boxes
from torchmuster.train.snapshot.state import (
    MisfitError,
    NoGoodSnapshotError,
    NoRoomError,
    SnapshotError,
    pack,
    unpack,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfEpoch:
    """The state after an epoch's last step, before the script's code after the loop.

    Attributes:
        tensors: References, not copies.
        versions: The in-place version counter of each.
    """

    state: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    versions: list[int]
    generators: dict[str, Any]

    def is_unchanged(self) -> bool:
        """Return whether no tensor has been changed in place since."""
        return self.versions == _versions(self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is saved in addition to the script's objects.

    Attributes:
        own: The run's own state, the same on all ranks.
        ledger: The ledger of this rank.
        sums: Metrics of this rank that are not in `own` yet.
        generators: The random states to save, if not the present ones.
        end: The state to save, if not the present one.
    """

    step: int
    epoch: int
    own: dict[str, Any]
    ledger: Sums
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    generators: dict[str, Any] | None = None
    end: EndOfEpoch | None = None


class Saves:
    """Makes snapshots, one at a time in the background, and reports their outcome.

    Attributes:
        step: The step of the newest snapshot that was started or loaded; -1 for none.
        at: The time of that, by `time.monotonic()`.
        source: The folder to load from, if it is not the one that is written.
    """

    source: Folder | None = None

    def __init__(
        self,
        objects: Objects,
        writers: writer.Writers[Folder],
        record: MetricsRecord,
        *,
        memory: MemorySaves | None = None,
        warn: Callable[[str], None] | None,
        skips: bool,
    ) -> None:
        """Store the arguments.

        Args:
            objects: The script's objects.
            writers: From `choose_writers`.
            record: The record of the run; rank 0 writes to it.
            memory: Makes snapshots in memory, if enabled.
            warn: Called with the message of a failed save; None: raise the error.
            skips: Skip a save while another one runs.
        """
        self.step = -1
        self.at = time.monotonic()
        self._objects = objects
        self._writers = writers
        self._memory = memory
        self._record = record
        self._warn = warn
        self._skips = skips
        self._saver = writer.Saver(writers)
        self._staging = Staging()
        self._num_orders = 0
        self._loaded_step: int | None = None
        self._noted_step: int | None = None  # the last snapshot recorded as complete

    @property
    def folder_url(self) -> str:
        """The folder of the snapshots: a path or URL."""
        return (self.source or self._writers.folder).url

    @property
    def last_s(self) -> float:
        """The duration of the last write, in seconds."""
        return self._saver.last_s

    @property
    def newest_step(self) -> int | None:
        """The step of the newest complete snapshot that this rank knows of; rank 0 knows of all."""
        written = self._saver.written_step
        return self._loaded_step if written is None else written

    def load(self) -> LoadedSnapshot | None:
        """Load the newest good snapshot on disk or in memory into the objects; return it, or None.

        Raises:
            SnapshotError: There are snapshots, but none is good or none fits; or earlier ones have
                vanished.
        """
        writers, memory, held = self._writers, self._memory, None
        reads = writers.rank == 0 or writers.copies
        if reads:
            writers.folder.tidy(writers.generation)
        source = self.source or writers.folder

        def look_in_memory(age: tuple[int, int]) -> bool:
            nonlocal held
            held = memory.look(age, _report) if memory is not None else None
            return held is not None

        agreed = agree(source, reads=reads, report=_report, elsewhere=look_in_memory)
        loaded = held.loaded() if held is not None else agreed.load()
        if loaded is not None:
            self._objects.load(loaded, source)
        elif self.source is not None:
            what = "there is no snapshot that the step can be made from"
            raise NoGoodSnapshotError(what, where=self.source.url, fix="choose a later --step")
        elif writers.rank == 0:
            self._refuse_to_forget()
        if agreed.age[1] >= 0:
            self.step = self._loaded_step = agreed.age[1]
        if memory is not None:
            memory.step = held.manifest.step if held is not None else -1
            memory.is_owed = loaded is not None
            memory.follow(self._objects)
            has_part = memory.writers.confirms or writers.rank == 0 or memory.writers.copies
            memory.check_room(
                self._objects.expected_bytes() if has_part else 0, self._objects.still_to_come()
            )
        return loaded

    def _refuse_to_forget(self) -> None:
        """Refuse to start over if an earlier attempt saved snapshots that are gone now."""
        if os.environ.get(contract.ATTEMPT_VARIABLE, "0") == "0":
            return
        step = self._record.last_saved(self.folder_url)
        if step is not None:
            raise NoGoodSnapshotError(
                f"the snapshot of step {step} has vanished",
                where=self.folder_url,
                why="an earlier attempt of this run has saved it there",
                fix="is the file system mounted? `muster restart` resumes when it is back; a new run starts over at step 0",
            )

    def why_not_from_memory(self) -> str:
        """Return the end of a message: after a loss, that no newer snapshot is left in memory.

        Empty in a first attempt, without snapshots in memory, and if one was found.
        """
        is_first = os.environ.get(contract.ATTEMPT_VARIABLE, "0") == "0"
        if self._memory is None or is_first or self._memory.step >= 0:
            return ""
        return ": no whole snapshot that is newer is left in the memory of the nodes"

    def must_skip(self) -> bool:
        """Return, equal on all ranks, whether to skip this save because another one is running."""
        if not self._skips:
            return False
        return any(gather_int(int(self._saver.is_busy)))

    def save(self, moment: Moment) -> None:
        """Copy the state and start writing it; the loop waits for the copy only.

        Raises:
            SnapshotError: The previous save failed, or a value can't be saved.
        """
        self._saver.wait()
        number, self._num_orders = self._num_orders, self._num_orders + 1
        self._saver.submit(self._order(moment, self._writers, self._staging, number))
        self.step, self.at = moment.step, time.monotonic()

    def is_due_in_memory(self, step: int) -> bool:
        """Return whether a snapshot in memory is due after this step."""
        return self._memory is not None and self._memory.is_due(step)

    def keep_in_memory(self, moment: Moment) -> None:
        """Copy the state into memory that outlives the workers; the rest runs in the background.

        A snapshot that fails is reported and left out: those on disk do not depend on it.

        Raises:
            SnapshotError: A value can't be saved.
        """
        memory = self._memory
        if memory is None:
            return
        memory.wait()
        number = memory.next_number()
        try:
            later = memory.stepped if moment.end is None else ()
            memory.submit(self._order(moment, memory.writers, memory.staging, number, later))
        except NoRoomError as error:
            memory.refuse(number, moment.step, error)

    def check(self, now: int, *, wait: bool = False, by_all: bool = False) -> None:
        """Check the outcome of the last save, at step `now`, and record completed snapshots.

        Args:
            now: The number of steps done.
            wait: Wait until this rank's part is written.
            by_all: Wait until rank 0 has committed it.

        Raises:
            SnapshotError: It failed on this rank or on rank 0, and there is no `warn`.
        """
        try:
            if wait or by_all:
                self._saver.wait()
            self._saver.check()
            if by_all and self._num_orders:
                writer.wait_for_outcome(self._writers, self._num_orders - 1)
        except SnapshotError as error:
            if self._warn is None:
                raise
            self._warn(f"error: {error.what}; because: {error.why}; {self.what_is_saved(now)}")
        written = self._saver.written_step
        if self._writers.rank == 0 and written is not None and written != self._noted_step:
            self._noted_step = written
            self._record.event("saved", step=now, saved=written, folder=self.folder_url)

    def what_is_saved(self, now: int) -> str:
        """Return in words what can be resumed, at a step whose save has started."""
        step = self.newest_step
        if step == now:
            return "it is saved"
        return "there is no snapshot" if step is None else f"the last snapshot is of step {step}"

    def note_end_of_epoch(self) -> EndOfEpoch:
        """Return references to the present state."""
        state, tensors = self._objects.pack()
        return EndOfEpoch(
            state=state, tensors=tensors, versions=_versions(tensors), generators=rng.capture()
        )

    def _order(
        self,
        moment: Moment,
        writers: writer.Writers[Any],
        staging: Staging,
        number: int,
        later: Container[str] = (),
    ) -> writer.WriteOrder:
        sharded, end = self._objects.is_sharded, moment.end
        staged: Staged | None = None
        state: Any = None
        buffers: tuple[tuple[int, int], ...] = ()
        if sharded or writers.rank == 0 or writers.copies:
            state, tensors = (end.state, end.tensors) if end else self._objects.pack()
            if sharded:
                from torchmuster.train.snapshot.sharded import boxes_of

                boxes, name = boxes_of(tensors, writers.rank), f"data-{writers.rank:05d}.bin"
            else:
                boxes, name = whole_boxes(tensors), "data-00000.bin"
            staged = staging.copy(boxes, name, later)
            state = {**state, OWN_NAME: pack(moment.own, OWN_NAME, {})}
            if not sharded and writers.copies:
                buffers = staged.places(self._objects.buffer_paths())
        return writer.WriteOrder(
            number=number,
            step=moment.step,
            epoch=moment.epoch,
            kind="sharded" if sharded else "whole",
            staged=staged,
            state=state,
            rank_state=_rank_state(moment),
            buffers=buffers,
        )


def default_folder() -> str:
    """Return the default folder of snapshots."""
    run_dir = os.environ.get(contract.RUN_DIR_VARIABLE)
    return RunDir(run_dir or os.getcwd()).snapshots


def record_path(folder: Folder) -> str:
    """Return the path of the run's record: without muster next to the snapshots, if on a disk."""
    run_dir = os.environ.get(contract.RUN_DIR_VARIABLE)
    if run_dir:
        return RunDir(run_dir).training
    is_local = isinstance(folder, LocalFolder)
    return os.path.join(folder.url if is_local else os.getcwd(), "training.jsonl")


def choose_writers(
    world: Any, url: str, *, keep: int, timeout_s: float, is_sharded: bool
) -> writer.Writers[Folder]:
    """Choose the ranks that write: agree on a generation, test whether nodes share the folder.

    Raises:
        SnapshotError: The folder can't be used, or is not shared although the model is sharded.
    """
    folder = open_folder(url)
    leads = world.local_rank == 0
    try:
        newest = max(gather_int(folder.newest_generation() if leads else 0))
        generation = newest + 1
        if world.rank == 0:
            generation = folder.claim_generation(at_least=generation)
    except (OSError, SnapshotError) as error:
        raise SnapshotError(
            "the folder of the snapshots can't be used",
            where=folder.url,
            why=error.why if isinstance(error, SnapshotError) else error.strerror,
            fix="choose another place with folder=...",
        ) from error
    generation = gather_int(generation)[0]
    sees = not leads or folder.exists_here(f"generation-{generation}")
    is_shared = all(gather_int(int(sees)))
    if not is_shared and is_sharded:
        raise MisfitError(
            "the nodes don't share the folder of the snapshots, and the model is sharded",
            where=folder.url,
            why="each node would have only its own ranks' part",
            fix="choose a folder on a shared file system, or a URL such as s3://...",
        )
    if not is_shared:
        world.say(
            f"the nodes don't share {folder.url}: each keeps a complete copy of every snapshot"
        )
        if leads and not sees:
            folder.claim_generation(at_least=generation)
    return writer.Writers(
        folder=folder,
        store=world.connect(),
        rank=world.rank,
        world_size=world.world_size,
        generation=generation,
        keep=keep,
        timeout_s=timeout_s,
        copies=leads and not is_shared,
    )


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _rank_state(moment: Moment) -> dict[str, Any]:
    generators = moment.generators or rng.capture()
    sums = moment.ledger
    return {
        "generators": pack(generators_to_plain(generators), "generators", {}),
        "ledger": [sums.count, sums.first, sums.second],
        **({"sums": pack(moment.sums, "sums", {})} if moment.sums else {}),
    }


def _versions(tensors: dict[str, torch.Tensor]) -> list[int]:
    return [0 if t.is_inference() else t._version for t in tensors.values()]


def generators_to_plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return the generators' state without tensors and long lists, for a rank's JSON."""
    plain = dict(state)
    for name in ("torch", "cuda"):
        if plain[name] is not None:
            plain[name] = plain[name].numpy().tobytes()
    version, words, gauss = plain["python"]
    plain["python"] = (version, array.array("I", words).tobytes(), gauss)
    return plain


def generators_from_plain(plain: dict[str, Any]) -> dict[str, Any]:
    """Invert `generators_to_plain`; older snapshots list the words of `random` one by one."""
    state = dict(plain)
    for name in ("torch", "cuda"):
        if state[name] is not None:
            state[name] = torch.frombuffer(bytearray(state[name]), dtype=torch.uint8)
    version, words, gauss = state["python"]
    if isinstance(words, bytes):
        words = tuple(array.array("I", words))
    state["python"] = (version, words, gauss)
    return state


def begin_generators(manifest: SnapshotManifest, world: Any, seed: int) -> dict[str, Any] | None:
    """Return this rank's random states from a snapshot; seed new ones if the world size differs."""
    if manifest.world_size == world.world_size:
        return generators_from_plain(unpack(manifest.ranks[world.rank]["generators"], {}))
    rng.seed_everything(seed, manifest.step, world.rank)
    world.say(
        f"the world had {manifest.world_size} workers when it was saved, now it has"
        f" {world.world_size}: random generators are seeded anew from seed and step"
    )
    return None
