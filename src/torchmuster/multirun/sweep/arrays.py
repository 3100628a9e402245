"""A sweep as a job array: one submission for all members, one query for their states."""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torchmuster.core import plugs, proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.codec import to_arguments
from torchmuster.errors import MusterError, RunDirectoryError, UsageError
from torchmuster.launcher.engines import base
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.jobs.answers import ask_scheduler
from torchmuster.launcher.jobs.jobs import cancel_job, submit_script
from torchmuster.launcher.model.job import AfterKind, JobArray, JobDependency, JobRequest
from torchmuster.multirun.sweep.members import prepare_member
from torchmuster.multirun.sweep.plan import SweepPlan, read_sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberArray:
    """One submission.

    Attributes:
        job_id: The scheduler's id.
        members: The members of its elements, in order; a single member is a plain job.
    """

    job_id: str
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepArrays:
    """The content of `arrays.json`; for each member, the newest array with it counts.

    Attributes:
        request: The job request, without the array; None if it was submitted on another machine.
    """

    engine: str
    request: JobRequest | None
    arrays: tuple[MemberArray, ...] = ()


def find_arrays(dialect: base.Dialect, where: str) -> base.ArrayDialect:
    """Return the dialect as one that has job arrays.

    Raises:
        UsageError: It has none.
    """
    found = base.array_dialect(dialect)
    if found is None:
        raise UsageError(
            f"sweeps can't be submitted to {dialect.name} yet",
            where=where,
            why="a sweep is submitted as a job array, which muster knows of Slurm and of PBS",
            fix="on a machine or in a job of your own: muster sweep --here",
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ConductMemberArgs:
    """The command line of `conduct-member` in an array's script.

    `array` is the index of the array in the sweep; the rest is as for `conduct`.
    """

    sweep_dir: str
    engine: str
    array: int = 0
    submitted_from: str | None = None


def request_of(job: JobRequest, run_dir: RunDir, engine: str) -> JobRequest:
    """Return the job request for one member of a sweep, made from that for a run."""
    words = ConductMemberArgs(
        sweep_dir=run_dir.path, engine=engine, submitted_from=os.uname().machine
    )
    return replace(
        job,
        head=(base.PYTHON, proc.NODE_ENTRY, "conduct-member", *to_arguments(words)),
        about="The head of one member: its number in the array says which.",
        log_path=run_dir.job_log,
        python=sys.executable,
        package_copy=run_dir.package_copy,
    )


def array_request(
    request: JobRequest,
    members: Sequence[int],
    number: int,
    parallel: int | None = None,
    after: Sequence[str] = (),
) -> JobRequest:
    """Return the request for some members; their heads find them by the submission's number.

    Args:
        request: The request for one member.
        members: The members of this array.
        number: The number of the submission.
        parallel: How many run at a time; None: the scheduler decides.
        after: The ids of arrays that must end before this one starts.
    """
    array, log_path = None, request.log_path
    if len(members) > 1:
        limit = parallel if parallel is not None and parallel < len(members) else None
        array = JobArray(size=len(members), parallel=limit)
        # The scheduler's last message is about one element; a common log would not show which.
        log_path = os.path.join(os.path.dirname(request.log_path), "logs", "jobs", str(number))
    waits = tuple(JobDependency(kind=AfterKind.ANY, job_id=job_id) for job_id in after)
    head = (*request.head, f"--array={number}")
    return replace(request, head=head, array=array, log_path=log_path, after=waits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPart:
    """One of the arrays of a submission.

    Attributes:
        parallel: How many of its members run at a time; None: the scheduler decides.
        is_chained: It begins when the previous array has ended.
    """

    members: tuple[int, ...]
    parallel: int | None = None
    is_chained: bool = False


def split_members(members: Sequence[int], slots: int, limit: int | None) -> list[ArrayPart]:
    """Split members into arrays that respect the scheduler's limit of elements.

    Several arrays share the slots. With fewer slots than arrays, they run one after the other.
    """
    most = max(1, limit) if limit is not None else len(members)
    chunks = [tuple(members[at : at + most]) for at in range(0, len(members), most)]
    if slots >= len(members):
        return [ArrayPart(members=chunk) for chunk in chunks]
    if slots < len(chunks):
        return [
            ArrayPart(members=chunk, parallel=slots, is_chained=place > 0)
            for place, chunk in enumerate(chunks)
        ]
    share, more = divmod(slots, len(chunks))
    return [
        ArrayPart(members=chunk, parallel=share + (place < more))
        for place, chunk in enumerate(chunks)
    ]


def submit_members(
    plan: SweepPlan,
    run_dir: RunDir,
    dialect: base.ArrayDialect,
    request: JobRequest,
    members: Sequence[int],
) -> tuple[str, ...]:
    """Submit members of a sweep as one array, or several if the scheduler's limit is lower.

    Return the job ids.

    Raises:
        JobRefusedError: The scheduler refused an array; the earlier ones are cancelled.
        EngineError: Its answer can't be understood.
    """
    before = read_arrays(run_dir)
    noted = before or SweepArrays(engine=dialect.name, request=request)
    job_ids: list[str] = []
    for part in split_members(members, plan.slots, _limit_of(dialect, len(members))):
        number = len(noted.arrays)
        # Before the submission: an element may start at once.
        planned = MemberArray(job_id="", members=part.members)
        write_arrays(run_dir, replace(noted, arrays=(*noted.arrays, planned)))
        after = job_ids[-1:] if part.is_chained else ()
        asked = array_request(request, part.members, number, part.parallel, after)
        try:
            os.makedirs(os.path.dirname(asked.log_path), exist_ok=True)
            job_ids.append(submit_script(asked, run_dir.job_script, dialect))
        except BaseException:
            for job_id in job_ids:
                with contextlib.suppress(MusterError):
                    cancel_job(dialect, job_id)
            write_arrays(run_dir, before or replace(noted, arrays=()))
            raise
        noted = replace(noted, arrays=(*noted.arrays, replace(planned, job_id=job_ids[-1])))
        write_arrays(run_dir, noted)
    return tuple(job_ids)


def _limit_of(dialect: base.ArrayDialect, num_members: int) -> int | None:
    """Ask the scheduler how many elements an array may have; None if it does not say."""
    if num_members <= 1:
        return None
    with contextlib.suppress(MusterError):
        said = ask_scheduler(dialect.array_limit_argv())
        return dialect.array_limit(said.stdout.decode(errors="replace"))
    return None


def write_arrays(run_dir: RunDir, noted: SweepArrays) -> None:
    """Record the arrays of a sweep."""
    atomic.write_json(run_dir.arrays, codec.to_plain(noted))


def read_arrays(run_dir: RunDir) -> SweepArrays | None:
    """Return the recorded arrays of a sweep; None if it has none."""
    try:
        return codec.from_plain(SweepArrays, atomic.read_json(run_dir.arrays))
    except codec.CodecError:
        return None


def load_arrays(run_dir: RunDir) -> tuple[base.ArrayDialect, SweepArrays] | None:
    """Return the dialect and the recorded arrays of a sweep; None if it has none."""
    noted = read_arrays(run_dir)
    dialect = base.array_dialect(load_dialect(noted.engine)) if noted is not None else None
    return (dialect, noted) if noted is not None and dialect is not None else None


def element_of(loaded: tuple[base.ArrayDialect, SweepArrays], number: int) -> str | None:
    """Return the scheduler's id for a member's element or plain job; None while it has none."""
    dialect, noted = loaded
    for array in reversed(noted.arrays):
        if number in array.members and array.job_id:
            if len(array.members) == 1:
                return array.job_id
            return dialect.element_id(array.job_id, array.members.index(number))
    return None


class ObjectMembers(Protocol):
    """Members that are parts of one object of a cluster's API; plugged in as `arrays`."""

    def submit(
        self,
        plan: SweepPlan,
        run_dir: RunDir,
        request: JobRequest,
        members: Sequence[int],
        *,
        detach: bool,
    ) -> str:
        """Submit these members as one job; return its id.

        Raises:
            MusterError: The job can't be submitted.
        """

    def stop(self, run_dir: RunDir, number: int) -> None:
        """End one member.

        Raises:
            MusterError: The member can't be ended.
        """

    def cancel(self, run_dir: RunDir) -> None:
        """End all members.

        Raises:
            EngineError: The cluster refuses.
        """


def object_members(dialect: base.Dialect) -> ObjectMembers | None:
    """Return the handler of members that are API objects; None for array elements."""
    if base.object_dialect(dialect) is None:
        return None
    make: Callable[[], ObjectMembers] = plugs.find("arrays", "objects")
    return make()


def cancel_sweep(run_dir: RunDir) -> bool:
    """Cancel all arrays of a sweep, or its Kubernetes Job; return whether it has any.

    Raises:
        EngineError: The cluster refuses.
    """
    loaded = load_arrays(run_dir)
    if loaded is None:
        return False
    dialect, noted = loaded
    if (pods := object_members(dialect)) is not None:
        pods.cancel(run_dir)
        return True
    for array in noted.arrays:
        with contextlib.suppress(MusterError):  # it may have ended
            cancel_job(dialect, array.job_id)
    return True


# The head of one member inside its job: each element of the array starts it. It finds its member by the element's number,
# makes the member's run directory, and goes on as the head of any run in a job.


def main(arguments: list[str]) -> int:
    """Conduct the member of this array element; return the exit code."""
    from torchmuster.launcher.jobs.conduct import conduct  # what views of a sweep do without
    from torchmuster.launcher.jobs.succession import ConductOptions

    words = codec.from_arguments(ConductMemberArgs, arguments)
    run_dir = RunDir(words.sweep_dir)
    plan, noted = read_sweep(run_dir), read_arrays(run_dir)
    if plan is None or noted is None or words.array >= len(noted.arrays):
        what = "the plan of the sweep can't be read, or does not have this array"
        raise RunDirectoryError(what, where=run_dir.arrays)
    dialect = base.array_dialect(load_dialect(words.engine))
    variable = dialect.array_variable if dialect is not None else ""
    position = int(os.environ.get(variable) or 0)  # a plain job of one member has none
    number = noted.arrays[words.array].members[position]
    member, _ = prepare_member(run_dir, plan, number)
    sys.stdout.flush()
    output = os.readlink("/proc/self/fd/1")  # where the scheduler writes its last message
    # Otherwise the output of all elements' heads would mix in the array's log.
    log = os.open(member.job_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    conduct_args = ConductOptions(
        run_dir=member.path,
        engine=words.engine,
        output=output,
        submitted_from=words.submitted_from,
    )
    return conduct(conduct_args)
