"""A sweep as a job array: one submission for all members, one question for where they stand."""

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchmuster import proc
from torchmuster.engines.base import PYTHON, ArrayDialect, Dialect, array_dialect
from torchmuster.engines.registry import load_dialect
from torchmuster.errors import MusterError, UsageError
from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.job import JobArray, JobRequest
from torchmuster.owner.jobs.jobs import cancel_job, submit_script
from torchmuster.spec.sweep_plan import SweepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberArray:
    """One submission.

    Attributes:
        job_id: The scheduler's.
        members: Of its elements, in their order; of one member it is a plain job.
    """

    job_id: str
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepArrays:
    """The content of `arrays.json`: the newest array that has a member is the one that counts.

    Attributes:
        request: What was asked for, without the array.
    """

    engine: str
    request: JobRequest
    arrays: tuple[MemberArray, ...] = ()


def find_arrays(dialect: Dialect, where: str) -> ArrayDialect:
    """Return the dialect as one with arrays.

    Raises:
        UsageError: It has none.
    """
    found = array_dialect(dialect)
    if found is None:
        raise UsageError(
            f"sweeps can't be submitted to {dialect.name} yet",
            where=where,
            why="a sweep is submitted as a job array, which muster knows of Slurm and of PBS",
            fix="on a machine or in a job of your own: muster sweep --here",
        )
    return found


def request_of(job: JobRequest, run_dir: RunDir, engine: str) -> JobRequest:
    """Return the job of one member of a sweep, from that of a run."""
    head = (PYTHON, proc.NODE_DOOR, "conduct-member", run_dir.path, "--engine", engine)
    return replace(
        job,
        head=(*head, "--submitted-from", os.uname().machine),
        about="The head of one member: its number in the array says which.",
        log_path=run_dir.job_log,
        python=sys.executable,
        package_copy=run_dir.package_copy,
    )


def array_request(
    request: JobRequest, plan: SweepPlan, members: Sequence[int], number: int
) -> JobRequest:
    """Return the request for some members; the head finds them by the number of the submission."""
    array = None
    if len(members) > 1:
        parallel = plan.slots if plan.slots < len(members) else None
        array = JobArray(size=len(members), parallel=parallel)
    return replace(request, head=(*request.head, "--array", str(number)), array=array)


def submit_members(
    plan: SweepPlan, run_dir: RunDir, dialect: Dialect, request: JobRequest, members: Sequence[int]
) -> str:
    """Submit members of a sweep as one array; record and return the job's id.

    Raises:
        JobRefusedError: The scheduler refused it.
        EngineError: Its answer can't be understood.
    """
    noted = read_arrays(run_dir) or SweepArrays(engine=dialect.name, request=request)
    number = len(noted.arrays)
    # Before the submission: an element may start at once.
    planned = MemberArray(job_id="", members=tuple(members))
    _write(run_dir, replace(noted, arrays=(*noted.arrays, planned)))
    try:
        asked = array_request(noted.request, plan, members, number)
        job_id = submit_script(asked, run_dir.job_script, dialect)
    except BaseException:
        _write(run_dir, noted)
        raise
    _write(run_dir, replace(noted, arrays=(*noted.arrays, replace(planned, job_id=job_id))))
    return job_id


def _write(run_dir: RunDir, noted: SweepArrays) -> None:
    atomic.write_json(run_dir.arrays, codec.to_plain(noted))


def read_arrays(run_dir: RunDir) -> SweepArrays | None:
    """Return the arrays of a sweep; None when it has none."""
    try:
        return codec.from_plain(SweepArrays, atomic.read_json(run_dir.arrays))
    except codec.CodecError:
        return None


def load_arrays(run_dir: RunDir) -> tuple[ArrayDialect, SweepArrays] | None:
    """Return the arrays of a sweep with their dialect; None when it has none."""
    noted = read_arrays(run_dir)
    dialect = array_dialect(load_dialect(noted.engine)) if noted is not None else None
    return (dialect, noted) if noted is not None and dialect is not None else None


def cancel_arrays(run_dir: RunDir) -> bool:
    """Cancel all arrays of a sweep; say whether it has any."""
    loaded = load_arrays(run_dir)
    for array in loaded[1].arrays if loaded is not None else ():
        with contextlib.suppress(MusterError):  # it may have ended
            cancel_job(loaded[0], array.job_id) if loaded is not None else None
    return loaded is not None
