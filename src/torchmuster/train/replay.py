"""The run of a replay: repeats one step of an earlier run from the newest snapshot before it.

All ranks are there, each in a separate process, and do what they did: so samples, random numbers
and the order of sums are the run's. Up to the step nothing is different. In the step, one rank is
inspected: the first NaN stops it in the debugger, or is printed. The earlier run is not changed,
and nothing is saved.
"""

import os
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.overrides import TorchFunctionMode, resolve_name

from torchmuster.core.model import contract
from torchmuster.errors import UsageError
from torchmuster.train import rng
from torchmuster.train.batches.loader import Loader
from torchmuster.train.batches.order import Sums, sums_of
from torchmuster.train.finite import BadStep, NotFiniteError, are_finite, replay_command, tensors_of
from torchmuster.train.meter import RunMetrics
from torchmuster.train.objects import Objects
from torchmuster.train.precision import Precision
from torchmuster.train.run import Run, RunSettings
from torchmuster.train.saves import Moment, Saves
from torchmuster.train.snapshot.folder import Folder, open_folder
from torchmuster.train.snapshot.state import SnapshotError
from torchmuster.train.wrap import shard_of

# The first NaN of a step: which operation made it, in which line and module of the script.
#
# Every operation that Python calls is checked before and after; nothing is computed differently,
# and no generator is used. An operation that returns NaN has made it if no input had one, or only
# one that no checked operation has made: that one came with the data or was in the weights. What
# runs below Python, a backward pass or a compiled model, is not seen: for a backward pass the first
# parameter with a gradient that is not finite is named, and in a debugger torch's anomaly mode
# stops in it.


_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
# These return uninitialized memory.
_UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "resize_"})
# These make no NaN: `parameter.grad` was made by a backward pass.
_MAKES_NOTHING = frozenset({"__get__", "detach", "backward"})
_WITH_NUMBERS = (torch.Tensor, nn.Parameter)
_MAX_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NanOrigin:
    """An operation that made a NaN.

    Attributes:
        text: The facts, in lines.
        frame: The script's frame that called it; None if unknown.
    """

    text: str
    frame: types.FrameType | None


