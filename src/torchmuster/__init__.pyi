from torchmuster.api.failures import NotLaunchedError as NotLaunchedError
from torchmuster.api.failures import RunFailed as RunFailed
from torchmuster.api.launch import find_run as find_run
from torchmuster.api.launch import launch as launch
from torchmuster.api.launch import runs as runs
from torchmuster.api.run import RunHandle as Run
from torchmuster.api.run import RunStatus as RunStatus
from torchmuster.api.sweep import find_sweep as find_sweep
from torchmuster.api.sweep import sweep as sweep
from torchmuster.api.sweep_handle import SweepHandle as SweepHandle
from torchmuster.api.sweep_handle import SweepMember as SweepMember
from torchmuster.api.values import ResultError as ResultError

__version__: str
__all__ = [
    "NotLaunchedError",
    "ResultError",
    "Run",
    "RunFailed",
    "RunStatus",
    "SweepHandle",
    "SweepMember",
    "barrier",
    "find_run",
    "find_sweep",
    "launch",
    "runs",
    "sweep",
]

def barrier(
    name: str = "default",
    *,
    count: int | None = None,
    rank: int | None = None,
    timeout_s: float = 600.0,
) -> None: ...
