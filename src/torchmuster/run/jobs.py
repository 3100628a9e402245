"""Submit jobs, ask for them, end them: the one module that runs a scheduler's commands."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster import proc
from torchmuster.engines.base import PYTHON, Dialect, EngineError
from torchmuster.engines.registry import load_dialect
from torchmuster.errors import MusterError
from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.model.job import JobRequest, JobState, JobView, NodeChunk
from torchmuster.model.plan import RunPlan

COMMAND_TIMEOUT_S = 30.0
ASK_EVERY_S = 2.0  # waits look at files ten times a second; a scheduler is everybody's
_answers: dict[tuple[str, tuple[str, ...]], tuple[float, dict[str, JobView]]] = {}


class JobRefusedError(MusterError):
    """The scheduler did not take the job."""

    exit_code = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWishes:
    """What a run asks of a scheduler beside its nodes and workers."""

    queue: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time_limit_s: float | None = None
    cpus_per_node: int | None = None
    gpus_per_node: int = 0
    memory_bytes: int | None = None
    directives: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    extra: tuple[tuple[str, str], ...] = ()
    warn_s: float = 120.0
    way: str | None = None


def make_job(plan: RunPlan, run_dir: RunDir, engine: str, wishes: JobWishes) -> JobRequest:
    """Return the job that conducts a run."""
    conduct = os.path.join(os.path.dirname(os.path.abspath(__file__)), "conduct.py")
    head = [PYTHON, conduct, run_dir.path, "--engine", engine]
    head += ["--warn", f"{wishes.warn_s:g}"]
    head += ["--way", wishes.way] if wishes.way is not None else []
    chunk = NodeChunk(
        num_nodes=plan.max_nodes,
        cpus=wishes.cpus_per_node,
        gpus=wishes.gpus_per_node,
        memory_bytes=wishes.memory_bytes,
        extra=wishes.extra,
    )
    return JobRequest(
        name=plan.run_id,
        chunks=(chunk,),
        head=tuple(head),
        about="The head of the run: it starts an agent on every node, restarts what dies, leaves the result.",
        log_path=run_dir.job_log,
        python=sys.executable,
        min_nodes=plan.min_nodes if plan.is_elastic else None,
        max_nodes=plan.max_nodes if plan.is_elastic else None,
        time_limit_s=wishes.time_limit_s,
        queue=wishes.queue,
        account=wishes.account,
        qos=wishes.qos,
        constraint=wishes.constraint,
        directives=wishes.directives,
        setup=wishes.setup,
        warn_s=None,  # the head knows the end of its time by itself
    )


def submit_job(job: JobRequest, run_dir: RunDir, dialect: Dialect) -> str:
    """Write the script of a run, submit it, record and return the job's id.

    Raises:
        JobRefusedError: The scheduler refused it.
        EngineError: Its answer can't be understood.
    """
    job_id = submit_script(job, run_dir.job_script, dialect)
    atomic.write_json(run_dir.job, {"engine": dialect.name, "job_id": job_id})
    return job_id


def submit_script(job: JobRequest, path: str, dialect: Dialect) -> str:
    """Write a job's script to `path` and submit it; return the job's id.

    Raises:
        JobRefusedError: The scheduler refused it.
        EngineError: Its answer can't be understood.
    """
    with open(path, "w") as file:
        file.write(dialect.script(job))
    os.chmod(path, 0o700)
    argv = dialect.submit_argv(job, path)
    answer = proc.ask(argv, b"", COMMAND_TIMEOUT_S)
    if answer.status != 0:
        report = dialect.explain_refusal(answer.stderr.decode(errors="replace"))
        why = "\n".join(report.because)
        raise JobRefusedError(report.error, where=" ".join(argv), why=why, fix=report.hint)
    return dialect.job_id(answer.stdout.decode(errors="replace"))


def read_jobs(run_dir: RunDir) -> tuple[Dialect, dict[str, str]] | None:
    """Return the dialect and the job of each group of a workflow; None when it has no jobs."""
    plain = atomic.read_json(run_dir.jobs)
    if not isinstance(plain, dict) or not isinstance(plain.get("jobs"), dict):
        return None
    jobs = {str(group): str(job_id) for group, job_id in plain["jobs"].items()}
    return load_dialect(str(plain.get("engine"))), jobs


def read_job(run_dir: RunDir) -> tuple[Dialect, str] | None:
    """Return the dialect and the id of the job that conducts a run; None when it is no job."""
    plain = atomic.read_json(run_dir.job)
    if not isinstance(plain, dict) or not isinstance(plain.get("job_id"), str):
        return None
    return load_dialect(str(plain.get("engine"))), plain["job_id"]


def view_jobs(dialect: Dialect, job_ids: Sequence[str]) -> dict[str, JobView]:
    """Return what the scheduler says of jobs; an answer serves for 2 s, however often somebody looks."""
    key = (dialect.name, tuple(job_ids))
    asked_at, views = _answers.get(key, (float("-inf"), {}))
    if time.monotonic() - asked_at >= ASK_EVERY_S:
        views = _ask(dialect, job_ids)
        _answers[key] = (time.monotonic(), views)
    return views


def _ask(dialect: Dialect, job_ids: Sequence[str]) -> dict[str, JobView]:
    """Run one command, more only where one is not there or knows too little."""
    found: dict[str, JobView] = {}
    for argv in dialect.status_argv(job_ids):
        try:
            answer = proc.ask(argv, b"", COMMAND_TIMEOUT_S)
        except MusterError:
            continue  # a site without sacct
        if answer.status == 0:
            try:
                views = dialect.views(answer.stdout.decode(errors="replace"))
            except EngineError:
                continue
            for job_id, view in views.items():
                known = found.get(job_id)
                if known is None or known.state is JobState.UNKNOWN:
                    found[job_id] = view
        if all(job_id in found for job_id in job_ids):
            break
    return found


def cancel_job(dialect: Dialect, job_id: str) -> None:
    """Ask the scheduler to end a job.

    Raises:
        EngineError: It refused.
    """
    argv = dialect.cancel_argv(job_id)
    answer = proc.ask(argv, b"", COMMAND_TIMEOUT_S)
    if answer.status != 0:
        why = answer.stderr.decode(errors="replace").strip() or None
        raise EngineError(f"job {job_id} can't be cancelled", where=" ".join(argv), why=why)


def describe_job(view: JobView) -> str:
    """Return a sentence on where a job stands, with the scheduler's own reason."""
    text = f"job {view.job_id} is {view.state.value.replace('_', ' ')}"
    if view.reason is not None:
        text += f" ({view.reason})"
    if view.start_estimate is not None:
        text += f", expected to start {view.start_estimate}"
    if view.nodes:
        names = ", ".join(view.nodes[:8]) + (", ..." if len(view.nodes) > 8 else "")
        text += f" on {names}"
    return text
