"""The script's objects (models, optimizers and others) as one packed state, and back."""

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from torchmuster.core.model.text import did_you_mean
from torchmuster.errors import UsageError
from torchmuster.train.snapshot.folder import Folder
from torchmuster.train.snapshot.layout import SnapshotManifest
from torchmuster.train.snapshot.load import LoadedSnapshot
from torchmuster.train.snapshot.state import MisfitError, pack, unpack
from torchmuster.train.wrap import is_sharded, reshard, shard_of, unwrap

_CANT_LOAD = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
OWN_NAME = "muster"  # the name of the run's own state in a snapshot


@dataclass(frozen=True, slots=True)
class SteppedPaths:
    """A container of paths: the parameters that optimizers step, and the optimizers' own state."""

    parameters: AbstractSet[str]
    optimizers: AbstractSet[str]

    def __contains__(self, path: object) -> bool:
        return path in self.parameters or str(path).partition(".")[0] in self.optimizers


@dataclass(frozen=True, slots=True)
class Objects:
    """The objects of a snapshot, by the names that the script gave them."""

    by_name: Mapping[str, Any]

    def check(self, options: Collection[str] = ()) -> None:
        """Refuse objects that can't be saved; a name may be a misspelt one of `options`.

        Raises:
            UsageError: One has no state_dict and load_state_dict, or a reserved name.
        """
        if OWN_NAME in self.by_name:
            raise UsageError(f"the name `{OWN_NAME}` is reserved for the run", where="World.resume")
        for name, thing in self.by_name.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                otherwise = "give it state_dict() and load_state_dict(state), or leave it out"
                raise UsageError(
                    f"`{name}` can't be saved: its type {type(thing).__name__} has no state_dict()",
                    where="World.resume",
                    fix=did_you_mean(name, options, otherwise),
                )

    def check_optimizers(self, wrapped: Collection[nn.Module]) -> None:
        """Refuse optimizers if none of them trains a model that is wrapped or given here.

        Raises:
            UsageError: None does.
        """
        models = [*wrapped, *self.models().values()]
        known, stepped = _trained(models), _stepped(self.optimizers())
        if known and stepped and not known & stepped:
            raise UsageError(
                "the optimizer has no parameter of the model",
                where="World.resume",
                why="it was made from another one, or before tm.wrap(..., sharded=True) made other parameters",
                fix="make the optimizer from what tm.wrap returns",
            )

    def refuse_others(self, wrapped: Collection[nn.Module]) -> RemovableHandle:
        """Refuse an optimizer of these models, at its first step, if no object here saves it."""
        saved = {id(part) for thing in self.by_name.values() for part in (thing, *_held(thing))}

        def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if id(optimizer) in saved or not any(optimizer.state.values()):
                return
            if _trained([*wrapped, *self.models().values()]) & _stepped([optimizer]):
                raise UsageError(
                    "an optimizer trains the model, and no snapshot would have its state",
                    fix=f"tm.resume(..., optimizer=...) with this {type(optimizer).__name__}",
                )

        return register_optimizer_step_post_hook(check)

    def models(self) -> dict[str, nn.Module]:
        """Return the models, unwrapped."""
        return {k: unwrap(v) for k, v in self.by_name.items() if isinstance(v, nn.Module)}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers."""
        return [v for v in self.by_name.values() if isinstance(v, torch.optim.Optimizer)]

    @property
    def is_sharded(self) -> bool:
        """Whether a model's parameters are sharded over ranks."""
        return any(is_sharded(model) for model in self.models().values())

    def reshard(self) -> None:
        """Restore the sharded parameters that the optimizers have, whatever forward came last."""
        for model in self.models().values():
            reshard(model)

    def buffer_paths(self) -> set[str]:
        """Return the paths of buffers, e.g. running means, which may differ between ranks."""
        return {
            f"{k}.{name}" for k, model in self.models().items() for name, _ in model.named_buffers()
        }

    def stepped(self) -> "SteppedPaths":
        """Return the paths that only an optimizer's step changes."""
        self.reshard()
        stepped = _stepped(self.optimizers())
        parameters = {
            f"{k}.{name}"
            for k, model in self.models().items()
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if id(parameter) in stepped
        }
        own = {k for k, v in self.by_name.items() if isinstance(v, torch.optim.Optimizer)}
        return SteppedPaths(parameters, own)

    def expected_bytes(self) -> int:
        """Return how many bytes this rank saves, including states of an optimizer's first step."""
        _, tensors = self.pack()
        found = sum(_num_bytes(tensor) for tensor in tensors.values())
        for optimizer in self.optimizers():
            if not optimizer.state:
                groups = optimizer.param_groups
                found += sum(_num_made(g) * sum(map(_num_bytes, g["params"])) for g in groups)
        return found

    def still_to_come(self) -> int:
        """Return how much host memory this rank still needs for gradients and optimizer states."""
        found = 0
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                made = 0 if optimizer.state else _num_made(group)
                here = [one for one in group["params"] if one.device.type == "cpu"]
                found += made * sum(map(_num_bytes, here))
                found += sum(
                    _num_bytes(one) for one in here if one.grad is None and one.requires_grad
                )
        return found

    def pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the packed state, and the tensors by path without copies."""
        self.reshard()
        tensors: dict[str, torch.Tensor] = {}
        sharded = self.is_sharded
        state = {
            name: pack(self._state_of(thing, sharded), name, tensors)
            for name, thing in self.by_name.items()
        }
        return state, tensors

    def load(self, loaded: LoadedSnapshot, folder: Folder) -> None:
        """Load a snapshot into the objects.

        Raises:
            SnapshotError: It is a snapshot of other objects, or of another model.
        """
        manifest = loaded.manifest
        self.reshard()
        self._check_names(manifest, folder.url)
        if (manifest.kind == "sharded") != self.is_sharded:
            now = "sharded" if self.is_sharded else "whole on every rank"
            raise MisfitError(
                f"the snapshot of step {manifest.step} is {manifest.kind}, the model is {now}",
                where=folder.url,
                fix="wrap the model as it was when the snapshot was made",
            )
        if self.is_sharded:
            from torchmuster.train.snapshot.sharded import read_into

            self._make_room(manifest)
            _, targets = self.pack()
            read_into(folder, manifest, targets, loaded.parts)
            tensors = targets
        else:
            tensors = loaded.tensors()
            self._check_models(manifest)
        for name, thing in self.by_name.items():
            state = unpack(manifest.state[name], tensors)
            try:
                self._load_into(thing, state)
            except _CANT_LOAD as error:
                raise MisfitError(
                    f"`{name}` can't load the snapshot of step {manifest.step}",
                    where=folder.url,
                    why=str(error)[:500],
                    fix="restore the script that it was made with, or start over with another"
                    " folder",
                ) from error

    def _check_names(self, manifest: SnapshotManifest, url: str) -> None:
        saved, given = set(manifest.state) - {OWN_NAME}, set(self.by_name)
        if saved != given:
            lacking = [f"`{name}` is in the snapshot only" for name in sorted(saved - given)]
            extra = [f"`{name}` is in the script only" for name in sorted(given - saved)]
            raise MisfitError(
                f"the snapshot of step {manifest.step} contains other objects than the script",
                where=f"World.resume, {url}",
                why="; ".join(lacking + extra),
                fix="pass the same names to resume(); if the folder belongs to another script, choose one with folder=...",
            )

    def _check_models(self, manifest: SnapshotManifest) -> None:
        from torchmuster.train.snapshot.load import check_tensors

        wanted: dict[str, torch.Tensor] = {}
        for name, model in self.models().items():
            pack(model.state_dict(), name, wanted)
        shapes = {path: tuple(tensor.shape) for path, tensor in wanted.items()}
        prefixes = tuple(f"{name}." for name in self.models())
        check_tensors(manifest, shapes, only=prefixes)

    def _state_of(self, thing: Any, sharded: bool) -> Any:
        if isinstance(thing, nn.Module):
            return unwrap(thing).state_dict()
        # Before the first step, torch's function would create the state by a step that then counts.
        if sharded and isinstance(thing, torch.optim.Optimizer) and thing.state:
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

            return get_optimizer_state_dict(self._model_of(thing), thing)
        return thing.state_dict()

    def _make_room(self, manifest: SnapshotManifest) -> None:
        """Make optimizers create the shards into which a snapshot is read."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        for name, thing in self.by_name.items():
            is_saved = any(path.startswith(f"{name}.") for path in manifest.tensors)
            if is_saved and isinstance(thing, torch.optim.Optimizer):
                get_optimizer_state_dict(self._model_of(thing), thing)

    def _load_into(self, thing: Any, state: Any) -> None:
        if isinstance(thing, nn.Module):
            unwrap(thing).load_state_dict(state)
        elif isinstance(thing, torch.optim.Optimizer) and _is_by_name(state):
            from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

            set_optimizer_state_dict(self._model_of(thing), thing, state)
        else:
            thing.load_state_dict(state)

    def _model_of(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in self.models().values():
            if any(id(p) in ids for p in model.parameters()):
                return model
        raise UsageError("an optimizer has no parameter of any model given to resume()")


def _trained(models: Collection[nn.Module]) -> set[int]:
    return {id(parameter) for model in models for parameter in model.parameters()}


def _stepped(optimizers: Collection[torch.optim.Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]}


def _held(thing: Any) -> list[Any]:
    """Return the parts that an object holds and saves itself, e.g. a wrapped optimizer.

    A learning-rate schedule saves none.
    """
    parts = [] if isinstance(thing, LRScheduler) else getattr(thing, "__dict__", {}).values()
    return [one for part in parts for one in (part if isinstance(part, list) else (part,))]


def _num_bytes(tensor: torch.Tensor) -> int:
    local = shard_of(tensor)
    return local.numel() * local.element_size()


def _num_made(group: Mapping[str, Any]) -> int:
    """Return how many tensors of a parameter's size an optimizer's first step creates.

    This is derived from the options in its group.
    """
    if "betas" in group:
        return 3 if group.get("amsgrad") else 2
    return int(bool(group.get("momentum"))) + int("alpha" in group)


def _is_by_name(state: Any) -> bool:
    """Whether an optimizer's state is keyed by parameter names, as for a sharded model."""
    return any(isinstance(key, str) for key in state["state"])
