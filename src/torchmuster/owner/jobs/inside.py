"""A run inside a job of a scheduler: its agents, its attempts so far, the end of its time."""

import os
import time
from functools import partial

from torchmuster.engines.allocation import AllocationEngine
from torchmuster.engines.own_job import OwnJob
from torchmuster.model.verdict import Result
from torchmuster.owner.deadline import Deadline
from torchmuster.owner.parts import RunDisplay
from torchmuster.owner.resubmit import Ask, ask_quickly, find_end, restarts_spent
from torchmuster.owner.supervise import own_run
from torchmuster.owner.views.record import next_attempt


def own_run_inside(engine: AllocationEngine, display: RunDisplay, deadline: Deadline) -> Result:
    """Start the agents on the nodes of a job and follow the run to its end."""
    if engine.job.launcher.sentence is not None:
        display.say(engine.job.launcher.sentence)
    spent = restarts_spent(engine.run_dir, engine.plan.limits.max_restarts)
    engine.start_all(first_attempt=next_attempt(engine.run_dir), restarts_spent=spent)
    deadline.find_out()  # while the agents start
    return own_run(engine, display, deadline=deadline, is_deposed=engine.is_deposed)


def make_deadline(job: OwnJob, *, warn_s: float, goes_on: bool = False) -> Deadline:
    """Return what watches the time of the job: its environment says when it ends, or the scheduler."""
    ask = partial(find_end, job.dialect, job.allocation.job_id, time.time)
    return Deadline(warn_s, ends_at=job.allocation.ends_at, ask=ask, goes_on=goes_on)


def note_the_end(job: OwnJob, ask: Ask = ask_quickly) -> None:
    """Find out when the job has to end and leave it to the agents: PBS and old versions of Slurm set no variable."""
    from torchmuster.diagnose.facts.environment import ALLOCATION_ENDS_AT

    if job.allocation.ends_at is not None:
        return
    end = find_end(job.dialect, job.allocation.job_id, time.time, ask)
    if end is not None:
        os.environ[ALLOCATION_ENDS_AT] = str(int(end))
