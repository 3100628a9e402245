"""The run that makes one step of an earlier run again: from the newest snapshot before it, to the step, and no further.

All ranks are there, each in a process of its own, and do what they did: so samples, random numbers and the order of sums are
those of the run. Until the step nothing is different. In the step one rank is looked into: the first NaN stops it in the
debugger, or is printed. Nothing of the earlier run is changed, and nothing is saved.
"""

import os
import sys
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from torchmuster.errors import UsageError
from torchmuster.model import contract
from torchmuster.train.batches.loader import Loader
from torchmuster.train.finite import BadStep, NotFiniteError, are_finite, replay_command
from torchmuster.train.meter import RunMetrics
from torchmuster.train.objects import Objects
from torchmuster.train.replay.births import Birth, GradientWatch, NanBirths
from torchmuster.train.replay.boundary import BoundaryRun
from torchmuster.train.replay.source import SnapshotsBefore
from torchmuster.train.run import Run, RunSettings
from torchmuster.train.saves import Saves


def is_replay() -> bool:
    """Say whether `muster replay` has started this process."""
    return contract.replay_order(os.environ) is not None


def make_run(
    on_nan: str,
    world: Any,
    objects: Objects,
    data: Loader | None,
    settings: RunSettings,
    saves: Saves,
    metrics: RunMetrics,
) -> Run:
    """Return the run of a script; where `muster replay` has started it, the one that makes a step again."""
    order = contract.replay_order(os.environ)
    if order is None:
        _note_code(metrics)
        kind = BoundaryRun if on_nan == "replay" else Run
        return kind(world, objects, data, settings, saves, metrics)
    saves.source = SnapshotsBefore(order.snapshots, order.step)
    settings = replace(
        settings, every_steps=None, every_s=None, every_epoch=False, time_limit_s=None
    )
    return ReplayRun(order, world, objects, data, settings, saves, metrics)


def _note_code(metrics: RunMetrics) -> None:
    """Note which code this attempt runs, on rank 0 under muster: at its end a rank that is killed can't say it."""
    if not os.environ.get(contract.SOCKET_VARIABLE):
        return
    from torchmuster.node.spawner.ran_code import CodeNote

    script = getattr(sys.modules.get("__main__"), "__file__", None)
    code = CodeNote(os.path.dirname(os.path.realpath(script)) if script else None).read()
    if code is not None:
        metrics.record.event("code", **asdict(code))


