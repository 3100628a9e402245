"""A run's past, current and further jobs, as recorded by the client and the heads of its links.

The client writes `job.json` and `cancelled.json`, the head of the newest link `links.json`.
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
from torchmuster.launcher.jobs.answers import ask_scheduler, find_node_loss
from torchmuster.launcher.jobs.jobs import cancel_job, read_job, view_jobs
from torchmuster.launcher.model.job import JobView

WAITING_STATES = frozenset({JobState.ENDING, JobState.PENDING, JobState.REQUEUED})
_VISIBLE_S = 10.0  # from its creation until every answer of its cluster shows an object
_FATE_KNOWN_S = 900.0  # after the end by a signal; later the scheduler isn't asked
# A link with such an end may be followed by another; only its head knows.
MAY_BE_CONTINUED = frozenset({RunState.PREEMPTED, RunState.CANCELLED, RunState.TIMED_OUT})


def read_links(run_dir: RunDir) -> Links | None:
    """Return the links that the heads have recorded; None before the first has started."""
    try:
        return codec.from_plain(Links, atomic.read_json(run_dir.links))
    except codec.CodecError:
        return None


def write_links(run_dir: RunDir, links: Links) -> None:
    """Record the links of a run; only the head of the newest link may."""
    atomic.write_json(run_dir.links, codec.to_plain(links))


def read_chain(run_dir: RunDir) -> tuple[str, ...]:
    """Return the jobs that the client has submitted, in the order in which they run."""
    plain = atomic.read_json(run_dir.job)
    if not isinstance(plain, dict) or not isinstance(plain.get("job_id"), str):
        return ()
    chain = plain.get("chain", [])
    return (plain["job_id"], *(str(job_id) for job_id in chain if isinstance(chain, list)))


def all_jobs(run_dir: RunDir) -> tuple[Dialect, tuple[str, ...]] | None:
    """Return the dialect and every job of a run once, oldest first; None if it has no job."""
    chain = read_chain(run_dir)
    if not chain:
        return None
    plain = atomic.read_json(run_dir.job)
    links = read_links(run_dir)
    noted = tuple(link.job_id for link in links.links) if links is not None else ()
    return dialect_of_record(str(plain.get("engine"))), tuple(dict.fromkeys((*chain, *noted)))


def view_newest(run_dir: RunDir) -> JobView | None:
    """Return the scheduler's view of the run's current job; None if it has none.

    If a link was killed before it could record the next, the current job is the one after it in the
    chain.
    """
    found = open_jobs(run_dir)
    if found is None:
        return None
    dialect, job_ids = found
    views = view_jobs(dialect, job_ids)
    living = (views[i] for i in job_ids if i in views and not views[i].state.is_final)
    view = next(living, views.get(job_ids[0]))
    if view is None and object_dialect(dialect) is not None:
        # A cluster that doesn't answer gets an UNKNOWN view: this one answered, without the Job.
        if _must_be_visible(run_dir):
            return JobView(job_id=job_ids[0], state=JobState.CANCELLED, reason="it was deleted")
        return JobView(job_id=job_ids[0], state=JobState.PENDING)
    return view


def describe_lost_head(run_dir: RunDir, job: JobView) -> str | None:
    """Return the scheduler's words if it says that a running head's node is lost; else None.

    Where the job outlives that node, the next head reports it.
    """
    found = open_jobs(run_dir)
    if found is None or job.state is not JobState.RUNNING or not job.nodes:
        return None
    dialect, node = found[0], job.nodes[0]
    question: NodeQuestion | None = getattr(dialect, "lost_node", None)
    if question is None or question.outlives:
        return None
    words = find_node_loss(question, job.job_id, node, ask_scheduler)
    where = f"{dialect.name} says that {node} is lost, where the head of the run is"
    return f"{where}: {words}" if words is not None else None


def _must_be_visible(run_dir: RunDir) -> bool:
    """Return whether the run's job is old enough to show in every answer."""
    try:
        return time.time() - os.stat(run_dir.job).st_mtime > _VISIBLE_S
    except OSError:
        return False


def open_jobs(run_dir: RunDir) -> tuple[Dialect, tuple[str, ...]] | None:
    """Return a run's newest job and those after it in its chain; None if it has no job."""
    job = read_job(run_dir)
    if job is None:
        return None
    dialect, job_id = job
    chain = read_chain(run_dir)
    following = chain[chain.index(job_id) + 1 :] if job_id in chain else ()
    return dialect, (job_id, *following)


def describe_link(run_dir: RunDir) -> str | None:
    """Return e.g. `link 2 of 4` for a run that may have several links, else None."""
    links = read_links(run_dir)
    return links.label if links is not None and links.most > 1 else None


def settled_result(run_dir: RunDir) -> Result | None:
    """Return the result of a run that has ended; None while it continues, also in a waiting job.

    A preempted link has a result, too. It is the run's result once its head says that no link
    follows, or no job of the run is left.
    """
    result = read_result(run_dir)
    if result is None or result.state not in MAY_BE_CONTINUED or not os.path.isfile(run_dir.job):
        return result
    links = read_links(run_dir)
    if links is None or links.ended is not None:
        return None if links is not None and _comes_back(run_dir, links) else result
    view = view_newest(run_dir)
    if view is not None and not view.state.is_final:
        return None
    result = read_result(run_dir)  # the head may have written it just now
    if result is not None and result.state is RunState.PREEMPTED and is_cancelled(run_dir):
        links = read_links(run_dir)
        return result if links is not None and links.ended is not None else None
    return result


def _comes_back(run_dir: RunDir, links: Links) -> bool:
    """Return whether the scheduler requeues the job itself: after a preemption, or a lost node."""
    # No scheduler requeues a job whose time was up; PBS shows it as running for `kill_delay`
    # more.
    states = {state.value for state in MAY_BE_CONTINUED - {RunState.TIMED_OUT}}
    if links.ended not in states or is_cancelled(run_dir):
        return False
    try:
        age_s = time.time() - os.stat(run_dir.result).st_mtime
    except OSError:
        return True  # set aside just now: the job has started again
    if age_s > _FATE_KNOWN_S:
        return False
    view = view_newest(run_dir)
    # RUNNING: the scheduler hasn't shown the end yet, or the head of the next start hasn't begun.
    return view is not None and view.state in WAITING_STATES | {JobState.RUNNING}


def mark_cancelled(run_dir: RunDir) -> None:
    """Record that the user wants no further link."""
    atomic.write_json(run_dir.cancelled, {"by": "muster cancel"})


def is_cancelled(run_dir: RunDir) -> bool:
    """Return whether the user wants no further link."""
    return os.path.exists(run_dir.cancelled)


def cancel_jobs(run_dir: RunDir) -> bool:
    """Cancel every job of a run, the last of its chain first; return whether it has any.

    Raises:
        EngineError: The scheduler refused to end the running job.
    """
    found = all_jobs(run_dir)
    if found is None:
        return False
    was_cancelled = is_cancelled(run_dir)
    mark_cancelled(run_dir)
    try:
        return _cancel_all(run_dir, *found)
    except MusterError:
        if not was_cancelled:  # the run continues
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
