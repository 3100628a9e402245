"""The head of one member of a sweep inside its job: each element of the array starts it.

It finds its member by the element's number in the array, makes the member's run directory, and
continues as the head of any run in a job.
"""

import os
import sys

from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.errors import RunDirectoryError
from torchmuster.launcher.engines.base import array_dialect
from torchmuster.launcher.engines.registry import load_dialect
from torchmuster.launcher.jobs.conduct import conduct
from torchmuster.launcher.jobs.succession import ConductOptions
from torchmuster.multirun.sweep.arrays import ConductMemberArgs, read_arrays
from torchmuster.multirun.sweep.members import prepare_member
from torchmuster.multirun.views.sweep_view import read_sweep


def main(arguments: list[str]) -> int:
    """Conduct the member of this array element; return the exit code."""
    words = codec.from_arguments(ConductMemberArgs, arguments)
    run_dir = RunDir(words.sweep_dir)
    plan, noted = read_sweep(run_dir), read_arrays(run_dir)
    if plan is None or noted is None or words.array >= len(noted.arrays):
        what = "the plan of the sweep can't be read, or does not have this array"
        raise RunDirectoryError(what, where=run_dir.arrays)
    dialect = array_dialect(load_dialect(words.engine))
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
