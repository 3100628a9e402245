"""The run: counts steps, logs, saves when due, handles preemption, and proves what was seen.

Everything that has to happen at a definite moment happens between two batches: by then all of the
script's code for a step has run, in whatever order it was written.
"""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torchmuster.core.model import contract
from torchmuster.core.model.progress import RankPhase
from torchmuster.core.model.text import span
from torchmuster.core.net.ipc import StopAhead, TrainingOver, tell
from torchmuster.errors import UsageError
from torchmuster.train import rng
from torchmuster.train.batches.loader import Loader, begin_ledger, prove
from torchmuster.train.batches.order import Sums
from torchmuster.train.heartbeat import StepState
from torchmuster.train.lockstep import Lockstep
from torchmuster.train.memory import WHERE
from torchmuster.train.meter import Number, RunMetrics, Totals, in_words, means_of, totals_at
from torchmuster.train.objects import OWN_NAME, Objects
from torchmuster.train.preempt import TIME_IS_UP, StopWatch, TimeLimit, how_to_go_on
from torchmuster.train.saves import EndOfEpoch, Moment, Saves, begin_generators
from torchmuster.train.snapshot.load import LoadedSnapshot
from torchmuster.train.snapshot.state import MisfitError, unpack

# The position of a run: steps, epochs, and the boundaries between two steps.
#
# At a boundary all of the script's code for a step has run. Boundaries are numbered along the run:
# the end of a step and the end of an epoch are one each.


