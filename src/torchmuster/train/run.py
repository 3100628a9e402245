"""The run: counts steps, logs, saves when due, notices preemption, and proves what was seen.

Everything that has to happen at a definite moment happens between two batches: then all of the user's
code for a step has run, in whatever order it was written.
"""

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torchmuster.errors import UsageError
from torchmuster.model import contract
from torchmuster.train import rng
from torchmuster.train.exchange import gather_bytes, gather_ints
from torchmuster.train.keyed import DatasetError
from torchmuster.train.ledger import Sums, name_faults, sums_of
from torchmuster.train.loader import Loader
from torchmuster.train.meter import Meter, Number
from torchmuster.train.objects import OWN_NAME, Objects
from torchmuster.train.preempt import StopWatch
from torchmuster.train.sinks import MetricSink, Progress, Record
from torchmuster.train.snapshot import writer
from torchmuster.train.snapshot.load import Loaded
from torchmuster.train.snapshot.saver import Saver
from torchmuster.train.snapshot.staging import Staged, Staging, whole_boxes
from torchmuster.train.snapshot.state import SnapshotError, pack, unpack

_SAVE_FLAG = "muster/save"
_DEADLINE_MARGIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How a run saves and logs; see `World.resume`."""

    every_steps: int | None
    every_s: float | None
    asynchronous: bool
    when_busy: str
    on_save_error: str
    log_every: int
    time_limit_s: float | None


@dataclass(slots=True)
class Clock:
    """Where the run stands, and what is due.

    Attributes:
        steps_done: Optimizer steps over all attempts.
        saved_step: The step of the newest snapshot that was ordered; -1 for none.
    """

    steps_done: int = 0
    epoch: int = 0
    saved_step: int = -1
    is_due: bool = False
    saved_at: float = field(default_factory=time.monotonic)
    num_saves: int = 0
    boundary_step: int = 0
    boundary_position: tuple[int, int] = (0, 0)
    optimizer_steps: int = 0


class Run:
    """Made by `World.resume`; wraps the loop without owning it.

    Attributes:
        record: The run's own events.
        sinks: Where metrics go beside the record.
    """

    def __init__(
        self,
        world: Any,
        objects: Objects,
        data: Loader | None,
        settings: RunSettings,
        crew: writer.Crew,
        record: Record,
        sinks: list[MetricSink],
    ) -> None:
        self.record = record
        self.sinks = sinks
        self._world = world
        self._objects = objects
        self._data = data
        self._settings = settings
        self._saver = Saver(crew)
        self._staging = Staging()
        self._clock = Clock()
        self._meter = Meter()
        self._epoch_totals: dict[str, tuple[float, float]] = {}
        self._progress = Progress(sys.stderr)
        self._generators: dict[str, Any] | None = None  # to be put back at the next boundary
        self._generators_before_evaluation: dict[str, Any] | None = None
        self._end_of_epoch: _EndOfEpoch | None = None
        self._batch_counted = -1
        self._total_steps: int | None = None
        self._is_over = False
        self._watch = StopWatch(
            world.connect(),
            rank=world.rank,
            world_size=world.world_size,
            deadline=self._deadline,
            say=world.say,
            timeout_s=world.timeout_s,
        )
        self._began_at = time.time()
        for optimizer in objects.optimizers():
            optimizer.register_step_post_hook(self._note_optimizer_step)
        if data is not None:
            data.gate = self

    # What the script calls.

    @property
    def steps_done(self) -> int:
        """Optimizer steps done over all attempts."""
        return self._clock.steps_done

    @property
    def epoch(self) -> int:
        """The epoch that the run is in."""
        return self._clock.epoch

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the epochs that are left; the first may be one that is half done.

        Args:
            num_epochs: Of the whole run, over all its attempts.
        """
        clock, data = self._clock, self._data
        if data is not None:
            left = data.epoch_samples()
            if left is not None:
                self._total_steps = self._steps_to_come(num_epochs)
        self._progress.begin(clock.steps_done)
        while clock.epoch < num_epochs:
            if data is None or data.position == 0:
                self._put_generators_back()
            began = time.monotonic()
            yield clock.epoch
            self._finish_epoch(time.monotonic() - began)
            clock.epoch += 1
            if data is not None:
                data.begin_epoch(clock.epoch)
            clock.boundary_position = (clock.epoch, 0)
            self.between_steps()
        self._finish()

    def step(self, **metrics: Number) -> None:
        """Count a step and log `metrics`, each the mean over this rank's samples of the batch.

        Call it once for a batch of the loader, anywhere in the loop's body; a batch for which it is
        not called counts as a step as well.

        Raises:
            UsageError: It was called twice for one batch, or a metric is not a scalar.
        """
        pace = self._world.pace
        if pace.count is not None:
            if self._batch_counted == pace.serial:
                raise UsageError(
                    "run.step() was called twice for one batch", fix="call it once in the loop"
                )
            self._batch_counted = pace.serial
        self.log(**metrics)
        if pace.ends_step:
            self._count_step()
            if self._data is None:
                self.between_steps()

    def _count_step(self) -> None:
        clock, settings = self._clock, self._settings
        clock.steps_done += 1
        if settings.every_steps is not None and clock.steps_done % settings.every_steps == 0:
            clock.is_due = True
        if clock.steps_done % settings.log_every == 0:
            self._reduce_metrics()

    def log(self, **metrics: Number) -> None:
        """Log means over this rank's samples of the batch in hand, without counting a step."""
        if metrics:
            count = self._world.pace.count
            self._meter.add(metrics, 1.0 if count is None else float(count))

    def report(self, **values: float) -> None:
        """Write values that are the same on all ranks, such as an evaluation's, at this step."""
        if self._world.rank == 0:
            for sink in (self.record, *self.sinks):
                sink.write(self.steps_done, values)
            words = "  ".join(f"{name} {value:.6g}" for name, value in values.items())
            self._progress.end()
            self._world.say(f"step {self.steps_done}: {words}")

    def save(self) -> None:
        """Ask for a snapshot at the next boundary between two batches; on all ranks."""
        self._clock.is_due = True

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to save and leave with exit code 75 at the same step."""
        self._watch.request(reason)

    def close(self) -> None:
        """Wait for the last save and give the signals back.

        Raises:
            SnapshotError: The last save failed.
        """
        if self._is_over:
            return
        self._is_over = True
        try:
            self._saver.wait()
        finally:
            self._watch.close()
            self._progress.end()
            for sink in self.sinks:
                sink.close()

    # Boundaries: the loader calls these.

    def between_steps(self) -> None:
        """All code of the last step has run: stop here, or save here, if that is due."""
        clock = self._clock
        self._check_step()
        self._put_generators_back()
        self._end_of_epoch = None
        if self._watch.must_stop(self._boundary()):
            self._stop()
        self._check_saver()
        if clock.is_due and not self._at_end_of_epoch():
            clock.is_due = False
            if clock.saved_step != clock.steps_done:
                self._save()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """In the body, the loader waits for a batch."""
        if not getattr(self._data, "_heads_compared", True):
            yield  # a stream's first batch: a collective waits in there, so nobody may stop
        else:
            with self._watch.parked(interruptible=True):
                yield
            if self._watch.unpark():
                self._stop()
        if self._at_end_of_epoch():
            self._end_of_epoch = self._note_end_of_epoch()

    def stop(self) -> None:
        """The wait for data was interrupted: this is the step that was agreed."""
        self._stop()

    @contextmanager
    def evaluating(self, generators: dict[str, Any]) -> Iterator[None]:
        """In the body, an evaluation runs; a stop in it saves the state of the last boundary.

        Away from a boundary there is no such state: then the evaluation runs to its end first.
        """
        if not self._is_at_boundary():
            yield
            return
        self._generators_before_evaluation = generators
        with self._watch.parked(interruptible=False):
            yield
        self.before_collective()  # the script may make one of its own now
        self._generators_before_evaluation = None

    def between_batches(self) -> None:
        """Stop here if all ranks are to stop at the step that was done last."""
        if self._watch.decided_here:
            self._stop()

    def before_collective(self) -> None:
        """The evaluation goes into its reduction: from here on only a later boundary can be agreed."""
        if self._watch.unpark():
            self._stop()

    # Beginning.

    def begin(self, loaded: Loaded | None, seed: int) -> None:
        """Stand where the snapshot stands, or at the start."""
        world, clock = self._world, self._clock
        if loaded is None:
            # The same model on all ranks so far; from here on dropout must differ between them.
            rng.seed_everything(seed, world.rank)
            # The start is saved too: an attempt that dies before the first save may not begin with
            # other weights, if the script made its model before the generators were seeded.
            clock.is_due = True
        else:
            self._begin_at(loaded, seed)
        clock.boundary_step = clock.steps_done
        if self._data is not None:
            clock.boundary_position = (self._data.epoch, self._data.position)
        self._watch.begin(self._boundary())

    def _begin_at(self, loaded: Loaded, seed: int) -> None:
        manifest, world, clock = loaded.manifest, self._world, self._clock
        own = unpack(manifest.state[OWN_NAME], {})
        clock.steps_done = clock.saved_step = manifest.step
        clock.epoch = manifest.epoch
        self._epoch_totals = {k: (v[0], v[1]) for k, v in own["epoch_totals"].items()}
        if self._data is not None:
            if own["data"] is None:
                raise SnapshotError(
                    "the snapshot was made without data=...", where="World.resume(data=...)"
                )
            self._data.load_state_dict(own["data"])
            pieces = [piece["ledger"] for piece in manifest.ranks.values()]
            total = Sums()
            for piece in pieces:
                total = total + Sums(*piece)
            self._check_ledger_of(manifest.step, total)
            self._data.ledger.start(total if world.rank == 0 else Sums())
        self._begin_generators(loaded, seed)

    def _begin_generators(self, loaded: Loaded, seed: int) -> None:
        manifest, world = loaded.manifest, self._world
        if manifest.world_size == world.world_size:
            tensors: dict[str, torch.Tensor] = {}
            piece = unpack(manifest.ranks[world.rank]["generators"], tensors)
            self._generators = _generators_from_plain(piece)
        else:
            rng.seed_everything(seed, manifest.step, world.rank)
            world.say(
                f"the world had {manifest.world_size} workers when it was saved, now it has"
                f" {world.world_size}: random generators are seeded anew from seed and step"
            )

    def _check_ledger_of(self, step: int, total: Sums) -> None:
        data = self._data
        if data is None or total == sums_of(data.expected(data.position)):
            return
        raise SnapshotError(
            f"the ledger of the snapshot of step {step} doesn't match its position in the data",
            where=f"epoch {data.epoch}, {data.position} samples consumed",
            why=f"{total.count} samples were recorded, or others than this order has",
            fix="see that dataset, seed and shuffle are those that the snapshot was made with",
        )

    def _put_generators_back(self) -> None:
        generators, self._generators = self._generators, None
        if generators is not None:
            rng.restore(generators)

    def _steps_to_come(self, num_epochs: int) -> int | None:
        data, clock = self._data, self._clock
        if data is None:
            return None
        whole = max(num_epochs - clock.epoch - 1, 0) * data.steps_per_epoch
        rest = math.ceil(((data.epoch_samples() or 0) - data.position) / data.global_batch_size)
        return clock.steps_done + rest + whole

    # Where the run stands.

    def _boundary(self) -> int:
        """Return the number of the boundary: the end of an epoch is one more than its last step's."""
        return self._clock.steps_done + self._clock.epoch

    def _position(self) -> tuple[int, int]:
        data = self._data
        return (data.epoch, data.position) if data is not None else (0, self._clock.steps_done)

    def _is_at_boundary(self) -> bool:
        """Whether the state is one that a resumed run can begin with, without any code left out."""
        clock, end = self._clock, self._end_of_epoch
        if self._world.pace.count is not None or clock.steps_done != clock.boundary_step:
            return False
        if self._position() != clock.boundary_position:
            return False
        # Behind the last batch the script's own code has run, and will again: a scheduler's step is
        # undone in what is saved, an average that was changed in place can't be.
        return end is None or end.versions == _versions(end.tensors)

    def _note_end_of_epoch(self) -> "_EndOfEpoch":
        state, tensors = self._objects.pack()
        return _EndOfEpoch(
            state=state,
            tensors=tensors,
            versions=_versions(tensors),
            generators=rng.capture(),
        )

    # Checks between steps.

    def _check_step(self) -> None:
        """Count a step that the script has not counted; see that an optimizer has stepped."""
        clock, position = self._clock, self._position()
        if position != clock.boundary_position and clock.steps_done == clock.boundary_step:
            self._count_step()  # the script logs nothing, so it had no need to call run.step()
        counted = clock.steps_done - clock.boundary_step
        if counted and self._objects.optimizers() and not clock.optimizer_steps:
            self._complain_about_optimizer()
        clock.boundary_step, clock.boundary_position = clock.steps_done, position
        clock.optimizer_steps = 0

    def _complain_about_optimizer(self) -> None:
        scalers = [t for t in self._objects.by_name.values() if hasattr(t, "get_scale")]
        if any(getattr(scaler, "may_skip_steps", True) for scaler in scalers):
            return  # a gradient scaler leaves steps with infinite gradients out
        raise UsageError(
            "a batch was taken, and no optimizer has stepped",
            where=f"epoch {self._clock.epoch}, step {self._clock.steps_done}",
            fix="call optimizer.step() in the loop's body (with accumulate=..., when data.ends_step)",
        )

    def _note_optimizer_step(self, *_: Any) -> None:
        self._clock.optimizer_steps += 1
        if not self._world.pace.ends_step:
            raise UsageError(
                "the optimizer stepped in the middle of an accumulated step",
                why="the gradients of the other micro-batches are still to come",
                fix="if data.ends_step: optimizer.step(); optimizer.zero_grad()",
            )

    def _at_end_of_epoch(self) -> bool:
        data = self._data
        return data is not None and data.position > 0 and data.position == data.epoch_samples()

    def _check_saver(self) -> None:
        try:
            self._saver.check()
        except SnapshotError as error:
            if self._settings.on_save_error == "raise":
                raise
            self._world.say(f"error: {error.what}; because: {error.why}; training goes on")

    # Metrics.

    def _reduce_metrics(self) -> None:
        """Reduce the window's metrics; the same collective tells all that a timed save is due."""
        settings, clock = self._settings, self._clock
        due = settings.every_s is not None and (
            time.monotonic() - clock.saved_at >= settings.every_s
        )
        is_first = self._world.rank == 0
        self._meter.add({_SAVE_FLAG: float(due and is_first)}, 1.0)
        totals = self._meter.totals(self._world.device)
        self._meter.clear()
        if totals.pop(_SAVE_FLAG)[0] > 0:
            clock.is_due = True
        for name, (total, weight) in totals.items():
            before = self._epoch_totals.get(name, (0.0, 0.0))
            self._epoch_totals[name] = (before[0] + total, before[1] + weight)
        if is_first and totals:
            means = _means(totals)
            for sink in (self.record, *self.sinks):
                sink.write(clock.steps_done, means)
            self._progress.show(clock.steps_done, self._total_steps, means)

    def epoch_means(self) -> dict[str, float]:
        """Return the means over the epoch so far, over all ranks; a collective."""
        self._reduce_metrics()
        return _means(self._epoch_totals)

    def _finish_epoch(self, elapsed_s: float) -> None:
        clock, data = self._clock, self._data
        means = self.epoch_means()
        proof = self._prove() if data is not None else {}
        if self._world.rank == 0:
            self.record.event(
                "epoch",
                epoch=clock.epoch,
                step=clock.steps_done,
                elapsed_s=round(elapsed_s, 3),
                values=means,
                ledger=proof,
            )
            self._progress.end()
            words = "  ".join(f"{name} {value:.4g}" for name, value in means.items())
            seen = f"  {proof['samples']} samples, each once" if proof else ""
            self._world.say(f"epoch {clock.epoch}: {words}{seen}  ({elapsed_s:.1f} s)")
        self._epoch_totals = {}

    def _prove(self) -> dict[str, Any]:
        """Prove from all ranks' ledgers that each sample up to the position was seen once.

        Raises:
            DatasetError: Some were lost or seen twice.
        """
        data = self._data
        assert data is not None
        mine = data.ledger.sums()
        rows = gather_ints([mine.count, *_halves(mine.first), *_halves(mine.second)])
        total = Sums()
        for count, *halves in rows:
            total = total + Sums(count, _whole(halves[:2]), _whole(halves[2:]))
        expected = data.expected(data.position)
        if total == sums_of(expected):
            whole = data.position == (data.epoch_samples() or data.position)
            return {"samples": total.count, "lost": 0, "twice": 0, "whole": whole}
        seen = [
            np.frombuffer(one, dtype=np.int64) for one in gather_bytes(data.ledger.ids().tobytes())
        ]
        faults = name_faults(expected, np.concatenate(seen))
        raise DatasetError(
            f"epoch {data.epoch} did not see every sample exactly once",
            where=f"{total.count} of {data.position} samples recorded",
            why=faults,
            fix="this is a bug of torchmuster, or the dataset changed while it was read",
        )

    # Saving.

    def _save(self, *, wait: bool = False) -> None:
        clock, settings = self._clock, self._settings
        if settings.when_busy == "skip" and not wait:
            busy = sum(row[0] for row in gather_ints([int(self._saver.is_busy)]))
            if busy:
                self._world.say(
                    f"step {clock.steps_done}: a save is still running, this one is left out"
                )
                return
        began = time.monotonic()
        self._reduce_metrics()
        clock.is_due = False
        self._saver.wait()
        order = self._order()
        self._saver.submit(order)
        clock.saved_step = clock.steps_done
        clock.saved_at = time.monotonic()
        blocked_s = clock.saved_at - began
        if wait or not settings.asynchronous:
            self._saver.wait()
            if wait:
                writer.wait_for_outcome(self._saver.crew, order.number)
        if self._world.rank == 0:
            self.record.event("save", step=clock.steps_done, blocked_s=round(blocked_s, 6))

    def _order(self) -> writer.Order:
        clock, crew = self._clock, self._saver.crew
        sharded = self._objects.is_sharded
        staged: Staged | None = None
        state: Any = None
        if sharded or crew.rank == 0 or crew.copies:
            end = self._end_of_epoch
            state, tensors = (end.state, end.tensors) if end is not None else self._objects.pack()
            staged = self._stage(tensors, sharded)
            state[OWN_NAME] = pack(self._own_state(), OWN_NAME, {})
        number = clock.num_saves
        clock.num_saves += 1
        return writer.Order(
            number=number,
            step=clock.steps_done,
            epoch=clock.epoch,
            kind="sharded" if sharded else "whole",
            staged=staged,
            state=state,
            rank_state=self._rank_state(),
        )

    def _stage(self, tensors: dict[str, torch.Tensor], sharded: bool) -> Staged:
        if not sharded:
            return self._staging.copy(whole_boxes(tensors), "data-00000.bin")
        from torchmuster.train.snapshot.sharded import boxes_of

        rank = self._saver.crew.rank
        return self._staging.copy(boxes_of(tensors, rank), f"data-{rank:05d}.bin")

    def _own_state(self) -> dict[str, Any]:
        return {
            "data": self._data.state_dict() if self._data is not None else None,
            "epoch_totals": self._epoch_totals,
        }

    def _rank_state(self) -> dict[str, Any]:
        generators = self._generators_before_evaluation or rng.capture()
        if self._end_of_epoch is not None:
            generators = self._end_of_epoch.generators
        sums = self._data.ledger.sums() if self._data is not None else Sums()
        return {
            "generators": pack(_generators_to_plain(generators), "generators", {}),
            "ledger": [sums.count, sums.first, sums.second],
        }

    # Ending.

    def _deadline(self) -> float | None:
        """Return when to stop by ourselves: the limit less the time that a save takes."""
        margin = max(_DEADLINE_MARGIN_S, 3 * self._saver.last_s)
        limits = []
        if self._settings.time_limit_s is not None:
            limits.append(self._began_at + self._settings.time_limit_s)
        # Source: https://slurm.schedmd.com/sbatch.html, SLURM_JOB_END_TIME, seconds since 1970.
        slurm = os.environ.get("SLURM_JOB_END_TIME", "")
        if slurm.isdecimal():
            limits.append(float(slurm))
        return min(limits) - margin if limits else None

    def _stop(self) -> None:
        """Save at this step on all ranks, and leave."""
        clock, world = self._clock, self._world
        if clock.saved_step != clock.steps_done:
            self._save(wait=True)
        else:
            self._saver.wait()
            if clock.num_saves:  # rank 0 may still be writing it
                writer.wait_for_outcome(self._saver.crew, clock.num_saves - 1)
        if world.rank == 0:
            self.record.event("preempted", step=clock.steps_done, reason=self._watch.reason)
            world.say(
                f"stopped after step {clock.steps_done} ({self._watch.reason}); it is saved,"
                f" exit code {contract.EX_TEMPFAIL}: start the run again to go on"
            )
        self._progress.end()
        world.barrier("stopped", timeout_s=60.0)
        raise SystemExit(contract.EX_TEMPFAIL)

    def _finish(self) -> None:
        if self._clock.saved_step != self._clock.steps_done:
            self._save(wait=True)
        if self._world.rank == 0:
            self.record.event("finished", step=self._clock.steps_done)
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _EndOfEpoch:
    """The state behind an epoch's last step, in front of the script's code behind the loop.

    Attributes:
        tensors: Not copied.
        versions: How often each had been changed in place.
    """

    state: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    versions: list[int]
    generators: dict[str, Any]


def _versions(tensors: dict[str, torch.Tensor]) -> list[int]:
    return [0 if t.is_inference() else t._version for t in tensors.values()]


def _means(totals: dict[str, tuple[float, float]]) -> dict[str, float]:
    return {name: total / weight for name, (total, weight) in totals.items() if weight}


def _halves(value: int) -> tuple[int, int]:
    """Return a 64-bit number as two that an int64 tensor can hold."""
    return value >> 32, value & 0xFFFFFFFF


def _whole(halves: list[int]) -> int:
    return (halves[0] << 32) | halves[1]


def _generators_to_plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return the generators' state without tensors: it goes into a rank's JSON."""
    plain = dict(state)
    for name in ("torch", "cuda"):
        if plain[name] is not None:
            plain[name] = bytes(plain[name].tolist())
    return plain


def _generators_from_plain(plain: dict[str, Any]) -> dict[str, Any]:
    state = dict(plain)
    for name in ("torch", "cuda"):
        if state[name] is not None:
            state[name] = torch.frombuffer(bytearray(state[name]), dtype=torch.uint8)
    return state
