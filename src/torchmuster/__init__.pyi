import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

from torchmuster.launcher.api.failures import NotLaunchedError as NotLaunchedError
from torchmuster.launcher.api.failures import RunFailed as RunFailed
from torchmuster.launcher.api.launch import find_run as find_run
from torchmuster.launcher.api.launch import runs as runs
from torchmuster.launcher.api.run import ResultError as ResultError
from torchmuster.launcher.api.run import RunHandle as Run
from torchmuster.launcher.api.run import RunStatus as RunStatus
from torchmuster.multirun.api.session import SessionHandle
from torchmuster.multirun.api.session import sessions as sessions
from torchmuster.multirun.api.sweep import SweepHandle as SweepHandle
from torchmuster.multirun.api.sweep import SweepMember as SweepMember
from torchmuster.multirun.api.sweep import find_sweep as find_sweep
from torchmuster.multirun.api.sweep import sweep as sweep

__version__: str
__all__ = [
    "NotLaunchedError",
    "ResultError",
    "Run",
    "RunFailed",
    "RunStatus",
    "Session",
    "SweepHandle",
    "SweepMember",
    "barrier",
    "find_run",
    "find_sweep",
    "launch",
    "runs",
    "session",
    "sessions",
    "sweep",
]

def barrier(
    name: str = "default",
    *,
    count: int | None = None,
    rank: int | None = None,
    timeout_s: float = 600.0,
) -> None: ...

# Written by `scripts/make-reference` from the options of the commands: don't edit below.

def launch(
    function: Callable[..., Any] | str | os.PathLike[str],
    *args: Any,
    account: str | None = ...,
    before: str | Sequence[str] | None = ...,
    cpus_per_node: int | None = ...,
    debug: bool = ...,
    env: Mapping[str, object] | None = ...,
    gpus_per_node: int | None = ...,
    grace: str | timedelta | None = ...,
    grow: bool = ...,
    hang_timeout: str | timedelta | None = ...,
    here: bool = ...,
    hostfile: str | None = ...,
    hosts: str | Sequence[int | str] | None = ...,
    inline: bool = ...,
    join_timeout: str | timedelta | None = ...,
    last_call: str | timedelta | None = ...,
    max_restarts: int | None = ...,
    mem: str | None = ...,
    metrics_port: int | None = ...,
    module: bool = ...,
    name: str | None = ...,
    nnodes: str | int | None = ...,
    no_preflight: bool = ...,
    nodes: str | int | None = ...,
    notify: str | None = ...,
    nproc_per_node: str | int | Sequence[int | str] | None = ...,
    on: str | None = ...,
    partition: str | None = ...,
    preload: str | Sequence[str] | None = ...,
    python: str | None = ...,
    queue: str | None = ...,
    restart_policy: Literal["evidence", "count"] | None = ...,
    resubmit: int | None = ...,
    run_id: str | None = ...,
    session: str | None = ...,
    set_env: Mapping[str, object] | None = ...,
    ship_env: str | bool | None = ...,
    spares: int | None = ...,
    stage: str | Sequence[str] | None = ...,
    start: Literal["auto", "fork", "fresh"] | None = ...,
    take_within: str | timedelta | None = ...,
    time: str | timedelta | None = ...,
    verify_every: int | None = ...,
    warn: str | timedelta | None = ...,
    **kwargs: Any,
) -> Run: ...
def session(
    *,
    account: str | None = ...,
    cpus_per_node: int | None = ...,
    gpus_per_node: int | None = ...,
    here: bool = ...,
    hostfile: str | None = ...,
    hosts: str | Sequence[int | str] | None = ...,
    idle: str | timedelta | None = ...,
    mem: str | None = ...,
    name: str | None = ...,
    nnodes: int | None = ...,
    nodes: int | None = ...,
    nproc_per_node: str | int | None = ...,
    on: str | None = ...,
    partition: str | None = ...,
    preload: str | Sequence[str] | None = ...,
    python: str | None = ...,
    queue: str | None = ...,
    time: str | timedelta | None = ...,
) -> Session: ...

class Session(SessionHandle):
    def launch(
        self,
        function: Callable[..., Any] | str | os.PathLike[str],
        *args: Any,
        before: str | Sequence[str] | None = ...,
        debug: bool = ...,
        env: Mapping[str, object] | None = ...,
        grace: str | timedelta | None = ...,
        grow: bool = ...,
        hang_timeout: str | timedelta | None = ...,
        join_timeout: str | timedelta | None = ...,
        last_call: str | timedelta | None = ...,
        max_restarts: int | None = ...,
        metrics_port: int | None = ...,
        module: bool = ...,
        name: str | None = ...,
        nnodes: str | int | None = ...,
        no_preflight: bool = ...,
        nodes: str | int | None = ...,
        notify: str | None = ...,
        nproc_per_node: str | int | Sequence[int | str] | None = ...,
        preload: str | Sequence[str] | None = ...,
        python: str | None = ...,
        restart_policy: Literal["evidence", "count"] | None = ...,
        run_id: str | None = ...,
        set_env: Mapping[str, object] | None = ...,
        stage: str | Sequence[str] | None = ...,
        start: Literal["auto", "fork", "fresh"] | None = ...,
        verify_every: int | None = ...,
        **kwargs: Any,
    ) -> Run: ...
    def run(
        self,
        script: str | os.PathLike[str],
        *args: Any,
        before: str | Sequence[str] | None = ...,
        debug: bool = ...,
        env: Mapping[str, object] | None = ...,
        grace: str | timedelta | None = ...,
        grow: bool = ...,
        hang_timeout: str | timedelta | None = ...,
        join_timeout: str | timedelta | None = ...,
        last_call: str | timedelta | None = ...,
        max_restarts: int | None = ...,
        metrics_port: int | None = ...,
        module: bool = ...,
        name: str | None = ...,
        nnodes: str | int | None = ...,
        no_preflight: bool = ...,
        nodes: str | int | None = ...,
        notify: str | None = ...,
        nproc_per_node: str | int | Sequence[int | str] | None = ...,
        preload: str | Sequence[str] | None = ...,
        python: str | None = ...,
        restart_policy: Literal["evidence", "count"] | None = ...,
        run_id: str | None = ...,
        set_env: Mapping[str, object] | None = ...,
        stage: str | Sequence[str] | None = ...,
        start: Literal["auto", "fork", "fresh"] | None = ...,
        verify_every: int | None = ...,
    ) -> Run: ...
