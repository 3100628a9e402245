"""The wrapped model: DistributedDataParallel whose sums are the same in every attempt, and FSDP.

It adds three things to torch's:

- **weights**: shares of a global batch may differ by a sample. The gradient that flows into the
  model's outputs is scaled by `local_count * world_size / global_count`, so that DDP's mean over
  the ranks is the mean over the global batch. The loss must be a mean over the rank's samples.
- **a fixed layout**: DDP rebuilds its gradient buckets after a process's first backward, so a
  resumed process sums in another order for one step, and from 3 ranks on the weights differ in
  the last bit. A throw-away backward before the first step fixes the layout in every
  attempt; generators, buffers and gradients are restored.
- **waits**: how long its backward waits for other ranks (`WaitMeter`).
"""

import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from torchmuster.core.model.progress import RankPhase
from torchmuster.errors import UsageError
from torchmuster.train import rng
from torchmuster.train.heartbeat import Heartbeat, StepState

_MEASURE_EVERY, _LONG_STEP_S = 8, 0.05  # measure every 8th backward; long steps always


class WeightedDDP(DistributedDataParallel):
    """DistributedDataParallel that weights each rank's gradient by its share of the batch."""

    require_forward_param_sync: bool

    def __init__(
        self, module: nn.Module, step_state: StepState, *, settle: bool = True, **options: Any
    ):
        super().__init__(module, **options)
        self._step_state = step_state
        self._settled = not settle or self.static_graph
        self._waits = WaitMeter(self.module, step_state.heartbeat)
        step_state.uncalled.append(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model; in training with the additions that the module's docstring describes."""
        if not torch.is_grad_enabled():
            return self._forward_alone(inputs, kwargs)
        if self in self._step_state.uncalled:
            self._step_state.uncalled.remove(self)
        if not self._settled:
            self._step_state.settles = True
            self._settle(inputs, kwargs)
            self._step_state.settles = False
        if self._step_state.accumulates:
            self.require_backward_grad_sync = self._step_state.ends_step
        if self.require_backward_grad_sync:
            self._waits.begin()
        self._step_state.heartbeat.enter(RankPhase.FORWARD)
        outputs = super().forward(*inputs, **kwargs)
        self._step_state.heartbeat.enter(RankPhase.COMPUTE)
        return weigh(outputs, self._step_state.weight)

    def _forward_alone(self, inputs: Any, kwargs: Any) -> Any:
        """Run the model without a collective: in an evaluation some ranks may have no batch.

        DDP would broadcast buffers in the first forward after training and skip that in the first
        forward of the next training, but not on a rank that had no forward in between.
        """
        syncs, self.require_forward_param_sync = self.require_forward_param_sync, False
        try:
            return super().forward(*inputs, **kwargs)
        finally:
            self.require_forward_param_sync = syncs

    def _settle(self, inputs: Any, kwargs: Any) -> None:
        self._settled = True
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        gradients = [p.grad for p in parameters]
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        syncs, self.require_backward_grad_sync = self.require_backward_grad_sync, True
        inputs, kwargs = pytree.tree_map_only(torch.Tensor, _detached, (inputs, kwargs))
        with rng.preserved():
            outputs = pytree.tree_leaves(super().forward(*inputs, **kwargs))
            sums = [t.sum() for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
            if sums:
                torch.stack([s.float() for s in sums]).sum().backward()
        self.require_backward_grad_sync = syncs
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


class WaitMeter:
    """Measures how long DDP's backward waits for other ranks after this rank's last gradient.

    DDP sums gradients while others are still computed; after the last one it waits for the sums,
    and the rank that is slowest at anything waits least. It measures every eighth backward, and
    each one of long steps, so that it costs a step about one microsecond. Only for CPUs: with a GPU
    the work is not on the host.

    Args:
        module: The model inside DDP.
        heartbeat: Gets the measured time, scaled to all backwards.
    """

    def __init__(self, module: nn.Module, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        parameters = [p for p in module.parameters() if p.requires_grad]
        self._is_on = all(p.device.type == "cpu" for p in parameters)
        self._candidates = parameters  # until a backward has shown whose gradient comes last
        self._hooks: list[Any] = []
        self._last: torch.Tensor | None = None
        self._is_due = False
        self._backwards, self._every = 0, 1  # since the last measurement, until the next
        self._ready_at = self._measured_at = 0.0

    def begin(self) -> None:
        """Note the start of a forward whose backward sums gradients."""
        if not self._is_on:
            return
        if self._candidates and not self._hooks:
            hook = self._note_last
            self._hooks = [p.register_post_accumulate_grad_hook(hook) for p in self._candidates]
        self._backwards += 1
        self._is_due = self._backwards >= self._every

    def _note_last(self, parameter: torch.Tensor) -> None:
        if self._last is None:
            _after_backward(self._keep_last)
        self._last = parameter

    def _keep_last(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._last is not None:
            self._hooks = [self._last.register_post_accumulate_grad_hook(self._note_ready)]
        self._candidates, self._last = [], None

    def _note_ready(self, _: torch.Tensor) -> None:
        if self._is_due:
            self._is_due = False
            self._ready_at = time.monotonic()
            _after_backward(self._queue_end)

    def _queue_end(self) -> None:
        # DDP has queued its own wait by now; a callback queued here runs after it.
        _after_backward(self._note_end)

    def _note_end(self) -> None:
        now = time.monotonic()
        self._heartbeat.waited((now - self._ready_at) * self._backwards)
        are_long = now - self._measured_at > _LONG_STEP_S * self._backwards
        self._backwards, self._every, self._measured_at = 0, 1 if are_long else _MEASURE_EVERY, now


def _after_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the running backward, after what has been queued so far."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def weigh(outputs: Any, weight: float) -> Any:
    """Scale the gradient that flows back into `outputs` by `weight`; the values are unchanged."""
    if weight == 1.0:
        return outputs
    leaves = pytree.tree_leaves(outputs)
    found = {id(t): t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad}
    if not found:
        raise UsageError(
            f"no tensor with a gradient was found in the model's output ({type(outputs).__name__})",
            why="the ranks' shares of this batch differ, so the gradient has to be weighted",
            fix="return tensors, or lists, tuples and dicts of them (or pass drop_last=True and a"
            " batch size that divides)",
        )
    if len(found) == 1:
        next(iter(found.values())).register_hook(lambda g: _weighted(g, weight))
        return outputs
    # One output may be made from another, e.g. a loss from logits: hooks on both would weigh twice.
    weighed = {key: _Weigh.apply(tensor, weight) for key, tensor in found.items()}
    return pytree.tree_map(lambda leaf: weighed.get(id(leaf), leaf), outputs)


class _Weigh(torch.autograd.Function):
    """Identity whose gradient is weighted."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight = weight
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _weighted(gradients[0], ctx.weight), None


def _weighted(gradient: torch.Tensor, weight: float) -> torch.Tensor:
    # Not a product with 0: for an uncounted sample 0 * inf would be NaN.
    return gradient * weight if weight else torch.zeros_like(gradient)


def check_model(model: object, wrapped: Collection[nn.Module]) -> None:
    """Refuse an object that is not a model, or is wrapped already.

    Raises:
        UsageError: It is one of these.
    """
    if not isinstance(model, nn.Module):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        what, fix = ("the class ", f"tm.wrap({name}())") if isinstance(model, type) else ("", None)
        raise UsageError(
            f"tm.wrap got {what}{name}, which is no model",
            where="World.wrap",
            fix=fix or "give it a torch.nn.Module",
        )
    if isinstance(model, DistributedDataParallel) or unwrap(model) in wrapped:
        raise UsageError(
            "the model is wrapped already",
            where="World.wrap",
            fix="give tm.wrap the model itself, once",
        )


def wrap_whole(
    module: nn.Module, step_state: StepState, *, settle: bool, options: Any
) -> nn.Module:
    """Return `module` wrapped by DDP; in a world of one, with weighted gradients only."""
    has_gradients = any(p.requires_grad for p in module.parameters())
    if torch.distributed.get_world_size() > 1 and has_gradients:
        return WeightedDDP(module, step_state, settle=settle, **options)
    _hook(module, step_state)
    return module


def wrap_sharded(
    module: nn.Module, step_state: StepState, *, device_type: str, num_replicas: int, options: Any
) -> nn.Module:
    """Shard `module` in place with FSDP2: each block of its ModuleLists, then the rest.

    Args:
        module: Its parameters must not be in an optimizer yet.
        step_state: Shared with the loader.
        device_type: `cpu` or `cuda`.
        num_replicas: 1 shards over all ranks; a larger number makes that many replicas (HSDP).
        options: Passed to `fully_shard`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world_size = torch.distributed.get_world_size()
    if world_size % num_replicas:
        raise UsageError(
            f"{world_size} workers can't be divided into {num_replicas} equal replicas",
            fix="choose `replicas` so that it divides the world's size",
        )
    shape: tuple[int, ...] = (world_size,)
    names: tuple[str, ...] = ("shard",)
    if num_replicas > 1:
        shape, names = (num_replicas, world_size // num_replicas), ("replicate", "shard")
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    for child in module.modules():
        if isinstance(child, nn.ModuleList):
            for block in child:
                fully_shard(block, mesh=mesh, **options)
    fully_shard(module, mesh=mesh, **options)
    _hook(module, step_state)
    return module


def _hook(module: nn.Module, step_state: StepState) -> None:
    def before(module: Any, _inputs: Any) -> None:
        if step_state.accumulates and hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync(step_state.ends_step)

    def after(module: Any, _inputs: Any, outputs: Any) -> Any:
        if torch.is_grad_enabled():
            return weigh(outputs, step_state.weight)
        return outputs

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the script's own module inside DDP and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model's parameters are sharded, even if a forward has gathered them."""
    return any(map(_is_unit, model.modules())) or any(map(has_shards, model.parameters()))


def reshard(model: nn.Module) -> None:
    """Release gathered FSDP2 parameters, some of which a forward without a backward keeps."""
    for module in model.modules():
        if _is_unit(module):
            module.reshard()


def _is_unit(module: Any) -> bool:
    """Return whether `fully_shard` was applied to this module itself."""
    return hasattr(module, "set_reshard_after_backward")


def has_shards(tensor: torch.Tensor) -> bool:
    """Return whether this is a DTensor; importing its module would take half a second."""
    return hasattr(tensor, "device_mesh")


def shard_of(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a tensor, or a plain tensor itself."""
    return tensor.to_local() if has_shards(tensor) else tensor
