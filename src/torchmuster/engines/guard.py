"""The login-node guard: training belongs into a job where there is a scheduler."""

from collections.abc import Callable, Mapping, Sequence

from torchmuster.errors import UsageError

# What is on PATH, and the engine that it speaks for.
_CLIENTS = {"sbatch": "slurm", "qsub": "pbs"}
_JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID")


def inside_job(environment: Mapping[str, str]) -> bool:
    """Say whether this process runs in a job of a scheduler."""
    return any(environment.get(name) for name in _JOB_VARIABLES)


def guard(
    environment: Mapping[str, str],
    which: Callable[[str], str | None],
    sites: Sequence[str] = (),
) -> UsageError | None:
    """Return why nothing may be started here without `--on` or `--here`; None when it may.

    Args:
        environment: That of the user's shell.
        which: Where a command is on PATH, as `shutil.which`.
        sites: Names of the user's configuration that stand for a cluster; offered first.
    """
    if inside_job(environment):
        return None
    found = {command: path for command in _CLIENTS if (path := which(command))}
    if not found:
        return None
    names = list(dict.fromkeys([*sites, *(_CLIENTS[command] for command in found)]))
    offers = " or ".join(f"--on {name}" for name in names)
    return UsageError(
        "refusing to start on what looks like a login node",
        where=", ".join(found.values()),
        why=f"{' and '.join(found)} on PATH, and no job around this shell",
        fix=f"{offers} submits a job; use --here to run on this machine anyway",
    )
