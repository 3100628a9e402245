"""torchmuster: take a PyTorch training script from one GPU to many nodes."""

from typing import Any

__version__ = "0.1.0"

# `__init__.pyi` says the same to type checkers.
_API = {
    "launch": "launch",
    "runs": "launch",
    "find_run": "launch",
    "session": "session",
    "sessions": "session",
    "SessionHandle": "session",
    "RunHandle": "run",
    "RunStatus": "run",
    "RunFailed": "failures",
    "NotLaunchedError": "failures",
    "ResultError": "run",
    "sweep": "sweep",
    "find_sweep": "sweep",
    "SweepHandle": "sweep",
    "SweepMember": "sweep",
}


def __getattr__(name: str) -> Any:
    """Import the Python API when it is used: nodes import this package too, and have the standard library only."""
    name = {"Run": "RunHandle", "Session": "SessionHandle"}.get(name, name)
    if name not in _API:
        raise AttributeError(f"module 'torchmuster' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"torchmuster.api.{_API[name]}"), name)


def barrier(
    name: str = "default",
    *,
    count: int | None = None,
    rank: int | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Wait for all tasks of this task's group; works inside a workflow (`muster submit`).

    Args:
        name: Letters, digits, `.`, `_` and `-`, at most 64. The same name can be used again and again.
        count: How many callers have to come; None for each task of the group once.
        rank: The caller's number below `count`, when several processes of one task call.
        timeout_s: The limit of the wait, in seconds.

    Raises:
        torchmuster.errors.BarrierTimeoutError: The limit has passed; the message names who is missing.
        torchmuster.errors.BarrierError: A task ended that would have to come, or callers disagree.
        torchmuster.errors.ChannelError: The agent of this task can't be reached, or has ended.
        torchmuster.errors.UsageError: This process is not part of a workflow.
    """
    import importlib

    # By its name: modules below `net` import this package, for its version.
    task_call = importlib.import_module("torchmuster.net.task_call")
    task_call.wait_at_barrier(name, count=count, rank=rank, timeout_s=timeout_s)
