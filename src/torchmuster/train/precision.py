"""Mixed precision, accumulation and clipping in their right order, under DDP and FSDP.

The order is: backward of the scaled loss, unscale, clip, step, update the scale. Clipping scaled
gradients, a common mistake, clips to a norm that is smaller by the scale.

Source: https://pytorch.org/docs/stable/notes/amp_examples.html, "Gradient clipping".
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from torchmuster.errors import UsageError

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """How a step computes; give it to `resume(precision=...)`, so that its scale is saved.

    precision = tm.Precision(world, "bf16", max_norm=1.0)
    for x, y in data:
        with precision.autocast():
            loss = F.cross_entropy(model(x), y)
        precision.backward(loss)
        if data.ends_step:
            precision.step(optimizer)
        run.step(loss=loss)
    """

    def __init__(self, world: Any, kind: str = "fp32", *, max_norm: float | None = None) -> None:
        """Choose the precision.

        Args:
            world: From `init`.
            kind: `fp32`, `bf16` (autocast) or `fp16` (autocast and a gradient scaler).
            max_norm: Clip gradients to this 2-norm, over all parameters of the optimizer.

        Raises:
            UsageError: The kind is unknown, or the norm isn't positive.
        """
        if kind not in _DTYPES:
            raise UsageError(f"precision {kind!r}: fp32, bf16 or fp16", where="Precision")
        if max_norm is not None and not max_norm > 0:
            raise UsageError(f"max_norm is {max_norm}, not above zero", where="Precision")
        self._kind = kind
        self._device_type = world.device.type
        self._max_norm = max_norm
        self._scaler = torch.amp.GradScaler(self._device_type, enabled=kind == "fp16")

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for the forward pass and the loss."""
        dtype = _DTYPES[self._kind]
        if dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`, scaled where the precision needs it."""
        self._scaler.scale(loss).backward()

    def step(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """Unscale, clip, step and clear the gradients.

        Returns:
            The 2-norm of the gradients before clipping, a scalar on the device; None without
            `max_norm`. With fp16 a step with infinite gradients is skipped and the scale halved.
        """
        self._scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._agree_on_infinities(optimizer, parameters)
        norm = None
        if self._max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(parameters, self._max_norm)
            if hasattr(norm, "full_tensor"):  # FSDP: each rank has the norm of its shards
                norm = norm.full_tensor()
        self._scaler.step(optimizer)
        self._scaler.update()
        optimizer.zero_grad()
        return norm

    def _agree_on_infinities(
        self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]
    ) -> None:
        """Make all ranks skip a step with an infinity, which may be in one rank's shards only."""
        if not self._scaler.is_enabled() or not hasattr(parameters[0], "full_tensor"):
            return
        state = self._scaler._per_optimizer_states[id(optimizer)]
        for found in state["found_inf_per_device"].values():
            local = found.to_local() if hasattr(found, "to_local") else found
            dist.all_reduce(local, op=dist.ReduceOp.MAX)

    def get_scale(self) -> float:
        """Return the gradient scale; 1 unless the precision is fp16."""
        return float(self._scaler.get_scale())

    @property
    def may_skip_steps(self) -> bool:
        """Whether a step can be skipped because of infinite gradients."""
        return bool(self._scaler.is_enabled())

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state."""
        return dict(self._scaler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scaler's state."""
        if state:
            self._scaler.load_state_dict(state)