@dataclass(slots=True)
class Clock:
    """Counts steps and epochs.

    Attributes:
        data: The loader whose position counts, if there is one.
        steps_done: Optimizer steps over all attempts.
        is_due: Whether a snapshot is due at the next boundary.
        boundary_step: `steps_done` at the last boundary.
        boundary_position: Epoch and position in the data there.
        optimizer_steps: Optimizer steps since the last boundary.
    """

    data: Loader | None
    objects: Objects
    step_state: StepState
    steps_done: int = 0
    epoch: int = 0
    is_due: bool = False
    boundary_step: int = 0
    boundary_position: tuple[int, int] = (0, 0)
    optimizer_steps: int = 0
    _has_optimizer: bool = field(init=False)

    def __post_init__(self) -> None:
        optimizers = self.objects.optimizers()
        self._has_optimizer = bool(optimizers)
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._note_optimizer_step)

    @property
    def boundary(self) -> int:
        """The number of the next boundary, or of the current one at a boundary."""
        return self.steps_done + self.epoch

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and position in the data."""
        data = self.data
        return (data.epoch, data.position) if data is not None else (0, self.steps_done)

    @property
    def is_at_boundary(self) -> bool:
        """Whether there is no current batch and nothing was counted since the last boundary."""
        is_between = self.step_state.count is None and self.steps_done == self.boundary_step
        return is_between and self.position == self.boundary_position

    @property
    def is_at_end_of_epoch(self) -> bool:
        """Whether the data of the epoch are used up."""
        data = self.data
        return data is not None and data.position > 0 and data.position == data.epoch_samples()

    def begin_boundaries(self) -> None:
        """Move to a boundary: a snapshot's, or the start."""
        self.boundary_step = self.steps_done
        if self.data is not None:
            self.boundary_position = self.position

    def steps_to_come(self, num_epochs: int) -> int | None:
        """Return the number of steps of the whole run; None if unknown."""
        samples = self.data.epoch_samples() if self.data is not None else None
        if self.data is None or samples is None:
            return None
        whole = max(num_epochs - self.epoch - 1, 0) * self.data.steps_per_epoch
        rest = math.ceil((samples - self.data.position) / self.data.global_batch_size)
        return self.steps_done + rest + whole

    def has_uncounted_step(self) -> bool:
        """Return whether the script has not called `run.step()` for the last batch."""
        return self.position != self.boundary_position and self.steps_done == self.boundary_step

    def pass_boundary(self) -> bool:
        """Move to the next boundary; return whether a step has ended here.

        Raises:
            UsageError: No optimizer has stepped since the last boundary.
        """
        counted = self.steps_done - self.boundary_step
        if counted and self._has_optimizer and not self.optimizer_steps:
            self._complain_about_optimizer()
        self.boundary_step, self.boundary_position = self.steps_done, self.position
        self.optimizer_steps = 0
        return counted > 0

    def _complain_about_optimizer(self) -> None:
        scalers = [t for t in self.objects.by_name.values() if hasattr(t, "get_scale")]
        if any(getattr(scaler, "may_skip_steps", True) for scaler in scalers):
            return  # a gradient scaler skips steps with infinite gradients
        raise UsageError(
            "a step was counted in which no optimizer has stepped",
            where=f"epoch {self.epoch}, step {self.steps_done}",
            fix="call optimizer.step() and then run.step() in the body of the loop over the data (with accumulate=..., when data.ends_step)",
        )

    def _note_optimizer_step(self, *_: Any) -> None:
        self.optimizer_steps += 1
        for model in self.step_state.uncalled:
            if any(parameter.grad is not None for parameter in model.module.parameters()):
                raise UsageError(
                    "the wrapped model was never called, but the one in it: no gradient was summed over the ranks",
                    where=f"epoch {self.epoch}, step {self.steps_done}",
                    fix="call what tm.wrap returned",
                )
        if not self.step_state.ends_step:
            raise UsageError(
                "the optimizer stepped in the middle of an accumulated step",
                why="the gradients of the other micro-batches are still to come",
                fix="if data.ends_step: optimizer.step(); optimizer.zero_grad()",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Options for saving and logging; see `World.resume`."""

    every_steps: int | None
    every_s: float | None
    every_epoch: bool
    asynchronous: bool
    log_every: int
    time_limit_s: float | None


class Run:
    """A training run, made by `World.resume`; the loop remains in the script."""

    def __init__(
        self,
        world: Any,
        objects: Objects,
        data: Loader | None,
        settings: RunSettings,
        saves: Saves,
        metrics: RunMetrics,
    ) -> None:
        self._world = world
        self._objects = objects
        self._data = data
        self._settings = settings
        self._saves = saves
        self._metrics = metrics
        self._clock = Clock(data, objects, world.step_state)
        self._generators: dict[str, Any] | None = None  # to be restored at the next boundary
        self._generators_before_evaluation: dict[str, Any] | None = None
        self._end_of_epoch: EndOfEpoch | None = None
        self._batch_counted = -1
        self._reported_epoch = -1  # the last epoch whose end was reported
        self.is_in_epoch = False  # the script is in the loop over `epochs`
        self._epoch_began_at = time.monotonic()
        self._is_over = False
        limit = TimeLimit(settings.time_limit_s, watches_job=world.rank == 0)
        self._watch = StopWatch(
            world.connect(),
            rank=world.rank,
            world_size=world.world_size,
            deadline=lambda: limit.deadline(saves.last_s),
            say=world.say,
            timeout_s=world.timeout_s,
        )
        self._lockstep = Lockstep(world)
        if data is not None:
            data.gate = self

    # For the script.

    @property
    def steps_done(self) -> int:
        """The number of optimizer steps over all attempts."""
        return self._clock.steps_done

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._clock.epoch

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the remaining epochs; the first one may be partly done.

        Args:
            num_epochs: Number of epochs of the whole run, over all its attempts.
        """
        clock, data = self._clock, self._data
        if clock.steps_done and clock.epoch >= num_epochs:
            self._world.say(f"all {num_epochs} epochs are done: nothing is left to train")
        self._metrics.total_steps = clock.steps_to_come(num_epochs)
        self._metrics.begin(clock.steps_done)
        while clock.epoch < num_epochs:
            if data is None or data.position == 0:
                self._put_generators_back()
            self._epoch_began_at = time.monotonic()
            self.is_in_epoch = True
            yield clock.epoch
            self.is_in_epoch = False
            self._report_epoch()
            later = self._metrics.end_epoch(clock.steps_done)
            if later:
                self._world.say(f"epoch {clock.epoch}: {in_words(later)}")
            clock.epoch += 1
            if data is not None:
                data.begin_epoch(clock.epoch)
            clock.boundary_position = clock.position
            clock.is_due = clock.is_due or self._settings.every_epoch
            self.between_steps()
        self._finish()

    def step(self, **metrics: Number) -> None:
        """Count a step and log `metrics`, each the mean over this rank's samples of the batch.

        Call it once for a batch of the loader, anywhere in the loop's body; a batch for which it is
        not called counts as a step as well.

        Raises:
            UsageError: It was called twice for one batch, or a metric is not a scalar.
        """
        step_state = self._world.step_state
        if step_state.count is not None:
            if self._batch_counted == step_state.serial:
                raise UsageError(
                    "run.step() was called twice for one batch", fix="call it once in the loop"
                )
            self._batch_counted = step_state.serial
        self.log(**metrics)
        if step_state.ends_step:
            self._count_step()
            if self._data is None:
                self.between_steps()

    def log(self, **metrics: Number) -> None:
        """Log means over this rank's samples of the current batch, without counting a step."""
        if metrics:
            count = self._world.step_state.count
            self._metrics.add(metrics, 1.0 if count is None else float(count))

    def report(self, **values: float) -> None:
        """Write values that are equal on all ranks at this step, e.g. evaluation results."""
        if self._world.rank == 0:
            self._metrics.write(self.steps_done, values)
            self._metrics.end_line()
            self._world.say(f"step {self.steps_done}: {in_words(values)}")

    def epoch_means(self) -> dict[str, float]:
        """Return the means over the epoch so far, over all ranks; a collective."""
        self._reduce_metrics()
        return means_of(self._metrics.epoch_totals)

    def save(self) -> None:
        """Request a snapshot at the next boundary between two batches; call it on all ranks."""
        self._clock.is_due = True

    def request_stop(self, reason: str) -> None:
        """Make all ranks save at the same step and exit with code 75."""
        self._watch.request(reason)

    def close(self) -> None:
        """Wait for the last save and restore the signal handlers.

        Raises:
            SnapshotError: The last save failed, and `on_save_error` is `raise`.
        """
        if self._is_over:
            return
        self._is_over = True
        self._world.step_state.heartbeat.enter(RankPhase.OVER)
        self._lockstep.close()
        try:
            self._saves.check(self.steps_done, wait=True)
        finally:
            self._watch.close()
            self._metrics.close()

    # Boundaries; called by the loader and by evaluations.

    def between_steps(self) -> None:
        """Stop or save between two batches if that is due."""
        clock = self._clock
        if clock.has_uncounted_step():
            self._count_step()  # the script logs nothing, so it does not call run.step()
        if clock.pass_boundary():
            self._lockstep.check()
        self._put_generators_back()
        self._end_of_epoch = None
        if self._watch.must_stop(self._clock.boundary):
            self.stop()
        self._saves.check(self.steps_done)
        if clock.is_due and not self._clock.is_at_end_of_epoch:
            clock.is_due = False
            if self._saves.step != clock.steps_done:
                with self._world.step_state.heartbeat.during(RankPhase.SAVE):
                    self._save()
        if self._saves.is_due_in_memory(clock.steps_done) and not clock.is_at_end_of_epoch:
            self._saves.keep_in_memory(self._moment(sums=self._metrics.pending()))

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Context in which the loader waits for a batch."""
        if self._data is not None and self._data.first_batch_is_collective:
            yield  # the readers of a stream are compared inside, so no rank may stop
        else:
            with self._watch.parked(interruptible=True):
                yield
            if self._watch.unpark():
                self.stop()
        if self._clock.is_at_end_of_epoch:
            self._report_epoch()
            self._end_of_epoch = self._saves.note_end_of_epoch()

    @contextmanager
    def evaluating(self, generators: dict[str, Any]) -> Iterator[None]:
        """Context in which an evaluation runs; a stop saves the state of the last boundary.

        Between boundaries there is no such state: then the evaluation first runs to its end. So
        does that of a sharded model, because its forward is a collective.
        """
        with self._world.step_state.heartbeat.during(RankPhase.EVALUATE):
            if self._objects.is_sharded or not self._is_at_boundary():
                yield
                return
            self._generators_before_evaluation = generators
            try:
                with self._watch.parked(interruptible=False):
                    yield
                self.before_collective()  # the script may call a collective next
            finally:
                self._generators_before_evaluation = None

    def between_batches(self) -> None:
        """Stop here if all ranks stop at the last step."""
        if self._watch.decided_here and not self._objects.is_sharded:
            self.stop()

    def before_collective(self) -> None:
        """Rule out a stop at this boundary: called before the reduction of an evaluation."""
        if self._watch.unpark():
            self.stop()

    def stop(self) -> None:
        """Save this step on all ranks, and exit."""
        clock, world, reason = self._clock, self._world, self._watch.reason
        self._save_last()
        what = self._saves.what_is_saved(clock.steps_done)
        if world.rank == 0:
            self._metrics.record.event("preempted", step=clock.steps_done, reason=reason)
            self._metrics.end_line()
            world.say(
                f"stopped after step {clock.steps_done} ({reason}); {what},"
                f" exit code {contract.EX_TEMPFAIL}: {how_to_go_on(self._saves.folder_url)}"
            )
            if TIME_IS_UP in reason:  # the next attempt would have to stop at once
                stop = StopAhead(reason=f"{reason}: after step {clock.steps_done}, {what}")
                tell(os.environ.get(contract.SOCKET_VARIABLE, ""), stop)
        world.barrier("stopped", timeout_s=60.0)
        raise SystemExit(contract.EX_TEMPFAIL)

    # Beginning.

    def begin(self, seed: int) -> None:
        """Load the newest good snapshot and continue from it; without one begin at step 0.

        Raises:
            SnapshotError: There are snapshots, but none is good or none fits the script.
        """
        world, clock, url = self._world, self._clock, self._saves.folder_url
        loaded = self._saves.load()
        if loaded is None:
            world.say(f"no snapshot in {url}: beginning at step 0")
            # So far the ranks have the same random numbers (for the model); from here on dropout
            # must differ.
            rng.seed_everything(seed, world.rank)
            # Save the start, too: an attempt that dies before the first save must not begin with
            # other weights, if the script made its model before the generators were seeded.
            clock.is_due = True
        else:
            try:
                self._begin_at(loaded, seed)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise MisfitError(
                    f"the snapshot of step {loaded.manifest.step} holds no run's state",
                    where=url,
                    why=repr(error)[:300],
                    fix="it was not written by torchmuster: start over with another folder",
                ) from error
        clock.begin_boundaries()
        if world.rank == 0:
            order = self._data.order_settings() if self._data is not None else None
            fields = {"world_size": world.world_size, "folder": url, "order": order}
            fields |= {"source": "memory"} if loaded is not None and loaded.held else {}
            self._metrics.record.event("resumed", step=clock.steps_done, **fields)
        self._watch.begin(clock.boundary)
        if loaded is not None:
            step, epoch = clock.steps_done, clock.epoch
            where = WHERE if loaded.held else f"{url}{self._saves.why_not_from_memory()}"
            world.say(f"resuming after step {step} (epoch {epoch}) from {where}")

    def _begin_at(self, loaded: LoadedSnapshot, seed: int) -> None:
        manifest, clock = loaded.manifest, self._clock
        own = unpack(manifest.state[OWN_NAME], {})
        clock.steps_done = manifest.step
        clock.epoch = manifest.epoch
        self._metrics.epoch_totals = totals_at(own["epoch_totals"], manifest.ranks.values())
        if self._data is not None:
            if own["data"] is None:
                raise MisfitError(
                    "the snapshot was made without data=...",
                    where="World.resume(data=...)",
                )
            self._data.load_state_dict(own["data"])
            pieces = [piece["ledger"] for piece in manifest.ranks.values()]
            begin_ledger(self._data, pieces, manifest.step, is_first=self._world.rank == 0)
        self._generators = begin_generators(manifest, self._world, seed)

    def _put_generators_back(self) -> None:
        generators, self._generators = self._generators, None
        if generators is not None:
            rng.restore(generators)

    # The state at a boundary.

    def _is_at_boundary(self) -> bool:
        """Whether a resumed run can begin with this state without skipping any code."""
        end = self._end_of_epoch
        # After an epoch's last batch the script's own code has run, and will again: what is saved
        # undoes a scheduler's step, but not an average that was changed in place.
        return self._clock.is_at_boundary and (end is None or end.is_unchanged())

    # Steps.

    def _count_step(self) -> None:
        clock, settings = self._clock, self._settings
        clock.steps_done += 1
        self._world.step_state.heartbeat.step(clock.steps_done)
        if settings.every_steps is not None and clock.steps_done % settings.every_steps == 0:
            clock.is_due = True
        if clock.steps_done % settings.log_every == 0:
            self._reduce_metrics()

    def _reduce_metrics(self) -> None:
        """Reduce the metrics of the last steps; in the same collective agree on a timed save."""
        every_s = self._settings.every_s
        is_late = every_s is not None and time.monotonic() - self._saves.at >= every_s
        is_due = self._metrics.reduce(self.steps_done, flag=is_late and self._world.rank == 0)
        self._clock.is_due = self._clock.is_due or is_due

    def _report_epoch(self) -> None:
        """Prove what the epoch saw and report its means, once; a collective."""
        clock, data = self._clock, self._data
        if self._reported_epoch == clock.epoch:
            return
        self._reported_epoch = clock.epoch
        means = self.epoch_means()
        proof = prove(data) if data is not None else {}
        elapsed_s = time.monotonic() - self._epoch_began_at
        if self._world.rank == 0:
            self._metrics.record.event(
                "epoch",
                epoch=clock.epoch,
                step=clock.steps_done,
                elapsed_s=round(elapsed_s, 3),
                values=means,
                ledger=proof,
            )
            self._metrics.end_line()
            parts = [in_words(means)] if means else []
            parts += [f"{proof['samples']} samples, each once"] if proof else []
            self._world.say(f"epoch {clock.epoch}: {'  '.join([*parts, f'({span(elapsed_s)})'])}")

    # Saving and ending.

    def _save(self, *, may_skip: bool = True) -> None:
        """Start a snapshot of this step, unless a write is running and this one may be skipped."""
        clock = self._clock
        if may_skip and self._saves.must_skip():
            self._world.say(
                f"step {clock.steps_done}: a save is still running, this one is skipped"
            )
            return
        began = time.monotonic()
        self._reduce_metrics()
        clock.is_due = False
        self._saves.check(self.steps_done, wait=True)
        self._saves.save(self._moment(sums={}))
        blocked_s = self._saves.at - began
        if not self._settings.asynchronous:
            self._saves.check(self.steps_done, wait=True)
        if self._world.rank == 0:
            record = self._metrics.record
            record.event("save", step=clock.steps_done, blocked_s=round(blocked_s, 6))

    def _moment(self, *, sums: Totals) -> Moment:
        end = self._end_of_epoch
        return Moment(
            step=self._clock.steps_done,
            epoch=self._clock.epoch,
            own=self._own_state(),
            ledger=self._data.ledger.sums() if self._data is not None else Sums(),
            sums=sums,
            generators=end.generators if end is not None else self._generators_before_evaluation,
            end=end,
        )

    def _own_state(self) -> dict[str, Any]:
        data = self._data.state_dict() if self._data is not None else None
        return {"data": data, "epoch_totals": self._metrics.epoch_totals}

    def _save_last(self) -> None:
        """Save at the end, wait until the snapshot is complete, and report it to `muster run`."""
        with self._world.step_state.heartbeat.during(RankPhase.SAVE):
            if self._saves.step != self._clock.steps_done:
                self._save(may_skip=False)
            self._saves.check(self.steps_done, by_all=True)
        if self._world.rank == 0:
            saved = self._saves.newest_step
            over = TrainingOver(step=self._clock.steps_done, saved_step=saved)
            tell(os.environ.get(contract.SOCKET_VARIABLE, ""), over)

    def _finish(self) -> None:
        self._save_last()
        if self._world.rank == 0:
            self._metrics.record.event("finished", step=self._clock.steps_done)
        self.close()
