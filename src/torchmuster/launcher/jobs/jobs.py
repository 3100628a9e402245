"""A run's jobs at a scheduler: submit, ask about them, end those that can never start, cancel."""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.links import Links
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import report_of_error
from torchmuster.core.model.verdict import Report, Result
from torchmuster.core.owner.create import failed_before_start
from torchmuster.core.owner.record import read_result
from torchmuster.errors import MusterError
from torchmuster.launcher.engines import base
from torchmuster.launcher.engines.registry import dialect_of_record, load_dialect
from torchmuster.launcher.engines.sites import job_of_site
from torchmuster.launcher.engines.wait_reasons import WaitReasons, reasons_of
from torchmuster.launcher.files import code_copy
from torchmuster.launcher.jobs.answers import Ask, JobStatusCache, ask_scheduler, find_node_loss
from torchmuster.launcher.jobs.succession import ConductOptions
from torchmuster.launcher.model.job import AfterKind, JobDependency, JobRequest, JobState, JobView

if TYPE_CHECKING:
    from torchmuster.core.spec.launch import JobLimits, RunRequest
    from torchmuster.launcher.spec.site import Site

COMMAND_TIMEOUT_S = 30.0
_SLOW_BYTES_PER_S = 50_000  # of the connection that carries a manifest both ways
_NOT_OWNED = "{name} does not own its Secret: muster removes both, but `kubectl delete` of the one would leave the other"
_STAYS = "what was made of {name} before it was refused may stay on the cluster"
Say = Callable[[str], None]


_CONDUCT = "conduct"  # the program in a job's script
# Waits poll files ten times a second, but all users share a scheduler.
_STATUS_CACHE = JobStatusCache()


class JobRefusedError(MusterError):
    """The scheduler refused the job."""

    exit_code = 14


def make_job(
    plan: RunPlan, run_dir: RunDir, site: "Site", request: "RunRequest", limits: "JobLimits"
) -> JobRequest:
    """Return the job that conducts a run: the site's values, overridden by the request's."""
    job = job_of_site(site)
    node = job.chunks[0]
    warn_s = (job.warn_s or 0.0) if limits.warn_s is None else limits.warn_s
    num_more = num_resubmits(site, request)
    words = ConductOptions(
        run_dir=run_dir.path,
        engine=site.kind,
        way=",".join(site.start_with) or None,
        warn=warn_s,
        submitted_from=os.uname().machine,
        resubmit=num_more,
        resubmit_with=site.resubmit_with if num_more else None,
    )
    node = replace(
        node,
        num_nodes=plan.num_places,
        cpus=request.cpus_per_node or node.cpus,
        workers=max(plan.num_workers(place) for place in range(plan.max_nodes)),
        gpus=request.gpus_per_node or node.gpus,
        memory_bytes=limits.memory_bytes,
    )
    return replace(
        job,
        name=short_id(plan.run_id),  # `squeue` and `qstat` show its first letters
        chunks=(node,),
        head=(base.PYTHON, proc.NODE_ENTRY, _CONDUCT, *codec.to_arguments(words)),
        about="The head of the run: it starts an agent on every node, restarts processes that die, writes the result.",
        log_path=run_dir.job_log,
        python=sys.executable,
        min_nodes=plan.min_nodes if plan.is_elastic else None,
        outlives_nodes=plan.is_elastic or plan.spares > 0,
        max_nodes=plan.max_nodes if plan.is_elastic else None,
        time_limit_s=limits.time_limit_s or job.time_limit_s,
        queue=request.queue or job.queue,
        account=request.account or job.account,
        package_copy=run_dir.package_copy,
        warn_s=None,  # the head watches the end of its time itself
    )


def num_resubmits(site: "Site", request: "RunRequest") -> int:
    """Return how many more jobs may continue the run."""
    return (site.resubmit or 0) if request.resubmit is None else request.resubmit


