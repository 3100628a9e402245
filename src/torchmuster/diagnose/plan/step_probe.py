"""Run a training script for a few steps and print the durations of a step's parts.

    python step_probe.py NUM_STEPS LIMIT_S SCRIPT ARGS...

The script runs as `__main__`, unchanged, until its optimizer has made NUM_STEPS steps after the
warm-up, or LIMIT_S is over; then SystemExit ends it. We time `torch.autograd.backward` from call
to return, the optimizer's step by torch's hooks, and the rest of the time from one step to the
next (data, forward). Hooks on the parameters record when each gradient is ready. On a GPU we
synchronize between the parts, so a launch-bound step looks a little longer.

The last line of standard output is JSON after a mark; `gradients` are [bytes, seconds from the
start of the backward pass] in order of arrival, `spread` is the standard deviation of a step / its
median, without outliers:

    muster step: {"steps": 10, "forward_s": 0.1, "backward_s": 0.2, "optimizer_s": 0.02,
     "micro_steps": 1, "spread": 0.03, "parameters": 1000, "dtype": "float32", "device": "cpu",
     "gradients": [[4000, 0.05], ...]}

It needs only torch 2.1 or later, not torchmuster: its own folder is removed from `sys.path`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import runpy
import statistics
import sys
import time
from typing import Any

WARM_STEPS = 3  # not counted: caches, first allocations, DDP's second set of buckets
FEW_STEPS = 4  # fewer are not meaningful
MARK = "muster step: "


class StepProbe:
    """The measured steps.

    Attributes:
        steps: For each step: seconds in total, of all backward passes and of the update, and the
            number of passes.
        gradients: For each step: when each parameter's gradient was ready, in seconds, by the
            parameter's number.
    """

    def __init__(self, torch: Any, num_steps: int, limit_s: float) -> None:
        self.steps: list[tuple[float, float, float, int]] = []
        self.gradients: list[dict[int, float]] = []
        self._torch, self._written = torch, False
        self._num_steps, self._end_s = num_steps + WARM_STEPS, time.perf_counter() + limit_s
        self._optimizer: Any = None
        self._parameters: list[Any] = []
        self._last_s = self._update_s = 0.0
        self._backward_s, self._passes = 0.0, 0
        self._pass_begun: Any = None
        self._marks: dict[int, Any] = {}

    def install(self) -> None:
        """Install the hooks on backward passes and optimizer steps."""
        optimizers = importlib.import_module("torch.optim.optimizer")
        optimizers.register_optimizer_step_pre_hook(self._before_update)
        optimizers.register_optimizer_step_post_hook(self._after_update)
        backward = self._torch.autograd.backward

        def timed(*args: Any, **options: Any) -> Any:
            begun_s = self._now()
            self._pass_begun, self._marks = self._mark(), {}
            done = backward(*args, **options)
            self._backward_s += self._now() - begun_s
            self._passes += 1
            return done

        self._torch.autograd.backward = timed

    def _now(self) -> float:
        if self._torch.cuda.is_initialized():
            self._torch.cuda.synchronize()
        return time.perf_counter()

    def _mark(self) -> Any:
        """Return the current time; on a GPU an event in its stream, perhaps not reached yet."""
        if not self._torch.cuda.is_initialized():
            return time.perf_counter()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
            self._watch(optimizer)
        if optimizer is self._optimizer:
            self._update_s = self._now()

    def _watch(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    number = len(self._parameters)
                    self._parameters.append(parameter)
                    see = functools.partial(self._see_gradient, number)
                    parameter.register_post_accumulate_grad_hook(see)

    def _see_gradient(self, number: int, _: Any) -> None:
        self._marks[number] = self._mark()

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        if optimizer is not self._optimizer:
            return
        now_s = self._now()
        if self._last_s:
            whole_s = now_s - self._last_s
            self.steps.append((whole_s, self._backward_s, now_s - self._update_s, self._passes))
            # A pass in which the GPU was first used has marks of two kinds.
            kind = type(self._pass_begun)
            marks = {n: mark for n, mark in self._marks.items() if type(mark) is kind}
            self.gradients.append({n: self._since(mark) for n, mark in marks.items()})
        self._backward_s, self._passes, self._last_s = 0.0, 0, now_s
        in_time = now_s < self._end_s or len(self.steps) < WARM_STEPS + FEW_STEPS
        if len(self.steps) >= self._num_steps or not in_time:
            self.write()
            raise SystemExit(0)

    def _since(self, mark: Any) -> float:
        if isinstance(mark, float):
            return float(mark - self._pass_begun)
        return float(self._pass_begun.elapsed_time(mark)) / 1000

    def write(self) -> None:
        """Print the result once; print nothing after too few steps."""
        steps, gradients = self.steps[WARM_STEPS:], self.gradients[WARM_STEPS:]
        if len(steps) < FEW_STEPS or self._written:
            return
        self._written = True
        sys.stdout.flush()
        line = f"\n{MARK}{json.dumps(self._found(steps, gradients))}\n"
        sys.stdout.write(line)
        sys.stdout.flush()

    def _found(self, steps: Any, gradients: Any) -> dict[str, Any]:
        whole_s, backward_s, optimizer_s = (
            statistics.median(step[part] for step in steps) for part in range(3)
        )
        passes = max(1, round(statistics.median(step[3] for step in steps)))
        arrivals = []
        for number, parameter in enumerate(self._parameters):
            seen = [one[number] for one in gradients if number in one]
            if seen:
                size_bytes = parameter.numel() * parameter.element_size()
                arrivals.append((statistics.median(seen), size_bytes))
        spread = spread_of([step[0] for step in steps])
        first = self._parameters[0]
        return {
            "steps": len(steps),
            "forward_s": max(0.0, whole_s - backward_s - optimizer_s) / passes,
            "backward_s": backward_s / passes,
            "optimizer_s": optimizer_s,
            "micro_steps": passes,
            "spread": spread,
            "parameters": sum(parameter.numel() for parameter in self._parameters),
            "dtype": str(first.dtype).replace("torch.", ""),
            "device": first.device.type,
            "gradients": [[size_bytes, ready_s] for ready_s, size_bytes in sorted(arrivals)],
        }


def spread_of(times: list[float]) -> float:
    """Return the standard deviation / median, from the quartiles: one slow step does not count."""
    low, _, high = statistics.quantiles(times, n=4)
    return (high - low) / 1.349 / statistics.median(times)


def main(arguments: list[str]) -> None:
    """Run the script under the probe."""
    num_steps, limit_s, script, *words = arguments
    torch = importlib.import_module("torch")  # by name: the job's interpreter decides which torch
    probe = StepProbe(torch, int(num_steps), float(limit_s))
    probe.install()
    sys.argv = [script, *words]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    with contextlib.ExitStack() as after:
        after.callback(probe.write)  # also print the result of a script that ends early
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
