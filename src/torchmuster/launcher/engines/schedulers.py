"""Facts about each scheduler that need no dialect to be loaded, so that a start stays quick."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from torchmuster.core import plugs
from torchmuster.errors import UsageError
from torchmuster.launcher.model.scheduler import SchedulerFacts

_OF_ENTRY = ("name", "module", "install", "source")  # what the entry point of a package gives
SCHEDULERS: dict[str, SchedulerFacts] = {one.name: one for one in plugs.every("schedulers")}
# One scheduler per client command: a client that several schedulers have counts for the first.
CLIENTS: dict[str, str] = {}
for _entry in SCHEDULERS.values():
    if _entry.client is not None:
        CLIENTS.setdefault(_entry.client, _entry.name)
# The variable that names a job, and the one for the index in an array where the first lacks it. It
# lists all schedulers known to us: two nodes in different jobs can't form a world.
_JOBS = (
    ("SLURM_JOB_ID", None),
    ("PBS_JOBID", None),  # with the index of an array: 1053[2].server
    ("LSB_JOBID", "LSB_JOBINDEX"),
    ("FLUX_JOB_ID", None),
    ("OAR_JOB_ID", None),
    ("COBALT_JOBID", None),
)


def sees_files(kind: str) -> bool:
    """Say whether an engine's nodes see the client's files, as far as known without a dialect."""
    return kind not in SCHEDULERS or SCHEDULERS[kind].sees_files


def kind_of_client(client: str, version: str | None) -> str:
    """Return the scheduler of a client; qsub below version 10 is Torque's, which has no engine."""
    major = (version or "").partition(".")[0]
    is_torque = CLIENTS[client] == "pbs" and major.isdecimal() and int(major) < 10
    return "torque" if is_torque else CLIENTS[client]


def is_in_torque(environment: Mapping[str, str]) -> bool:
    """Say whether this is a Torque job: `PBS_VERSION=TORQUE-6.0.2`; the rest looks like PBS."""
    return environment.get("PBS_VERSION", "").startswith("TORQUE")


def may_be_in_job(environment: Mapping[str, str]) -> bool:
    """Say whether to look for a job around us: every scheduler sets a variable with `JOB`."""
    return any("JOB" in name for name in environment)


def facts_of(dialect: Any, entry: SchedulerFacts | None = None) -> SchedulerFacts:
    """Return the fixed facts of a scheduler: our row, or what another package's dialect says."""
    known = SCHEDULERS.get(dialect.name)
    if known is not None:
        return known
    found = entry or SchedulerFacts(name=dialect.name, module="", install="")
    names = (field.name for field in fields(SchedulerFacts) if field.name not in _OF_ENTRY)
    return replace(found, **{n: getattr(dialect, n) for n in names if hasattr(dialect, n)})


def set_by_schedulers(dialect: Any = None) -> tuple[str, ...]:
    """Return the prefixes of variables that schedulers set: all of ours, and this dialect's."""
    every = (*SCHEDULERS.values(), *([facts_of(dialect)] if dialect is not None else []))
    return tuple(dict.fromkeys(begin for one in every for begin in one.variables))


def known_jobs(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (scheduler, job id) for each scheduler here whose variables name a job."""
    found = []
    for scheduler in SCHEDULERS.values():
        ids = (environment[name] for name in scheduler.job_variables if environment.get(name))
        found += [(scheduler.name, job_id) for job_id in list(ids)[:1]]
    return found


def own_jobs(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return `VARIABLE=ID` of each job that this process is in; ssh passes none of them on."""
    found = []
    for name, index in _JOBS:
        job = environment.get(name)
        if name == "SLURM_JOB_ID" and "SLURM_HET_SIZE" in environment:
            job = environment.get("SLURM_JOB_ID_HET_GROUP_0")  # its parts have different ids
        number = environment.get(index, "0") if index is not None else "0"
        if job:
            found.append(f"{name}={job}" + (f"[{number}]" if number != "0" else ""))
    return tuple(found)


def guard(
    environment: Mapping[str, str],
    which: Callable[[str], str | None],
    sites: Sequence[str] = (),
) -> UsageError | None:
    """Return the error that refuses a start on a login node without `--on` or `--here`, or None.

    Args:
        environment: The environment of the user's shell.
        which: Finds a command on PATH, as `shutil.which` does.
        sites: Cluster names from the user's configuration; offered first.
    """
    if known_jobs(environment):
        return None
    found = {command: path for command in CLIENTS if (path := which(command))}
    if not found:
        return None
    names = list(dict.fromkeys([*sites, *(CLIENTS[command] for command in found)]))
    offers = " or ".join(f"--on {name}" for name in names)
    return UsageError(
        "refusing to start on what looks like a login node",
        where=", ".join(found.values()),
        why=f"{' and '.join(found)} on PATH, and this shell is not in a job",
        fix=f"{offers} submits a job; use --here to run on this machine anyway",
    )
