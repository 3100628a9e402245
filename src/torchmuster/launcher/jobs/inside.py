"""A run inside a scheduler's job: its agents, its earlier attempts, the end of its time."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import short_id
from torchmuster.core.model import codec, contract
from torchmuster.core.model.owner_policy import JobTime
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report, Result
from torchmuster.core.owner.parts import RunDisplay
from torchmuster.core.owner.record import next_attempt
from torchmuster.core.owner.session import EarlyStop
from torchmuster.core.owner.stops import Deadline
from torchmuster.core.owner.supervise import own_run
from torchmuster.errors import MusterError
from torchmuster.launcher.engines.allocation import AllocationEngine
from torchmuster.launcher.engines.base import PreemptionQuestion
from torchmuster.launcher.engines.own_job import OwnJob
from torchmuster.launcher.jobs.links import is_cancelled
from torchmuster.launcher.owner.resubmit import (
    Ask,
    ask_quickly,
    ask_spared,
    find_end,
    restarts_spent,
)

_ENDS_S = 30.0  # more, for a scheduler that is late
_LONGEST_GRACE_S = 3600.0
_TRIES = 3


def own_run_inside(engine: AllocationEngine, display: RunDisplay, deadline: Deadline) -> Result:
    """Start the agents on the nodes of a job and follow the run to its end."""
    if engine.job.launcher.sentence is not None:
        display.say(engine.job.launcher.sentence)
    spent = restarts_spent(engine.run_dir, engine.plan.limits.max_restarts)
    early = EarlyStop()
    engine.start_all(first_attempt=next_attempt(engine.run_dir), restarts_spent=spent)
    deadline.find_out()  # while the agents start
    is_deposed = engine.is_deposed
    result = own_run(engine, display, deadline=deadline, early=early, is_deposed=is_deposed)
    return _outlast_preemption(engine, result, deadline, display.say)


def _outlast_preemption(
    engine: AllocationEngine,
    result: Result,
    deadline: Deadline,
    say: Callable[[str], None],
) -> Result:
    """Keep the job alive while the scheduler preempts it: a job that ends by itself isn't requeued.

    The scheduler's warning looks like a cancel, so the scheduler is asked what it was. For a job
    that is not requeued, `--resubmit` continues the run as at the end of its time.
    """
    # The signal reaches all processes: a worker that died from it may have ended the run first.
    if result.state is RunState.SUCCEEDED or is_cancelled(engine.run_dir):
        return result
    grace_s = _grace_s(engine.job, ask_quickly)
    if grace_s is None:
        return result
    name = engine.job.dialect.name
    report = Report(
        error=f"{name} preempts the job for another one",
        because=result.report.because if result.report is not None else (),
        hint=f"muster restart {short_id(result.run_id)}, unless {name} starts the job again",
    )
    code = contract.EX_TEMPFAIL
    result = replace(result, state=RunState.PREEMPTED, exit_code=code, report=report)
    atomic.write_json(engine.run_dir.result, codec.to_plain(result))
    if deadline.limit.goes_on and is_preempted_for_good(engine.job):
        say(f"{name} preempts this job, and does not start it again")
        deadline.limit.was_up = True
        return result
    within = f", in at most {grace_s:.0f} s" if grace_s < _LONGEST_GRACE_S else ""
    say(
        f"{name} preempts this job: it stays until {name} ends it{within}, so that it can be started again"
    )
    threading.Event().wait(min(grace_s, _LONGEST_GRACE_S) + _ENDS_S)
    return result


def _question(job: OwnJob) -> PreemptionQuestion | None:
    question: PreemptionQuestion | None = getattr(job.dialect, "preemption", None)
    return question


def _grace_s(job: OwnJob, ask: Ask) -> float | None:
    """Return the grace before the preemption of this job; None if not preempted or unknown."""
    question = _question(job)
    if question is None:
        return None
    return question.grace_s(_answer(question.argv_for(job.allocation.job_id), ask))


def is_preempted_for_good(job: OwnJob) -> bool:
    """Return whether the scheduler preempts this job and does not requeue it."""
    question = _question(job)
    if question is None:
        return False
    asked = question.argv_for(job.allocation.job_id), question.argv_of_rules
    return question.is_the_end(*(_answer(argv, ask_quickly) for argv in asked))


def _answer(argv: Sequence[str], ask: Ask) -> str:
    """Return the output of a scheduler's command; empty if it fails."""
    for _ in range(_TRIES):
        with contextlib.suppress(MusterError):
            answer = ask(list(argv))
            if answer.status == 0:
                return answer.stdout.decode(errors="replace")
    return ""


def make_deadline(job: OwnJob, *, warn_s: float, goes_on: bool = False) -> Deadline:
    """Return the watch of the job's end, which the environment or the scheduler provides."""
    ask = partial(find_end, job.dialect, job.allocation.job_id, time.time)

    def again() -> float | None:
        end = ask(ask=ask_spared)  # the end of a preemption's grace is not a time limit
        return None if end is not None and _grace_s(job, ask_spared) is not None else end

    ends_at = job.allocation.ends_at
    return Deadline(JobTime(warn_s, ends_at, goes_on=goes_on), ask=ask, ask_again=again)


def note_the_end(job: OwnJob, ask: Ask = ask_quickly) -> None:
    """Tell the agents by a variable when the job ends: PBS and old versions of Slurm set none."""
    from torchmuster.launcher.facts.collect import ALLOCATION_ENDS_AT

    if job.allocation.ends_at is not None:
        return
    end = find_end(job.dialect, job.allocation.job_id, time.time, ask)
    if end is not None:
        os.environ[ALLOCATION_ENDS_AT] = str(int(end))
