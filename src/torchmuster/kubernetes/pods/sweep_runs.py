"""A sweep member with several pods: a run in pods that a process of this machine owns."""

import asyncio
import os
import signal
import threading
from dataclasses import replace

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.files.terminal import TerminalVoice
from torchmuster.core.model import codec
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.verdict import AT_ONCE
from torchmuster.core.owner.record import next_attempt
from torchmuster.kubernetes.engine.dialect import DIALECT, name_of
from torchmuster.kubernetes.pods.bring import bring_run
from torchmuster.kubernetes.pods.end import cancel_run
from torchmuster.kubernetes.pods.reach import job_of
from torchmuster.launcher.jobs.batch import JobFollower
from torchmuster.launcher.jobs.jobs import note_refusal, submit_job
from torchmuster.launcher.model.job import JobRequest
from torchmuster.launcher.views.find import view_job


def note_request(sweep: RunDir, job: JobRequest) -> None:
    """Record that a sweep's members are runs in pods, and the request for each."""
    os.makedirs(os.path.join(sweep.path, "pods"), mode=0o700, exist_ok=True)
    atomic.write_json(sweep.member_request, codec.to_plain(job))


def own_member(plan: RunPlan, run_dir: RunDir) -> int:
    """Submit a sweep member, unless its Job still runs, and follow it to its end.

    Raises:
        MusterError: The cluster refuses it.
    """
    sweep = os.path.dirname(os.path.dirname(run_dir.path))
    plain = atomic.read_json(RunDir(sweep).member_request)
    voice = TerminalVoice()
    voice.start()
    for signum in (signal.SIGTERM, AT_ONCE):
        signal.signal(signum, lambda *_: _end(run_dir))
    try:
        with note_refusal(run_dir):
            job_id = _running_job(run_dir) or _submit(plan, run_dir, plain)
        follower = JobFollower(plan, run_dir, DIALECT, job_id, voice)
        try:
            result = asyncio.run(follower.follow())
        finally:
            follower.close()
    finally:
        voice.flush(5.0)
    return result.exit_code if result is not None else 1


def _end(run_dir: RunDir) -> None:
    """End the run on its cluster, in a thread; its follower then sees the result."""
    threading.Thread(target=cancel_run, args=(run_dir,), daemon=True).start()


def _running_job(run_dir: RunDir) -> str | None:
    """Return the Job that an earlier owner of the sweep submitted, if it has not ended."""
    view = view_job(run_dir)
    return job_of(run_dir) if view is not None and not view.state.is_final else None


def _submit(plan: RunPlan, run_dir: RunDir, plain: object) -> str:
    request = codec.from_plain(JobRequest, plain)
    attempt = next_attempt(run_dir)
    more = f"-{attempt}" if attempt else ""  # the pods of an earlier Job may still be ending
    name = name_of(short_id(plan.run_id), request.num_nodes, more) + more
    job = replace(request, name=name, run_id=plan.run_id)
    return submit_job(bring_run(plan, run_dir, job, 0.0), run_dir, DIALECT)
