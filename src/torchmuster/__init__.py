"""torchmuster: take a PyTorch training script from one GPU to many nodes."""

from typing import Any

__version__ = "0.1.0"

# `__init__.pyi` declares the same for type checkers.
_API = {
    "launch": "launcher.api.launch",
    "runs": "launcher.api.launch",
    "find_run": "launcher.api.launch",
    "session": "multirun.api.session",
    "sessions": "multirun.api.session",
    "SessionHandle": "multirun.api.session",
    "RunHandle": "launcher.api.run",
    "RunStatus": "launcher.api.run",
    "RunFailed": "launcher.api.failures",
    "NotLaunchedError": "launcher.api.failures",
    "ResultError": "launcher.api.run",
    "sweep": "multirun.api.sweep",
    "find_sweep": "multirun.api.sweep",
    "SweepHandle": "multirun.api.sweep",
    "SweepMember": "multirun.api.sweep",
}


def __getattr__(name: str) -> Any:
    """Import the Python API on first use: nodes import this package too, with no other packages."""
    name = {"Run": "RunHandle", "Session": "SessionHandle"}.get(name, name)
    if name not in _API:
        raise AttributeError(f"module 'torchmuster' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"torchmuster.{_API[name]}"), name)


def barrier(
    name: str = "default",
    *,
    count: int | None = None,
    rank: int | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Wait for all tasks of this task's group; works inside a workflow (`muster submit`).

    Args:
        name: Letters, digits, `.`, `_` and `-`, at most 64. A name can be used repeatedly.
        count: Number of callers to wait for; None: each task of the group, once.
        rank: The caller's number below `count`, when several processes of one task call.
        timeout_s: Longest wait, in seconds.

    Raises:
        torchmuster.errors.BarrierTimeoutError: The limit has passed; the message names the missing
            callers.
        torchmuster.errors.BarrierError: A task that was expected has ended, or callers disagree.
        torchmuster.errors.ChannelError: The agent of this task can't be reached, or has ended.
        torchmuster.errors.UsageError: This process is not part of a workflow.
    """
    import importlib

    # By name: modules below `net` import this package for its version.
    task_call = importlib.import_module("torchmuster.workflow.task_call")
    task_call.wait_at_barrier(name, count=count, rank=rank, timeout_s=timeout_s)