def submit_job(
    job: JobRequest, run_dir: RunDir, dialect: base.Dialect, say: Say = lambda _: None
) -> str:
    """Submit the job of a run; record and return its id. Notes for the user go to `say`.

    Raises:
        JobRefusedError: The scheduler refused it.
        EngineError: The scheduler's answer can't be understood.
    """
    noted = {"engine": dialect.name, "request": codec.to_plain(job)}  # for `muster restart`
    try:
        job_id = submit_script(job, run_dir.job_script, dialect, say)
    except MusterError:
        atomic.write_json(run_dir.job, noted)  # `muster restart` then submits it again
        raise
    atomic.write_json(run_dir.job, {**noted, "job_id": job_id})
    return job_id


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """The job that an earlier run requested from its scheduler.

    Attributes:
        num_more: Number of further jobs in its chain.
    """

    dialect: base.Dialect
    request: JobRequest
    num_more: int

    def renamed(self, run_dir: RunDir) -> JobRequest:
        """Return the request for a new run, without the files that the old one brought along."""
        head = self.request.head
        if _CONDUCT in head:  # pods have no such command line
            at = head.index(_CONDUCT) + 1
            words = replace(codec.from_arguments(ConductOptions, head[at:]), run_dir=run_dir.path)
            head = (*head[:at], *codec.to_arguments(words))
        return replace(
            self.request,
            name=short_id(os.path.basename(run_dir.path)),
            head=head,
            log_path=run_dir.job_log,
            package_copy=run_dir.package_copy,
            brings=(),
        )


def read_request(old: RunDir) -> RecordedRequest:
    """Return the job that the run in `old` requested from its scheduler.

    Raises:
        MusterError: The record has no request, because an older muster submitted the run.
    """
    plain = atomic.read_json(old.job)
    noted = plain if isinstance(plain, dict) else {}
    try:
        request = codec.from_plain(JobRequest, noted.get("request"))
    except codec.CodecError as error:
        raise MusterError(
            "the run's record does not contain its scheduler options",
            where=old.job,
            why=str(error),
            fix=f"type its command again; its snapshots are in {old.snapshots}",
        ) from error
    chain = noted.get("chain")
    num_more = len(chain) if isinstance(chain, list) else 0
    dialect = load_dialect(str(noted.get("engine")))
    return RecordedRequest(dialect=dialect, request=request, num_more=num_more)


def cancelled_before_start(run_dir: RunDir) -> Result:
    """Return the result of a run that the user cancelled before it started."""
    report = Report(error="the run was stopped", because=("you cancelled it",))
    result = failed_before_start(run_dir, 128 + signal.SIGINT, report)
    return replace(result, state=RunState.CANCELLED)


@contextlib.contextmanager
def note_refusal(run_dir: RunDir) -> Iterator[None]:
    """Record the error of a refused submission as the run's result, so that it isn't lost."""
    try:
        yield
    except MusterError as error:
        result = failed_before_start(run_dir, error.exit_code, report_of_error(error))
        atomic.write_json(run_dir.result, codec.to_plain(result))
        raise


def submit_chain(
    job: JobRequest, run_dir: RunDir, dialect: base.Dialect, num_more: int
) -> tuple[list[str], MusterError | None]:
    """Submit further jobs of a run, each waiting for the one before; record the accepted ones.

    Returns the accepted jobs, and the error if one was refused.
    """
    plain = atomic.read_json(run_dir.job)
    ids = [plain["job_id"]]
    for _ in range(num_more):
        after = (JobDependency(job_id=ids[-1], kind=AfterKind.ANY),)
        try:
            ids.append(submit_script(replace(job, after=after), run_dir.job_script, dialect))
        except MusterError as error:
            return ids[1:], error
        atomic.write_json(run_dir.job, {**plain, "chain": ids[1:]})
    return ids[1:], None


def submit_script(
    job: JobRequest, path: str, dialect: base.Dialect, say: Say = lambda _: None
) -> str:
    """Write a job's script to `path`, submit it, and return the job's id. `say` gets notes on it.

    Raises:
        JobRefusedError: The scheduler refused it.
        EngineError: The scheduler's answer can't be understood.
    """
    if job.package_copy is not None:
        code_copy.place_package(f"{job.package_copy}.zip")
    objects = base.object_dialect(dialect)
    text = dialect.script(job) if objects is None else objects.with_files(job, read_files(job))
    atomic.replace_file(path, text.encode(), mode=0o700)
    argv = dialect.submit_argv(job, path)
    answer = _ask(dialect, argv, COMMAND_TIMEOUT_S + len(text) / _SLOW_BYTES_PER_S)
    if objects is not None:
        _settle(objects, job, path, answer, say)
    if answer.status != 0:
        report = dialect.explain_refusal(answer.stderr.decode(errors="replace"))
        why = "\n".join(report.because)
        raise JobRefusedError(report.error, where=" ".join(argv), why=why, fix=report.hint)
    return dialect.job_id(answer.stdout.decode(errors="replace"))


