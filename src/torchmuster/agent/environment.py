"""The variables of a job's head, for agents on nodes that they do not reach by themselves."""

import json
import os

from torchmuster.errors import RunDirectoryError


def take_environment(path: str) -> None:
    """Take over the variables of the job's head, for ways to a node that bring none; those of this node stay.

    Raises:
        RunDirectoryError: The file can't be read.
    """
    try:
        with open(path) as file:
            variables = json.load(file)
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            "the job's variables can't be read", where=path, why=str(error)
        ) from error
    for name, value in variables.items():
        if not is_of_one_node(name):
            os.environ[name] = value


def is_of_one_node(name: str) -> bool:
    """Say whether a variable means something on its own node only."""
    own = ("TMPDIR", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "HOME", "USER", "LOGNAME", "SHELL")
    launchers = (
        "SLURM_",
        "SLURMD_",
        "PBS_",
        "PMI",
        "PALS_",
        "OMPI_COMM_",
        "MV2_COMM_",
        "MPI_LOCAL",
    )
    return name in own or name.startswith((*launchers, "CUDA_VISIBLE"))
