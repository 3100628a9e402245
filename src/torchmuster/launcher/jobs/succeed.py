"""The owner of a run in a job whose first node was lost; the agent that became the head starts it.

    succeed RUN_DIR --place PLACE --head PID PORT

It does what `conduct.py` in the job's script did, and ends the job, since that script can't.
"""

import contextlib

from torchmuster.core import proc
from torchmuster.core.files.layout import RunDir
from torchmuster.core.files.terminal import TerminalVoice
from torchmuster.core.model.codec import from_arguments
from torchmuster.core.model.links import ResubmitMethod
from torchmuster.core.model.succession import SucceedOrder
from torchmuster.core.owner.create import write_owner
from torchmuster.core.owner.record import read_plan, read_result
from torchmuster.core.owner.supervise import own_run
from torchmuster.errors import HeadLostError, MusterError, RunDirectoryError
from torchmuster.launcher.engines.allocation import InheritedEngine
from torchmuster.launcher.engines.own_job import OwnJob
from torchmuster.launcher.jobs.conduct import finish
from torchmuster.launcher.jobs.inside import make_deadline
from torchmuster.launcher.jobs.jobs import forget_views, view_jobs
from torchmuster.launcher.jobs.links import MAY_BE_CONTINUED, WAITING_STATES, read_links
from torchmuster.launcher.jobs.succession import read_estate
from torchmuster.launcher.notify.watcher import notifying_inside
from torchmuster.launcher.owner.resubmit import COMMAND_TIMEOUT_S, Chain, parse_method


def main(arguments: list[str]) -> int:
    """Own the run to its end, then end the job; return the exit code."""
    words = from_arguments(SucceedOrder, arguments)
    with notifying_inside(RunDir(words.run_dir)):
        return succeed(words)


def succeed(words: SucceedOrder) -> int:
    """Own the run to its end, then end the job; return the exit code."""
    run_dir = RunDir(words.run_dir)
    plan = read_plan(run_dir)
    if plan is None:
        raise RunDirectoryError("the plan of the run can't be read", where=run_dir.plan)
    proc.die_with_parent(words.head_pid)
    estate = read_estate(run_dir)
    job = estate.job.with_launcher(estate.words.way)
    chain = Chain(run_dir, job.dialect, job.allocation.job_id, estate.words.resubmit)
    chain.way, chain.links = (
        parse_method(estate.words.resubmit_with),
        read_links(run_dir) or chain.links,
    )
    write_owner(run_dir)
    voice = TerminalVoice()
    voice.start()
    voice.say(f"{job.node_names[words.place]} has become the head of this run")
    engine = InheritedEngine(
        plan, run_dir, job, place=words.place, head_pid=words.head_pid, port=words.head_port
    )
    deadline = make_deadline(job, warn_s=estate.words.warn, goes_on=chain.has_link_left)
    deadline.find_out()
    result = read_result(run_dir)
    try:
        if result is None:  # else the previous owner was killed at the end of the run
            result = own_run(engine, voice, deadline=deadline, is_deposed=engine.is_deposed)
    except HeadLostError as error:
        voice.say(error.what)  # yet another node has taken over
        voice.flush(1.0)
        return error.exit_code
    before = len(chain.links.links)
    code = finish(result, chain, deadline, voice)
    requeued = [link.way for link in chain.links.links[before:]] == [ResubmitMethod.REQUEUE]
    if not requeued and not (result.state in MAY_BE_CONTINUED and _was_taken(job)):
        with contextlib.suppress(MusterError):  # the job then ends at its time limit
            proc.ask(job.dialect.cancel_argv(job.allocation.job_id), b"", COMMAND_TIMEOUT_S)
    return code


def _was_taken(job: OwnJob) -> bool:
    """Return whether the scheduler ended the job, e.g. at a reboot, and may requeue it."""
    job_id = job.allocation.job_id
    forget_views()
    view = view_jobs(job.dialect, (job_id,)).get(job_id)
    return view is not None and view.state in WAITING_STATES
