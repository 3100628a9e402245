from torchmuster.api.failures import NotLaunchedError as NotLaunchedError
from torchmuster.api.failures import RunFailed as RunFailed
from torchmuster.api.launch import find_run as find_run
from torchmuster.api.launch import launch as launch
from torchmuster.api.launch import runs as runs
from torchmuster.api.run import RunHandle as Run
from torchmuster.api.run import RunStatus as RunStatus
from torchmuster.api.session import SessionHandle as Session
from torchmuster.api.session import session as session
from torchmuster.api.session import sessions as sessions
from torchmuster.api.values import ResultError as ResultError

__version__: str
__all__ = [
    "NotLaunchedError",
    "ResultError",
    "Run",
    "RunFailed",
    "RunStatus",
    "Session",
    "barrier",
    "find_run",
    "launch",
    "runs",
    "session",
    "sessions",
]

def barrier(
    name: str = "default",
    *,
    count: int | None = None,
    rank: int | None = None,
    timeout_s: float = 600.0,
) -> None: ...
