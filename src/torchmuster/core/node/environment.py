"""Variables that a node begins with: what of the job's head holds on others, and how many threads workers get."""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from torchmuster.core.files import atomic
from torchmuster.errors import RunDirectoryError

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
