"""What an agent starts with: its options, its variables, and how many threads workers get."""

import json
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, runs_dir
from torchmuster.core.model.lines import Terminal
from torchmuster.core.model.plan import RunPlan
from torchmuster.errors import RunDirectoryError


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOrder:
    """The command line of an agent.

    Attributes:
        head: Where the head may listen, as `host:port`.
        listen_fd: The head's socket, which the agent of place 0 inherits.
        lifeline_fd: The end of this file means that the run's owner is gone.
        first_attempt: For the head, as is `restarts_spent`.
        term: The newest term, for a head that may have a successor (`launcher/model/succession.py`);
            else None.
        holder: Who has claimed that term.
        environment: A file with the variables to use; None keeps those it was started with.
        terminal: The terminal that shows the run's output, as `Terminal.to_word` writes it.
    """

    run_dir: str
    place: int
    head: tuple[str, ...]
    lifeline_fd: int | None = None
    listen_fd: int | None = None
    first_attempt: int = 0
    restarts_spent: int = 0
    term: int | None = None
    holder: str = ""
    environment: str | None = None
    terminal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlace:
    """Where a head is, and how it authenticates its agents.

    Attributes:
        addresses: Where it may listen; the first address that answers in a race is used.
        open_secret: The public key, if no common key is required; None forbids it.
        join_timeout_s: How long the head may be unreachable.
        file: A file that names the addresses of a lost head's successor; None: there is none.
        heirs: The folder of claims, if an agent may become the head (`docs/succession.md`).
    """

    addresses: tuple[tuple[str, int], ...]
    secret: bytes
    open_secret: bytes | None = None
    join_timeout_s: float
    file: str | None = None
    heirs: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """The options with which an agent starts.

    Attributes:
        head: Where the head is.
        environment: The variables of the job's interpreter.
        run_dir: The run directory that the run's owner made; None under `muster torchrun`.
        is_head: The head is in this process.
        local_addr: This node's own address, if the user knows better.
        local_show: Show this node's output here instead of sending it to the head.
        terminal: The terminal that shows the output, so that the ranks that are shown get one, too.
        console: Returns the streams of a local rank to show here; None follows the run's --tee.
        saved: Returns the path of a second copy, by attempt, local rank and stream; stream 0 is the
            failure as JSON.
        jobs: The scheduler jobs that the agent is in; empty if the command line names the run.
    """

    plan: RunPlan
    num_workers: int
    host: str
    head: HeadPlace
    environment: Mapping[str, str]
    run_dir: str | None = None
    place: int | None = None
    is_head: bool = False
    local_addr: str | None = None
    local_show: bool = False
    terminal: Terminal | None = None
    console: Callable[[int], frozenset[int]] | None = None
    saved: Callable[[int, int, int], str | None] | None = None
    signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    jobs: tuple[str, ...] = ()

    @property
    def stdin_fd(self) -> int | None:
        """Return the descriptor of what is typed here, if that is for a rank."""
        return 0 if self.local_show and self.plan.stdin_rank is not None else None

    @property
    def is_alone(self) -> bool:
        """Return whether this agent is the whole run, under `muster torchrun`.

        Then nobody would start other workers in place of its own.
        """
        return self.run_dir is None and self.is_head and self.plan.max_nodes == 1

    def run_directory(self, run_id: str) -> RunDir:
        """Return the run directory in which this agent writes."""
        return RunDir(self.run_dir or os.path.join(runs_dir(), run_id))


# Variables: what of the job's head holds on other nodes, and how many threads workers get.


THREADS = "OMP_NUM_THREADS"
_OWN = frozenset(
    {
        *("TMPDIR", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "NCPUS"),
        *("HOME", "USER", "LOGNAME", "SHELL"),
    }
)
_LAUNCHERS = ("PMI", "PALS_", "OMPI_COMM_", "MV2_COMM_", "MPI_LOCAL", "CUDA_VISIBLE")


def leave_environment(path: str, of_schedulers: tuple[str, ...]) -> None:
    """Write our variables to a file for other nodes, without those that hold only on this node.

    Args:
        path: The file that `take_environment` will read.
        of_schedulers: The prefixes of the variables that schedulers set.
    """
    begins = (*of_schedulers, *_LAUNCHERS)
    of_threads = THREADS if threads_of_scheduler(os.environ) is not None else None
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(begins) and name not in _OWN and name != of_threads
    }
    atomic.write_json(path, kept, mode=0o600)


def take_environment(path: str) -> None:
    """Add the job head's variables to this node's own, if the launcher passes none on.

    Raises:
        RunDirectoryError: The file can't be read.
    """
    try:
        with open(path) as file:
            os.environ.update(json.load(file))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            "the job's variables can't be read", where=path, why=str(error)
        ) from error


def threads_of_scheduler(environment: Mapping[str, str]) -> int | None:
    """Return the number of threads that PBS set for each process; None if the user set it.

    PBS sets all CPUs of its job on this node.

    Source: the PBS Professional user's guide, "Running Multi-processor Jobs": OMP_NUM_THREADS and
    NCPUS are ncpus.
    """
    text = environment.get(THREADS, "")
    of_job = "PBS_JOBID" in environment and environment.get("NCPUS") == text
    return int(text) if of_job and text.isdecimal() else None


def share_threads(environment: dict[str, str], num_workers: int) -> str | None:
    """Give each of several workers one thread, as torchrun does, or its share of PBS's threads.

    Return a sentence on the latter, else None.
    """
    if num_workers < 2:
        return None
    environment.setdefault(THREADS, "1")
    threads = threads_of_scheduler(environment)
    if threads is None or threads == 1:
        return None
    environment[THREADS] = str(max(1, threads // num_workers))
    return (
        f"{THREADS} is {environment[THREADS]} for each of {num_workers} workers:"
        f" PBS had set {threads}, the CPUs of them all"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableChange:
    """How a worker's environment differs from its agent's."""

    values: Mapping[str, str]
    removed: tuple[str, ...] = ()


def world_of_one() -> dict[str, str]:
    """Return the variables of torchrun for a world of one, without those that tell of an agent."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    zeros = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), "0")
    ones = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), "1")
    return {**zeros, **ones, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
