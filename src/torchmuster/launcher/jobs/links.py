"""Which jobs a run has had, has and may get: what the client and the heads of its links have noted.

`job.json` is the client's, `links.json` that of the head whose link it is, `cancelled.json` again the client's.
"""

import contextlib
import os
import time
from collections.abc import Sequence

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.links import Links
from torchmuster.core.model.states import JobState, RunState
from torchmuster.core.model.verdict import Result
from torchmuster.core.owner.record import read_result
from torchmuster.errors import MusterError
from torchmuster.launcher.engines.base import Dialect, NodeQuestion, object_dialect
from torchmuster.launcher.engines.registry import dialect_of_record
from torchmuster.launcher.jobs.answers import ask_scheduler, words_of_loss
from torchmuster.launcher.jobs.jobs import cancel_job, read_job, view_jobs
from torchmuster.launcher.model.job import JobView

ON_ITS_WAY = frozenset({JobState.ENDING, JobState.PENDING, JobState.REQUEUED})
_VISIBLE_S = 10.0  # from its creation on an object is in every answer of its cluster
_FATE_KNOWN_S = 900.0  # after a signal's end; later nobody asks the scheduler
# A link that ended so may be followed by another; only its head knows.
MAY_GO_ON = frozenset({RunState.PREEMPTED, RunState.CANCELLED, RunState.TIMED_OUT})


def read_links(run_dir: RunDir) -> Links | None:
    """Return what the heads have noted; None before the first has started."""
    try:
        return codec.from_plain(Links, atomic.read_json(run_dir.links))
    except codec.CodecError:
        return None


def write_links(run_dir: RunDir, links: Links) -> None:
    """Note the links of a run; for the head of the newest one only."""
    atomic.write_json(run_dir.links, codec.to_plain(links))


def read_chain(run_dir: RunDir) -> tuple[str, ...]:
    """Return the jobs that the client has submitted, in the order in which they run."""
    plain = atomic.read_json(run_dir.job)
    if not isinstance(plain, dict) or not isinstance(plain.get("job_id"), str):
        return ()
    chain = plain.get("chain", [])
    return (plain["job_id"], *(str(job_id) for job_id in chain if isinstance(chain, list)))


def all_jobs(run_dir: RunDir) -> tuple[Dialect, tuple[str, ...]] | None:
    """Return every job of a run, each once, the oldest first; None when it is no job."""
    chain = read_chain(run_dir)
    if not chain:
        return None
    plain = atomic.read_json(run_dir.job)
    links = read_links(run_dir)
    noted = tuple(link.job_id for link in links.links) if links is not None else ()
    return dialect_of_record(str(plain.get("engine"))), tuple(dict.fromkeys((*chain, *noted)))


def view_newest(run_dir: RunDir) -> JobView | None:
    """Return what the scheduler says of the job that is the run's now; None when it says nothing.

    A link may have been killed before it could note the next one: then that is the job after it in the chain.
    """
    found = open_jobs(run_dir)
    if found is None:
        return None
    dialect, job_ids = found
    views = view_jobs(dialect, job_ids)
    living = (views[i] for i in job_ids if i in views and not views[i].state.is_final)
    view = next(living, views.get(job_ids[0]))
    if view is None and object_dialect(dialect) is not None:
        # A cluster that does not answer has a view of its own: this one has answered without the Job.
        if _must_be_visible(run_dir):
            return JobView(job_id=job_ids[0], state=JobState.CANCELLED, reason="it was deleted")
        return JobView(job_id=job_ids[0], state=JobState.PENDING)
    return view


def words_on_head(run_dir: RunDir, job: JobView) -> str | None:
    """Return in what words the scheduler says that the machine of a running job's head is lost; None when it does not.

    Where a job lives on without that machine, the next head says so.
    """
    found = open_jobs(run_dir)
    if found is None or job.state is not JobState.RUNNING or not job.nodes:
        return None
    dialect, node = found[0], job.nodes[0]
    question: NodeQuestion | None = getattr(dialect, "lost_node", None)
    if question is None or question.outlives:
        return None
    words = words_of_loss(question, job.job_id, node, ask_scheduler)
    where = f"{dialect.name} says that {node} is lost, where the head of the run is"
    return f"{where}: {words}" if words is not None else None


