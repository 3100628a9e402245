"""The head of one member of a sweep inside its job: what each element of the array starts.

    conduct-member SWEEP_DIR --engine NAME --array K [--submitted-from PROCESSOR]

It finds its member by its number in the array, makes its run directory, and goes on as the head of any run in a job.
"""

import argparse
import os
import sys

from torchmuster.engines.base import array_dialect
from torchmuster.engines.registry import load_dialect
from torchmuster.errors import RunDirectoryError
from torchmuster.files.layout import RunDir
from torchmuster.owner.jobs import conduct
from torchmuster.owner.sweep.arrays import read_arrays
from torchmuster.owner.sweep.members import prepare_member
from torchmuster.owner.views.sweep_view import read_sweep


def main(arguments: list[str]) -> int:
    """Conduct the member that this element is."""
    parser = argparse.ArgumentParser(prog="conduct-member")
    parser.add_argument("sweep_dir")
    parser.add_argument("--engine", required=True)
    parser.add_argument("--array", type=int, required=True)
    parser.add_argument("--submitted-from", metavar="PROCESSOR")
    options = parser.parse_args(arguments)
    run_dir = RunDir(options.sweep_dir)
    plan, noted = read_sweep(run_dir), read_arrays(run_dir)
    if plan is None or noted is None or options.array >= len(noted.arrays):
        what = "the plan of the sweep can't be read, or does not have this array"
        raise RunDirectoryError(what, where=run_dir.arrays)
    dialect = array_dialect(load_dialect(options.engine))
    variable = dialect.array_variable if dialect is not None else ""
    position = int(os.environ.get(variable) or 0)  # a plain job of one member has none
    number = noted.arrays[options.array].members[position]
    member, _ = prepare_member(run_dir, plan, number)
    sys.stdout.flush()
    output = os.readlink("/proc/self/fd/1")  # where the scheduler has its last word
    # What the heads of all elements say would mix in the one log of the array.
    log = os.open(member.job_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    words = [member.path, "--engine", options.engine, "--output", output]
    if options.submitted_from is not None:
        words += ["--submitted-from", options.submitted_from]
    return conduct.main(words)