class NanBirths(TorchFunctionMode):
    """Checks operations while it is entered.

    Args:
        modules: The modules of the script's models, by name.
        tell: Called with each birth, once for each line of the script and operation.
    """

    def __init__(self, modules: Mapping[str, nn.Module], tell: Callable[[NanOrigin], None]) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in modules.items()}
        self._tell = tell
        self._is_over = False
        self._pid = os.getpid()
        self._shown: set[tuple[str, int, str]] = set()
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation, and check its inputs and outputs for NaN."""
        kwargs = kwargs or {}
        # A compiler must not trace the checks; loader workers forked meanwhile must not report.
        if torch.compiler.is_compiling() or self._is_over or os.getpid() != self._pid:
            return func(*args, **kwargs)
        given = [tensor for tensor in tensors_of((args, kwargs)) if _has_nan(tensor)]
        were_known = any(map(self._is_known, given))
        result = func(*args, **kwargs)
        made = [tensor for tensor in tensors_of(result) if _has_nan(tensor)]
        name = _name_of(func)
        if made and name not in _UNWRITTEN:
            for tensor in made:
                self._known[id(tensor)] = weakref.ref(tensor)
            if not were_known and name not in _MAKES_NOTHING:
                self._born(name, args, kwargs, made[0], came_in=bool(given))
        return result

    def close(self) -> None:
        """Stop checking, also from within a call, where a mode can't be exited."""
        self._is_over = True

    def _is_known(self, tensor: torch.Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is not None and known() is tensor

    def _born(
        self, name: str, args: Any, kwargs: Any, made: torch.Tensor, *, came_in: bool
    ) -> None:
        frame, module = self._place(sys._getframe(2))
        key = (frame.f_code.co_filename, frame.f_lineno, name) if frame else ("", 0, name)
        if key in self._shown or len(self._shown) >= _MAX_SHOWN:
            return
        self._shown.add(key)
        where = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
        inside = f", in module `{module}`" if module else ""
        what = f"`{name}`{where}{inside}"
        if came_in:
            text = f"NaN came into {what}: no operation of this step has made it, so the data or the weights had it"
        else:
            text = f"{what} has made NaN: {_count(shard_of(made))}"
            inputs = [_describe(tensor) for tensor in tensors_of((args, kwargs))[:4]]
            text += f"; from {', '.join(inputs)}" if inputs else ""
        self._tell(NanOrigin(text=text, frame=frame))

    def _place(self, frame: types.FrameType | None) -> tuple[types.FrameType | None, str]:
        """Return the script's innermost frame, and the innermost running module."""
        script, module = None, ""
        while frame is not None and not (script and module):  # a module may call the function
            module = module or self._names.get(id(frame.f_locals.get("self")), "")
            if script is None and not frame.f_code.co_filename.startswith((_TORCH, _OURS, "<")):
                script = frame
            frame = frame.f_back
        return script, module


class GradientWatch:
    """Names this rank's first parameter whose gradient is not finite, before the all-reduce.

    Args:
        parameters: The parameters of the script's models, by name.
        tell: Called once, with a text.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], tell: Callable[[str], None]) -> None:
        self._tell: Callable[[str], None] | None = tell
        self._handles = [
            parameter.register_hook(lambda gradient, name=name: self._look(name, gradient))
            for name, parameter in parameters.items()
            if parameter.requires_grad
        ]

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def _look(self, name: str, gradient: torch.Tensor) -> None:
        tell = self._tell
        local = shard_of(gradient)
        if tell is not None and not bool(torch.isfinite(local).all()):
            self._tell = None
            tell(
                f"the first gradient that is not finite on this rank is that of `{name}`: {_count(local)}"
            )


def _has_nan(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return False
    local = shard_of(tensor)
    if type(local) not in _WITH_NUMBERS:
        return False  # a compiler traces with tensors without values
    try:
        if local.layout != torch.strided or not local.untyped_storage().size():
            return False  # FSDP frees the memory of parameters that it is about to gather
        return bool(torch.isnan(local.detach()).any())
    except (RuntimeError, NotImplementedError):  # e.g. within torch.vmap
        return False


def _name_of(func: Any) -> str:
    if (schema := getattr(func, "_schema", None)) is not None:
        return str(schema.name)  # e.g. `aten::log`, for a compiled function
    name = resolve_name(func) or getattr(func, "__name__", repr(func))
    return str(name).removeprefix("torch.").removeprefix("_C._nn.").rpartition(".")[2] or str(name)


def _count(tensor: torch.Tensor) -> str:
    num_nan, num_inf = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
    parts = [
        f"{count} {word}" for count, word in ((num_nan, "NaN"), (num_inf, "infinite")) if count
    ]
    return f"{' and '.join(parts) or 'none'} of {tensor.numel()} values, {_shape(tensor)}"


def _describe(tensor: torch.Tensor) -> str:
    """Return shape and range of an input."""
    values = shard_of(tensor).detach()
    if not values.numel() or values.is_complex() or values.dtype == torch.bool:
        return _shape(tensor)
    try:
        low, high = values.min().item(), values.max().item()
    except (RuntimeError, NotImplementedError):  # as in `_has_nan`
        return _shape(tensor)
    return f"{_shape(tensor)} between {low:.6g} and {high:.6g}"


def _shape(tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {list(tensor.shape)}"


# Saves the boundary before a step after the step has gone wrong, so that replaying it takes one
# step.
#
# Before the first optimizer of a step, weights and optimizer states are still the boundary's. What
# a forward changes by then, buffers and generators, is kept at each boundary, with the position in
# the data.


# What a step changes in other objects before the optimizer is unknown.
_KNOWN = (nn.Module, torch.optim.Optimizer, LRScheduler, Precision, torch.amp.GradScaler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What is kept of a boundary.

    Attributes:
        moment: What is saved of it, without ledger and sums.
        noted: How many samples the loader's ledger had recorded.
        buffers: The models' buffers, each with its value.
        schedules: How often each scheduler had stepped.
    """

    moment: Moment
    noted: int
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    schedules: list[int]


class BoundaryRun(Run):
    """A run that can save the boundary before its current step."""

    _boundary: Boundary | None = None

    def between_steps(self) -> None:
        """As in every run, and keep what this step will change."""
        super().between_steps()
        before = self._boundary
        now = (self.steps_done, self.epoch)
        if before is None or (before.moment.step, before.moment.epoch) != now:
            self._boundary = self._keep()

    def save_boundary(self) -> None:
        """Save the boundary before this step, on all ranks, if nothing else has changed since."""
        boundary, saves = self._boundary, self._saves
        if boundary is None or not self._is_unchanged(boundary):
            return
        step = boundary.moment.step
        if saves.step == step:
            return
        with torch.no_grad():
            for buffer, value in boundary.buffers:
                buffer.copy_(value)
        ledger, sums = self._ledger_at(boundary), self._metrics.pending()
        try:
            saves.save(replace(boundary.moment, ledger=ledger, sums=sums))
            saves.check(step, by_all=True)
        except SnapshotError as error:  # the replay then starts from an older snapshot
            self._world.say(f"step {step} is not saved: {error.what}; because: {error.why}")

    def _keep(self) -> Boundary:
        own = self._own_state()
        return Boundary(
            moment=Moment(
                step=self.steps_done,
                epoch=self.epoch,
                own=own | {"epoch_totals": dict(own["epoch_totals"])},
                ledger=Sums(),
                generators=rng.capture(),
            ),
            noted=self._data.ledger.noted if self._data is not None else 0,
            buffers=self._keep_buffers(),
            schedules=_schedules(self._objects),
        )

    def _keep_buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        before, now = self._boundary, _buffers(self._objects)
        if before is None or not _are_those(now, before.buffers):
            return [(buffer, buffer.clone()) for buffer in now]
        if now:  # reuse the last boundary's copies: a few times faster than new ones
            with torch.no_grad():
                torch._foreach_copy_([value for _, value in before.buffers], now)
        return before.buffers

    def _is_unchanged(self, boundary: Boundary) -> bool:
        """Say whether present and kept state together are the boundary's; equal on all ranks."""
        return (
            _are_those(_buffers(self._objects), boundary.buffers)
            and not self._clock.optimizer_steps
            and boundary.moment.step == self.steps_done
            and all(isinstance(thing, _KNOWN) for thing in self._objects.by_name.values())
            and boundary.schedules == _schedules(self._objects)
        )

    def _ledger_at(self, boundary: Boundary) -> Sums:
        if self._data is None:
            return Sums()
        ledger = self._data.ledger
        return ledger.sums() - sums_of(ledger.ids()[boundary.noted :])


def _buffers(objects: Objects) -> list[torch.Tensor]:
    return [buffer for model in objects.models().values() for buffer in model.buffers()]


def _are_those(buffers: list[torch.Tensor], kept: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Say whether a model's buffers are the kept tensors themselves; a script may replace them."""
    return len(buffers) == len(kept) and all(
        one is other for one, (other, _) in zip(buffers, kept, strict=True)
    )


def _schedules(objects: Objects) -> list[int]:
    return [one.last_epoch for one in objects.by_name.values() if isinstance(one, LRScheduler)]


# The snapshots of the replayed run: those before the step, read-only.


class SnapshotsBefore(Folder):
    """A folder as it was before a step; it belongs to a run that may still be running.

    Args:
        url: The folder of the earlier run.
        step: The step to repeat.
    """

    is_foreign = True

    def __init__(self, url: str, step: int) -> None:
        self._folder, self._step = open_folder(url), step
        self.url = self._folder.url

    def steps(self) -> list[int]:
        """Return the steps of the snapshots before the step, the newest first."""
        return [step for step in self._folder.steps() if step < self._step]

    def size(self, step: int, name: str) -> int:
        """Return the size of a committed file in bytes."""
        return self._folder.size(step, name)

    def read_into(self, step: int, name: str, buffer: memoryview, begin: int = 0) -> int:
        """Fill `buffer` from a committed file."""
        return self._folder.read_into(step, name, buffer, begin)

    def _names(self) -> list[str]:
        return self._folder._names()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise SnapshotError(
            "a replay was about to change the snapshots of the run that it replays",
            where=self.url,
            fix="this is a bug of torchmuster; nothing was changed",
        )

    set_aside = claim_generation = begin = create = commit = abandon = delete = tidy = _refuse


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
    """Return the run of a script, or in a replay the one that repeats a step."""
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
    """Record which code this attempt runs, on rank 0 under muster.

    Done at the start, as a rank that is killed can't do it at the end.
    """
    if not os.environ.get(contract.SOCKET_VARIABLE):
        return
    from torchmuster.core.node.spawner.last_words import CodeNote

    script = getattr(sys.modules.get("__main__"), "__file__", None)
    code = CodeNote(os.path.dirname(os.path.realpath(script)) if script else None).read()
    if code is not None:
        metrics.record.event("code", **asdict(code))


class ReplayRun(Run):
    """A run that ends after one step; see the module's docstring."""

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
        self._check_position()

    def between_steps(self) -> None:
        """Inspect from the boundary before the step on; end at the one after it."""
        super().between_steps()
        self._check_position()

    def save(self) -> None:
        """Do nothing: a replay saves nothing."""

    def judge_bad_step(self, bad: BadStep) -> None:
        """Handle gradients that are not finite: note an earlier step's; end at the replayed one."""
        step, order = bad.step, self._order
        if step < order.step:
            self._first_bad = self._first_bad or step
            return
        self._close_watches()
        comparison = "the run has not noted these gradients, so they can't be compared with its own"
        if order.gradients:
            same = tuple(bad.checksums) == order.gradients
            comparison = (
                "the gradients of all ranks are those of the run, bit for bit"
                if same
                else "the gradients are not finite either, but not bit for bit those of the run"
            )
        raise NotFiniteError(
            f"the gradients of step {step} are not finite, made again as in the run",
            why=f"{bad.why}; {comparison}",
            fix=f"what was printed of rank {order.rank} above names the operation; --rank looks into another one",
        )

    # The step.

    def _check_position(self) -> None:
        done, step = self.steps_done, self._order.step
        if done >= step:
            self._end()
        elif done == step - 1 and not self._is_armed:
            self._is_armed = True
            self._check_weights()
            if self._world.rank == self._order.rank:
                self._watch_closely()

    def _check_weights(self) -> None:
        """Refuse a step that began with weights that are not finite; a collective if sharded."""
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

    def _tell_birth(self, birth: NanOrigin) -> None:
        self.say_here(birth.text)
        torch.autograd.set_detect_anomaly(False)  # a backward pass with this NaN says nothing new
        agent = os.environ.get(contract.SOCKET_VARIABLE, "")
        if not self._order.debugger or not agent or birth.frame is None:
            return
        from torchmuster.core.node.spawner.last_words import stop_at

        if not stop_at(agent, str(self._world.rank), birth.frame, birth.text):
            self._close_watches()
            self.say_here("the debugger was left, so the replay ends here")
            raise SystemExit(1)  # an exception would open the debugger once more

    def _close_watches(self) -> None:
        torch.autograd.set_detect_anomaly(False)
        if self._births is not None:
            self._births.close()
        if self._gradients is not None:
            self._gradients.close()

    # The end.

    def _end(self) -> None:
        """End after the step, on all ranks: it did not fail."""
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
        """Do nothing: a replay saves nothing."""

    def _finish(self) -> None:
        raise UsageError(
            f"the run ends after step {self.steps_done}: there is no step {self._order.step}",
            where=f"--step {self._order.step}",
        )

    def say_here(self, text: str) -> None:
        """Print a line for the user who inspects this rank."""
        print(f"muster: rank {self._world.rank}: {text}", file=sys.stderr, flush=True)


def _is_compiled(model: Any) -> bool:
    if not isinstance(model, nn.Module):
        return False
    return any(
        hasattr(one, "_orig_mod") or getattr(one, "_compiled_call_impl", None) is not None
        for one in model.modules()
    )
