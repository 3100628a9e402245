"""The launchers that are compared, each at its best settings.

torchrun stands here twice. `torchrun` is the command that everybody types. `torchrun-fork` forks
its workers from the agent, which has imported torch already: the fastest that torchrun can be,
at the price of forking a process with threads.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from running.stage import REPOSITORY

from kit.ports import reserve_port  # type: ignore[import-not-found]  # isort: skip

WORKER = Path(__file__).with_name("worker.py")
LIBRARY_WORKER = Path(__file__).with_name("library_worker.py")

MAX_RESTARTS = 3

# Without RES_OPTIONS one lost answer of a name server stalls a worker by 5 s, on every side.
COMMON_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}

# Installed torch has its bytecode, a checkout of muster must be allowed to write its own.
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"

TORCHRUN_ENVIRONMENT = {
    # torchrun 2.13 does not survive the SIGKILL of a Gloo worker without it.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # Ranks are computed, not asked for. Source: elastic/agent/server/api.py, _assign_worker_ranks.
    "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
}
# No look-up of this machine's own name. Source: elastic/rendezvous/dynamic_rendezvous.py.
TORCHRUN_OPTIONS = ["--local-addr", "127.0.0.1"]
FORK_OPTIONS = ["--run-path", "--start-method", "fork"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large a job is and what it must be able to do.

    Attributes:
        num_nodes: Agents, all on this machine.
        num_workers_per_node: Workers of each agent.
        restarts: Whether the job must survive the loss of a worker.
        has_library: Whether its script uses `torchmuster.train`.
        begins_with: The package that its script imports first; empty for torch.
        monitor_interval_s: How often torchrun's agent looks at its workers; 0.1 is its default.
    """

    num_nodes: int = 1
    num_workers_per_node: int
    restarts: bool = True
    has_library: bool = False
    begins_with: str = ""
    monitor_interval_s: float = 0.1

    @property
    def num_workers(self) -> int:
        """Return the number of workers on all nodes."""
        return self.num_nodes * self.num_workers_per_node

    @property
    def worker(self) -> Path:
        """Return the script."""
        if self.begins_with:
            return WORKER.with_name(f"{self.begins_with}_worker.py")
        return LIBRARY_WORKER if self.has_library else WORKER


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One launcher: how it is started and which of its processes is the agent.

    Attributes:
        commands: From a shape and the worker's arguments to one command line for each launcher.
        is_agent: Says from a command line whether the process is an agent.
        module: What `python -m` starts.
        python: Which one: another environment's has another torch.
        has_monitor_interval: Whether the agent polls its workers at an interval one can set.
    """

    name: str
    commands: Callable[[Shape, list[str]], list[list[str]]]
    is_agent: Callable[[str], bool]
    environment: dict[str, str]
    module: str
    has_monitor_interval: bool
    python: str = sys.executable


def side_environment(side: Side, folder: Path) -> dict[str, str]:
    """Return the environment in which the launchers of `side` run, with all files in `folder`."""
    python_path = [str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    inherited = {key: value for key, value in os.environ.items() if key != NO_BYTECODE}
    return {
        **inherited,
        **COMMON_ENVIRONMENT,
        **side.environment,
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        "MUSTER_HOME": str(folder / "home"),
        "MUSTER_ON": "local",
        "TMPDIR": str(folder),
    }


def help_command(side: Side) -> list[str]:
    """Return the command that prints the help of `side`."""
    return [side.python, "-m", side.module, "--help"]


def torch_of(torchrun: Path) -> tuple[str, str]:
    """Return the Python of another environment's torchrun, and the version of its torch.

    Raises:
        SystemExit: It can't be used.
    """
    python = torchrun.with_name("python")
    code = "from importlib.metadata import version; print(version('torch'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60.0)
    except OSError as error:
        raise SystemExit(f"--torchrun {torchrun}: {error}") from error
    if done.returncode != 0:
        raise SystemExit(f"--torchrun {torchrun}: its environment has no torch")
    return str(python), done.stdout.strip().partition("+")[0]


def sides_of(torchrun: Path) -> list[Side]:
    """Return both sides of another environment's torchrun, named by the version of its torch."""
    python, version = torch_of(torchrun)
    commands = {"torchrun": _torchrun_commands, "torchrun-fork": _torchrun_fork_commands}
    return [
        replace(
            SIDES[name],
            name=f"{name}-{version}",
            commands=partial(make, python=python),
            python=python,
        )
        for name, make in commands.items()
    ]


def _muster_commands(shape: Shape, worker: list[str]) -> list[list[str]]:
    nodes = ["--nodes", str(shape.num_nodes)] if shape.num_nodes > 1 else []
    return [
        [
            *[sys.executable, "-m", "torchmuster", "run", *nodes],
            *["--nproc-per-node", str(shape.num_workers_per_node)],
            *["--max-restarts", str(MAX_RESTARTS), *worker],
        ]
    ]


def _torchrun_commands(
    shape: Shape, worker: list[str], python: str = sys.executable
) -> list[list[str]]:
    return [
        [
            *[python, "-m", "torch.distributed.run", *TORCHRUN_OPTIONS, *meeting],
            *["--nnodes", str(shape.num_nodes)],
            *["--nproc-per-node", str(shape.num_workers_per_node)],
            *["--max-restarts", str(MAX_RESTARTS)],
            *["--monitor-interval", str(shape.monitor_interval_s), *worker],
        ]
        for meeting in _torchrun_meetings(shape)
    ]


def _torchrun_fork_commands(
    shape: Shape, worker: list[str], python: str = sys.executable
) -> list[list[str]]:
    return _torchrun_commands(shape, [*FORK_OPTIONS, *worker], python)


def _torchrun_meetings(shape: Shape) -> list[list[str]]:
    """Return for each agent of torchrun how it meets the others, the fastest that will do.

    A static rendezvous saves a random delay of up to 0.3 s, but its workers don't find each other
    again after a restart. `last_call_timeout` has no effect when the number of nodes is fixed.
    """
    if shape.num_nodes == 1 and not shape.restarts:
        return [["--master-port", str(reserve_port())]]
    if shape.num_nodes == 1:
        return [["--standalone"]]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{reserve_port()}"]
    meeting += ["--rdzv-id", "benchmark", "--rdzv-conf"]
    hosts = ["true", *["false"] * (shape.num_nodes - 1)]
    return [[*meeting, f"is_host={is_host}"] for is_host in hosts]


def _is_muster_agent(command: str) -> bool:
    return "torchmuster/core/programs/" in command and "spawner" not in command


def _is_torchrun_agent(command: str) -> bool:
    return "-m torch.distributed.run" in command


SIDES = {
    side.name: side
    for side in (
        Side(
            name="muster",
            commands=_muster_commands,
            is_agent=_is_muster_agent,
            environment={},
            module="torchmuster",
            has_monitor_interval=False,
        ),
        Side(
            name="torchrun",
            commands=_torchrun_commands,
            is_agent=_is_torchrun_agent,
            environment=TORCHRUN_ENVIRONMENT,
            module="torch.distributed.run",
            has_monitor_interval=True,
        ),
        Side(
            name="torchrun-fork",
            commands=_torchrun_fork_commands,
            is_agent=_is_torchrun_agent,
            environment=TORCHRUN_ENVIRONMENT,
            module="torch.distributed.run",
            has_monitor_interval=True,
        ),
    )
}