def read_files(job: JobRequest) -> dict[str, bytes]:
    """Return the files that the pods of a job bring along.

    Raises:
        OSError: A file can't be read.
    """
    files: dict[str, bytes] = {}
    for name, path in job.brings:
        with open(path, "rb") as file:
            files[name] = file.read()
    return files


def _settle(
    dialect: base.ObjectDialect, job: JobRequest, path: str, answer: proc.CommandOutput, say: Say
) -> None:
    """Run the commands that follow a submission; rewrite the script without the key it carried."""
    stdout = answer.stdout.decode(errors="replace") if answer.status == 0 else None
    without_key = dialect.script(job)
    num_objects = len(json.loads(without_key)["items"])
    # An object that exists belongs to another job and must stay. A forbidden object was never
    # created.
    is_clean = (
        b"AlreadyExists" in answer.stderr or answer.stderr.count(b"(Forbidden)") == num_objects
    )
    for argv in dialect.settle_argv(job, stdout) if stdout is not None or not is_clean else []:
        try:
            said = _ask(dialect, argv)
        except MusterError:
            continue
        if said.status != 0:
            report = dialect.explain_refusal(said.stderr.decode(errors="replace"))
            stays = _STAYS if stdout is None else _NOT_OWNED
            say(f"{stays.format(name=job.name)}: {report.error} ({report.hint})")
    atomic.replace_file(path, without_key.encode(), mode=0o700)


def _ask(
    dialect: base.Dialect, argv: Sequence[str], limit_s: float = COMMAND_TIMEOUT_S
) -> proc.CommandOutput:
    """Run a command of the scheduler.

    Raises:
        EngineError: This machine does not have it.
    """
    if shutil.which(argv[0]) is None:
        raise base.EngineError(
            f"this machine has no `{argv[0]}`",
            where=" ".join(argv),
            why=f"jobs of {dialect.name} are handled by its own commands, and this one is not on PATH",
            fix=f"type it on a login node of the cluster; `muster engines check {dialect.name}` looks for all of them",
        )
    return proc.ask(argv, b"", limit_s)


def read_jobs(run_dir: RunDir) -> tuple[base.Dialect, dict[str, str]] | None:
    """Return the dialect, and the job of each group of a workflow; None if it has no jobs."""
    plain = atomic.read_json(run_dir.jobs)
    if not isinstance(plain, dict) or not isinstance(plain.get("jobs"), dict):
        return None
    jobs = {str(group): str(job_id) for group, job_id in plain["jobs"].items()}
    return dialect_of_record(str(plain.get("engine"))), jobs


def read_job(run_dir: RunDir) -> tuple[base.Dialect, str] | None:
    """Return the dialect and id of the job that conducts a run now; None if the run is not a job.

    The client records the first job, the head of each link the next one.
    """
    plain = atomic.read_json(run_dir.job)
    if not isinstance(plain, dict) or not isinstance(plain.get("job_id"), str):
        return None
    noted = atomic.read_json(run_dir.links)  # not decoded: another version's says this much too
    links = noted.get("links") if isinstance(noted, dict) else None
    newest = links[-1] if isinstance(links, list) and links else None
    job_id = newest.get("job_id", plain["job_id"]) if isinstance(newest, dict) else plain["job_id"]
    return dialect_of_record(str(plain.get("engine"))), str(job_id)


def view_jobs(dialect: base.Dialect, job_ids: Sequence[str]) -> dict[str, JobView]:
    """Return the scheduler's views of jobs, at first at most 2 s old, then up to 30 s."""
    return _STATUS_CACHE.views(dialect, job_ids)


def forget_views() -> None:
    """Ask schedulers again next time, because something has changed."""
    _STATUS_CACHE.forget()


def mark_views_stale(dialect: base.Dialect, job_ids: Sequence[str], since: float) -> None:
    """Ask a scheduler again about jobs with news from `since` (monotonic clock)."""
    _STATUS_CACHE.doubt(dialect, job_ids, since)


def cancel_job(dialect: base.Dialect, job_id: str) -> None:
    """Ask the scheduler to end a job.

    Raises:
        EngineError: The scheduler refused.
    """
    argv = dialect.cancel_argv(job_id)
    _STATUS_CACHE.forget()
    answer = _ask(dialect, argv)
    if answer.status != 0:
        why = answer.stderr.decode(errors="replace").strip() or None
        known: Sequence[base.Refusal] = getattr(dialect, "refusals", ())
        hints = (one.hint for one in known if re.search(one.pattern, why or "", re.IGNORECASE))
        what = f"job {job_id} can't be cancelled"
        raise base.EngineError(what, where=" ".join(argv), why=why, fix=next(hints, None))


