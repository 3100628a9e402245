"""What a run saves: the user's objects, its own state, each rank's generators and ledger."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from torchmuster.train import rng
from torchmuster.train.batches.ledger import Sums
from torchmuster.train.exchange import gather_ints
from torchmuster.train.objects import OWN_NAME, Objects
from torchmuster.train.snapshot import writer
from torchmuster.train.snapshot.saver import Saver
from torchmuster.train.snapshot.staging import Staged, Staging, whole_boxes
from torchmuster.train.snapshot.state import pack


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfEpoch:
    """The state behind an epoch's last step, in front of the script's code behind the loop.

    Attributes:
        tensors: Not copied.
        versions: How often each had been changed in place.
    """

    state: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    versions: list[int]
    generators: dict[str, Any]

    def is_unchanged(self) -> bool:
        """Say whether no tensor has been changed in place since."""
        return self.versions == _versions(self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is saved beside the user's objects.

    Attributes:
        own: The run's own state, the same on all ranks.
        ledger: Of this rank.
        generators: Those to save where they are not the present ones.
        end: The state to save where it is not the present one.
    """

    step: int
    epoch: int
    own: dict[str, Any]
    ledger: Sums
    generators: dict[str, Any] | None = None
    end: EndOfEpoch | None = None


class Saves:
    """Makes snapshots; one at a time is written beside the loop.

    Attributes:
        step: The step of the newest snapshot that was ordered or loaded; -1 for none.
        at: When that was, by `time.monotonic()`.
    """

    def __init__(self, objects: Objects, crew: writer.Crew, *, when_busy: str) -> None:
        self.step = -1
        self.at = time.monotonic()
        self._objects = objects
        self._crew = crew
        self._saver = Saver(crew)
        self._staging = Staging()
        self._skips = when_busy == "skip"
        self._num_orders = 0

    @property
    def folder_url(self) -> str:
        """Where the snapshots lie."""
        return self._crew.folder.url

    @property
    def last_s(self) -> float:
        """How long the last write took."""
        return self._saver.last_s

    @property
    def written_step(self) -> int | None:
        """The step of the last snapshot that is whole, as this rank knows it; rank 0 does."""
        return self._saver.written_step

    def must_skip(self) -> bool:
        """Say on all ranks alike whether a save still runs and this one is to be left out."""
        if not self._skips:
            return False
        return any(row[0] for row in gather_ints([int(self._saver.is_busy)]))

    def save(self, moment: Moment) -> None:
        """Copy the state and begin to write it; the loop waits for the copy only.

        Raises:
            SnapshotError: The save before this one failed, or a value can't be saved.
        """
        self._saver.wait()
        order = self._order(moment)
        self._saver.submit(order)
        self.step, self.at = moment.step, time.monotonic()

    def wait(self) -> None:
        """Return when this rank's part of the last save is written.

        Raises:
            SnapshotError: It failed.
        """
        self._saver.wait()

    def wait_for_all(self) -> None:
        """Return when rank 0 has committed the last save.

        Raises:
            SnapshotError: It failed, here or there.
        """
        self._saver.wait()
        if self._num_orders:
            writer.wait_for_outcome(self._crew, self._num_orders - 1)

    def check(self) -> None:
        """Raise what the last save failed with, once."""
        self._saver.check()

    def note_end_of_epoch(self) -> EndOfEpoch:
        """Return the present state, by reference."""
        state, tensors = self._objects.pack()
        return EndOfEpoch(
            state=state, tensors=tensors, versions=_versions(tensors), generators=rng.capture()
        )

    def _order(self, moment: Moment) -> writer.WriteOrder:
        sharded, crew, end = self._objects.is_sharded, self._crew, moment.end
        staged: Staged | None = None
        state: Any = None
        if sharded or crew.rank == 0 or crew.copies:
            state, tensors = (end.state, end.tensors) if end else self._objects.pack()
            staged = self._stage(tensors, sharded)
            state = {**state, OWN_NAME: pack(moment.own, OWN_NAME, {})}
        number, self._num_orders = self._num_orders, self._num_orders + 1
        return writer.WriteOrder(
            number=number,
            step=moment.step,
            epoch=moment.epoch,
            kind="sharded" if sharded else "whole",
            staged=staged,
            state=state,
            rank_state=_rank_state(moment),
        )

    def _stage(self, tensors: dict[str, torch.Tensor], sharded: bool) -> Staged:
        if not sharded:
            return self._staging.copy(whole_boxes(tensors), "data-00000.bin")
        from torchmuster.train.snapshot.sharded import boxes_of

        rank = self._crew.rank
        return self._staging.copy(boxes_of(tensors, rank), f"data-{rank:05d}.bin")


def _rank_state(moment: Moment) -> dict[str, Any]:
    generators = moment.generators or rng.capture()
    if moment.end is not None:
        generators = moment.end.generators
    sums = moment.ledger
    return {
        "generators": pack(generators_to_plain(generators), "generators", {}),
        "ledger": [sums.count, sums.first, sums.second],
    }


def _versions(tensors: dict[str, torch.Tensor]) -> list[int]:
    return [0 if t.is_inference() else t._version for t in tensors.values()]


def generators_to_plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return the generators' state without tensors: it goes into a rank's JSON."""
    plain = dict(state)
    for name in ("torch", "cuda"):
        if plain[name] is not None:
            plain[name] = bytes(plain[name].tolist())
    return plain


def generators_from_plain(plain: dict[str, Any]) -> dict[str, Any]:
    """Return what `generators_to_plain` was given."""
    state = dict(plain)
    for name in ("torch", "cuda"):
        if state[name] is not None:
            state[name] = torch.frombuffer(bytearray(state[name]), dtype=torch.uint8)
    return state
