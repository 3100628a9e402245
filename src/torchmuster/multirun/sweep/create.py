"""Create the run directory of a sweep."""

import os
from dataclasses import replace

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, runs_dir
from torchmuster.core.model import codec
from torchmuster.core.owner.create import make_dir, with_call
from torchmuster.launcher.owner.origin import note_origin
from torchmuster.multirun.sweep.plan import SweepPlan


def create_sweep_dir(plan: "SweepPlan") -> RunDir:
    """Create the run directory of a sweep.

    Raises:
        UsageError: The directory exists already.
        RunDirectoryError: The directory can't be created or written.
    """

    def fill(run_dir: RunDir) -> None:
        carried = replace(plan, run=with_call(plan.run, run_dir))
        atomic.write_json(run_dir.sweep, codec.to_plain(carried))
        os.mkdir(run_dir.members, 0o700)

    run_dir = make_dir(os.path.join(runs_dir(), plan.run_id), fill)
    note_origin(run_dir, plan.run.program)
    return run_dir