class ReplayRun(Run):
    """A run that ends behind one step; see the module's docstring."""

    def __init__(self, order: contract.ReplayOrder, *of_run: Any) -> None:
        super().__init__(*of_run)
        self._order = order
        self._is_armed = False
        self._first_bad: int | None = None
        self._births: NanBirths | None = None
        self._gradients: GradientWatch | None = None

    def begin(self, seed: int) -> None:
        """Load the newest snapshot before the step."""
        if self._order.rank >= self._world.world_size:
            raise UsageError(
                f"there is no rank {self._order.rank} in a world of {self._world.world_size}",
                where=f"--rank {self._order.rank}",
            )
        super().begin(seed)
        self._look_where_it_is()

    def between_steps(self) -> None:
        """Between two batches: look closely from here on, or end here."""
        super().between_steps()
        self._look_where_it_is()

    def save(self) -> None:
        """Do nothing: a replay saves nothing."""

    def judge_bad_step(self, bad: BadStep) -> None:
        """Take a step whose gradients are not finite: earlier ones are what they were in the run, the last one ends the replay."""
        step, order = bad.step, self._order
        if step < order.step:
            self._first_bad = self._first_bad or step
            return
        self._close_watches()
        told = "the run has not noted these gradients, so they can't be compared with its own"
        if order.gradients:
            same = tuple(bad.checksums) == order.gradients
            told = (
                "the gradients of all ranks are those of the run, bit for bit"
                if same
                else "the gradients are not finite either, but not bit for bit those of the run"
            )
        raise NotFiniteError(
            f"the gradients of step {step} are not finite, made again as in the run",
            why=f"{bad.why}; {told}",
            fix=f"what was printed of rank {order.rank} above names the operation; --rank looks into another one",
        )

    # The step.

    def _look_where_it_is(self) -> None:
        done, step = self.steps_done, self._order.step
        if done >= step:
            self._end()
        elif done == step - 1 and not self._is_armed:
            self._is_armed = True
            self._check_weights()
            if self._world.rank == self._order.rank:
                self._watch_closely()

    def _check_weights(self) -> None:
        """Refuse a step that began with weights which are not finite; a collective of sharded models."""
        models = self._objects.models().values()
        weights = [p.detach() for model in models for p in model.parameters()]
        if not weights or are_finite(weights):
            return
        began, first = self._saves.step, self._first_bad
        raise NotFiniteError(
            f"the weights are not finite at the beginning of step {self._order.step}",
            why=f"they are not in the snapshot of step {began}"
            if first is None
            else f"the gradients of step {first} were the first that were not",
            fix=f"replay an earlier step, from a snapshot before step {began}"
            if first is None
            else replay_command(first),
        )

    def _watch_closely(self) -> None:
        self.say_here(f"step {self._order.step} begins: looking for its first NaN")
        models = self._objects.models()
        if any(_is_compiled(model) for model in self._objects.by_name.values()):
            self.say_here("a model is compiled: operations inside of it can't be looked at")
        else:
            modules = {
                f"{name}.{inner}".rstrip("."): module
                for name, model in models.items()
                for inner, module in model.named_modules()
            }
            self._births = NanBirths(modules, self._tell_birth)
            self._births.__enter__()
            if self._order.debugger:
                torch.autograd.set_detect_anomaly(True, check_nan=True)
        parameters = {
            f"{name}.{inner}": parameter
            for name, model in models.items()
            for inner, parameter in model.named_parameters()
        }
        self._gradients = GradientWatch(parameters, self.say_here)

    def _tell_birth(self, birth: Birth) -> None:
        self.say_here(birth.text)
        torch.autograd.set_detect_anomaly(
            False
        )  # a backward pass with this NaN in it says nothing new
        agent = os.environ.get(contract.SOCKET_VARIABLE, "")
        if not self._order.debugger or not agent or birth.frame is None:
            return
        from torchmuster.node.spawner.debugging import stop_at

        if not stop_at(agent, str(self._world.rank), birth.frame, birth.text):
            self._close_watches()
            self.say_here("the debugger was left, so the replay ends here")
            raise SystemExit(1)  # an exception would open it once more

    def _close_watches(self) -> None:
        torch.autograd.set_detect_anomaly(False)
        if self._births is not None:
            self._births.close()
        if self._gradients is not None:
            self._gradients.close()

    # The end.

    def _end(self) -> None:
        """End behind the step, on all ranks: it did not fail."""
        self._close_watches()
        order = self._order
        if self._world.rank == 0:
            self._metrics.end_line()
        if order.gradients:
            self._world.say(
                f"step {order.step} was made again and its gradients are finite; in the run they were not: they do not follow from"
                " snapshot, samples and random numbers. Look at the machine, at other libraries, at other generators"
            )
        else:
            self._world.say(f"step {order.step} was made again, and nothing failed")
        self._world.barrier("replayed")
        raise SystemExit(0)

    def _save_last(self) -> None:
        """Save nothing."""

    def _finish(self) -> None:
        raise UsageError(
            f"the run ends after step {self.steps_done}: there is no step {self._order.step}",
            where=f"--step {self._order.step}",
        )

    def say_here(self, text: str) -> None:
        """Print a line for the user who looks into this rank."""
        print(f"muster: rank {self._world.rank}: {text}", file=sys.stderr, flush=True)


def _is_compiled(model: Any) -> bool:
    if not isinstance(model, nn.Module):
        return False
    return any(
        hasattr(one, "_orig_mod") or getattr(one, "_compiled_call_impl", None) is not None
        for one in model.modules()
    )