def _must_be_visible(run_dir: RunDir) -> bool:
    """Say whether the job of a run was made long enough ago."""
    try:
        return time.time() - os.stat(run_dir.job).st_mtime > _VISIBLE_S
    except OSError:
        return False


def open_jobs(run_dir: RunDir) -> tuple[Dialect, tuple[str, ...]] | None:
    """Return the newest job of a run and those of its chain that follow; None when it is no job."""
    job = read_job(run_dir)
    if job is None:
        return None
    dialect, job_id = job
    chain = read_chain(run_dir)
    following = chain[chain.index(job_id) + 1 :] if job_id in chain else ()
    return dialect, (job_id, *following)


def describe_link(run_dir: RunDir) -> str | None:
    """Return `link 2 of 4` for a run that may have several, else None."""
    links = read_links(run_dir)
    return links.label if links is not None and links.most > 1 else None


def settled_result(run_dir: RunDir) -> Result | None:
    """Return the result of a run that is over; None while it goes on, also in a job that still waits.

    A link that was preempted has a result, too. It is the run's when its head says that none follows, or when no job
    of the run is left.
    """
    result = read_result(run_dir)
    if result is None or result.state not in MAY_GO_ON or not os.path.isfile(run_dir.job):
        return result
    links = read_links(run_dir)
    if links is None or links.ended is not None:
        return None if links is not None and _comes_back(run_dir, links) else result
    view = view_newest(run_dir)
    if view is not None and not view.state.is_final:
        return None
    result = read_result(run_dir)  # the head may have been at it just now
    if result is not None and result.state is RunState.PREEMPTED and is_cancelled(run_dir):
        links = read_links(run_dir)
        return result if links is not None and links.ended is not None else None
    return result


def _comes_back(run_dir: RunDir, links: Links) -> bool:
    """Say whether the scheduler itself starts a job again that it has ended: a preemption, a lost node."""
    # No scheduler starts a job again whose time was up; PBS shows it as running for its `kill_delay` more.
    states = {state.value for state in MAY_GO_ON - {RunState.TIMED_OUT}}
    if links.ended not in states or is_cancelled(run_dir):
        return False
    try:
        age_s = time.time() - os.stat(run_dir.result).st_mtime
    except OSError:
        return True  # set aside just now: it has come back
    if age_s > _FATE_KNOWN_S:
        return False
    view = view_newest(run_dir)
    # RUNNING: the scheduler has not said yet that it ends, or the head of its next start has not begun.
    return view is not None and view.state in ON_ITS_WAY | {JobState.RUNNING}


def mark_cancelled(run_dir: RunDir) -> None:
    """Note that the user wants no further link."""
    atomic.write_json(run_dir.cancelled, {"by": "muster cancel"})


def is_cancelled(run_dir: RunDir) -> bool:
    """Say whether the user wants no further link."""
    return os.path.exists(run_dir.cancelled)


def cancel_jobs(run_dir: RunDir) -> bool:
    """Cancel every job of a run, the last of its chain first; say whether it has any.

    Raises:
        EngineError: The scheduler refused to end the job that runs.
    """
    found = all_jobs(run_dir)
    if found is None:
        return False
    was_cancelled = is_cancelled(run_dir)
    mark_cancelled(run_dir)
    try:
        return _cancel_all(run_dir, *found)
    except MusterError:
        if not was_cancelled:  # it goes on
            os.unlink(run_dir.cancelled)
        raise


def _cancel_all(run_dir: RunDir, dialect: Dialect, job_ids: Sequence[str]) -> bool:
    if object_dialect(dialect) is not None:
        from torchmuster.launcher.views.elsewhere import elsewhere

        return elsewhere().cancel_run(run_dir)
    newest = read_job(run_dir)
    for job_id in reversed(job_ids):
        if newest is not None and job_id == newest[1]:
            cancel_job(dialect, job_id)
            continue
        with contextlib.suppress(MusterError):  # it has ended, or follows the one that ends now
            cancel_job(dialect, job_id)
    return True
