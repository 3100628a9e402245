"""The first NaN of a step: which operation made it, in which line of the script and in which module.

Every operation that Python calls is seen before and after; nothing is computed differently, and no generator is drawn from. One
that returns NaN has made it if nothing that went in had one, or had one that no operation seen here has made: then it
came in with the data or was in the weights. What runs below Python, a backward pass or a compiled model, is not seen here: of a
backward pass the first parameter is named whose gradient is not finite, and in a debugger torch's anomaly mode stops in it.
"""

import os
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_OURS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
# What they return is memory that nobody has written yet.
_UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "resize_"})
# They make nothing: `parameter.grad` is what a backward pass has made.
_LOOKS = frozenset({"__get__", "detach", "backward"})
_WITH_NUMBERS = (torch.Tensor, nn.Parameter)
_MOST_TOLD = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """An operation that made a NaN.

    Attributes:
        text: What is known of it, in lines.
        frame: Of the script, which has called it; None where that can't be told.
    """

    text: str
    frame: types.FrameType | None


class NanBirths(TorchFunctionMode):
    """Looks at operations while it is entered.

    Args:
        modules: Those of the script's models, by name.
        tell: Called with each one, once for a line of the script and an operation.
    """

    def __init__(self, modules: Mapping[str, nn.Module], tell: Callable[[Birth], None]) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in modules.items()}
        self._tell = tell
        self._is_over = False
        self._pid = os.getpid()
        self._told: set[tuple[str, int, str]] = set()
        self._known: dict[int, weakref.ref[torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation, and look at what went in and what came out."""
        kwargs = kwargs or {}
        # A compiler must not trace what follows; workers of a loader, forked meanwhile, have a user of their own.
        if torch.compiler.is_compiling() or self._is_over or os.getpid() != self._pid:
            return func(*args, **kwargs)
        given = [tensor for tensor in _tensors((args, kwargs)) if _has_nan(tensor)]
        were_known = any(map(self._is_known, given))
        result = func(*args, **kwargs)
        made = [tensor for tensor in _tensors(result) if _has_nan(tensor)]
        name = _name_of(func)
        if made and name not in _UNWRITTEN:
            for tensor in made:
                self._known[id(tensor)] = weakref.ref(tensor)
            if not were_known and name not in _LOOKS:
                self._born(name, args, kwargs, made[0], came_in=bool(given))
        return result

    def close(self) -> None:
        """Look no more: also from where it has been called itself, which a mode can't be left from."""
        self._is_over = True

    def _is_known(self, tensor: torch.Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is not None and known() is tensor

    def _born(
        self, name: str, args: Any, kwargs: Any, made: torch.Tensor, *, came_in: bool
    ) -> None:
        frame, module = self._place(sys._getframe(2))
        key = (frame.f_code.co_filename, frame.f_lineno, name) if frame else ("", 0, name)
        if key in self._told or len(self._told) >= _MOST_TOLD:
            return
        self._told.add(key)
        where = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
        inside = f", in module `{module}`" if module else ""
        what = f"`{name}`{where}{inside}"
        if came_in:
            text = f"NaN came into {what}: no operation of this step has made it, so the data or the weights had it"
        else:
            text = f"{what} has made NaN: {_count(_local(made))}"
            inputs = [_describe(tensor) for tensor in _tensors((args, kwargs))[:4]]
            text += f"; from {', '.join(inputs)}" if inputs else ""
        self._tell(Birth(text=text, frame=frame))

    def _place(self, frame: types.FrameType | None) -> tuple[types.FrameType | None, str]:
        """Return the script's innermost frame, and the innermost module that runs."""
        module = ""
        while frame is not None:
            path = frame.f_code.co_filename
            module = module or self._names.get(id(frame.f_locals.get("self")), "")
            is_script = not path.startswith((_TORCH, _OURS, "<"))
            if is_script:
                break
            frame = frame.f_back
        script = frame
        while frame is not None and not module:  # an operation in a function that a module calls
            module = self._names.get(id(frame.f_locals.get("self")), "")
            frame = frame.f_back
        return script, module


class GradientWatch:
    """Names the first parameter whose gradient is not finite on this rank, before it is added to the others'.

    Args:
        parameters: Those of the script's models, by name.
        tell: Called once.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], tell: Callable[[str], None]) -> None:
        self._tell: Callable[[str], None] | None = tell
        self._handles = [
            parameter.register_hook(lambda gradient, name=name: self._look(name, gradient))
            for name, parameter in parameters.items()
            if parameter.requires_grad
        ]

    def close(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()

    def _look(self, name: str, gradient: torch.Tensor) -> None:
        tell = self._tell
        local = _local(gradient)
        if tell is not None and not bool(torch.isfinite(local).all()):
            self._tell = None
            tell(
                f"the first gradient that is not finite on this rank is that of `{name}`: {_count(local)}"
            )


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, of a sharded one this rank's part: the whole would need the other ranks."""
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _has_nan(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return False
    local = _local(tensor)
    if type(local) not in _WITH_NUMBERS:
        return False  # a compiler traces with tensors that have none
    try:
        if local.layout != torch.strided or not local.untyped_storage().size():
            return False  # FSDP frees the memory of parameters that it is about to gather
        return bool(torch.isnan(local.detach()).any())
    except (RuntimeError, NotImplementedError):  # as within torch.vmap: a batch computed as one
        return False


def _name_of(func: Any) -> str:
    if (schema := getattr(func, "_schema", None)) is not None:
        return str(schema.name)  # `aten::log`, of a compiled function
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
    values = _local(tensor).detach()
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
