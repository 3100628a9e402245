"""Which jobs of schedulers a process is in, as its environment tells, and whether two processes are in different ones."""

from collections.abc import Mapping, Sequence

# The variable that names a job, and the one that tells the members of an array apart where the first does not.
_JOBS = (
    ("SLURM_JOB_ID", None),
    ("PBS_JOBID", None),  # with the index of an array: 1053[2].server
    ("LSB_JOBID", "LSB_JOBINDEX"),
    ("FLUX_JOB_ID", None),
    ("OAR_JOB_ID", None),
    ("COBALT_JOBID", None),
)


def own_jobs(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return `VARIABLE=ID` of each job; ssh brings none of them along."""
    found = []
    for name, index in _JOBS:
        job = environment.get(name)
        if name == "SLURM_JOB_ID" and "SLURM_HET_SIZE" in environment:
            job = environment.get("SLURM_JOB_ID_HET_GROUP_0")  # its parts have different ids
        number = environment.get(index, "0") if index is not None else "0"
        if job:
            found.append(f"{name}={job}" + (f"[{number}]" if number != "0" else ""))
    return tuple(found)


def other_job(jobs: Sequence[str], others: Sequence[str]) -> tuple[str, str] | None:
    """Return the two ids where one scheduler gave two different ones; None where nothing contradicts."""
    known = dict(text.partition("=")[::2] for text in jobs)
    for name, job in (text.partition("=")[::2] for text in others):
        if known.get(name, job) != job:
            return known[name], job
    return None