# A run's past, current and further jobs, as recorded by the client and the heads of its links. The
# client writes `job.json` and `cancelled.json`, the head of the newest link `links.json`.

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


def all_jobs(run_dir: RunDir) -> tuple[base.Dialect, tuple[str, ...]] | None:
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
    if view is None and base.object_dialect(dialect) is not None:
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
    question: base.NodeQuestion | None = getattr(dialect, "lost_node", None)
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


def open_jobs(run_dir: RunDir) -> tuple[base.Dialect, tuple[str, ...]] | None:
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
    now = read_links(run_dir)
    if now is None or now.newest != links.newest:
        return None  # the next link was recorded while the scheduler was asked about this one
    result = read_result(run_dir)  # the head may have written it just now
    is_preempted = result is not None and result.state is RunState.PREEMPTED
    return None if is_preempted and now.ended is None and is_cancelled(run_dir) else result


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


def _cancel_all(run_dir: RunDir, dialect: base.Dialect, job_ids: Sequence[str]) -> bool:
    if base.object_dialect(dialect) is not None:
        from torchmuster.launcher.views.elsewhere import elsewhere

        return elsewhere().cancel_run(run_dir)
    newest = read_job(run_dir)
    for job_id in reversed(job_ids):
        try:
            cancel_job(dialect, job_id)
        except MusterError:  # another one has ended, or follows the one that ends now
            if newest is not None and job_id == newest[1]:
                raise
    return True


# Jobs that can never start. A scheduler accepts such a job and shows its reason for ever. Commands
# that wait for the job end it; `status` and `ps` only report it.

# A scheduler may say so while nodes are added or a partition changes: it must still say so after
# this time.
MIN_PERSIST_S = 5.0
WAITS = frozenset({JobState.PENDING, JobState.HELD})


@dataclass(slots=True)
class NeverStartsWatch:
    """Detects jobs that can never start; asks the scheduler once per job and reason."""

    ask: Ask = ask_scheduler
    clock: Callable[[], float] = time.monotonic
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    _looked_at: set[tuple[str, str]] = field(default_factory=set)

    def judge(self, view: JobView | None, dialect: base.Dialect) -> Report | None:
        """Return a report on a job that can't start, however long it waits; None while it may."""
        reasons = reasons_of(dialect)
        wait = view.wait if view is not None else None
        if view is None or reasons is None or wait is None or view.state not in WAITS:
            return None
        patience_s = MIN_PERSIST_S if wait.patience_s is None else wait.patience_s
        if not (wait.never or wait.may_be_never or wait.patience_s):
            return None
        # Not keyed by the reason's text: it changes when a second pod has the same problem.
        key = (view.job_id, wait.sentence)
        if self.clock() - self._since.setdefault(key, self.clock()) < patience_s:
            return None
        if key in self._looked_at:
            return None
        self._looked_at.add(key)
        has = self._shortage(reasons, view.job_id)
        if not (wait.never or wait.patience_s) and has is None:
            return None  # perhaps nodes are only down
        at = f"job {view.job_id} of {dialect.name}"
        if not wait.never and has is None:
            words = f"{dialect.name} says for {patience_s:.0f} s: {view.reason}"
            error = f"job {view.job_id} does not start: {wait.sentence}"
            return Report(error=error, at=at, because=(words,), hint=wait.hint)
        words = f"{dialect.name} says: {view.reason}"
        return Report(
            error=f"job {view.job_id} can never start: {wait.sentence}",
            at=at,
            because=(has, words) if has is not None else (words,),
            hint=wait.hint,
        )

    def _shortage(self, reasons: WaitReasons, job_id: str) -> str | None:
        answers: list[str] = []
        for argv in reasons.capacity_argv(job_id):
            try:
                answers.append(self.ask(argv).stdout.decode(errors="replace"))
            except MusterError:
                return None
        return reasons.shortage(answers)

    def cancel_if_hopeless(self, run_dir: RunDir) -> None:
        """Cancel a run's job if it can never start, and record the reason as the run's result."""
        job = read_job(run_dir)
        report = self.judge(view_newest(run_dir), job[0]) if job is not None else None
        if report is None or read_result(run_dir) is not None:
            return
        # The verdict is valid even if the scheduler is silent.
        with contextlib.suppress(MusterError):
            cancel_jobs(run_dir)
        result = failed_before_start(run_dir, base.EngineError.exit_code, report)
        atomic.write_json(run_dir.result, codec.to_plain(result))
