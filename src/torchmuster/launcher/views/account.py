"""A run in brief, even long after its end: where it ran, how long, how it ended, what is left."""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, near, short_id
from torchmuster.core.model import contract
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import in_one_line
from torchmuster.core.model.verdict import Result
from torchmuster.core.owner import record
from torchmuster.errors import MissingRecordError
from torchmuster.launcher.views.elsewhere import elsewhere, is_elsewhere

if TYPE_CHECKING:  # a run that succeeds needs none of it at its end
    from torchmuster.launcher.views.run_view import RunView

_STEP = re.compile(r"step-(\d{9,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A run in brief.

    Attributes:
        engine: Where it was sent: `local`, `slurm`, the name of an ssh site.
        jobs: Its jobs, the newest last; those of a workflow in the order of its groups.
        submitted: Time of submission, seconds since 1970.
        elapsed_s: From its first sign of life to its end, or to now; None while it waits in a
            queue.
        exit_code: None while it has none.
        ended_by: What ended it, in one sentence; None for a success and while it runs.
        notifiers: Who sends notices to whom (`--notify`), a line for each process that does.
    """

    engine: str
    jobs: tuple[str, ...]
    submitted: float
    elapsed_s: float | None
    exit_code: int | None
    ended_by: str | None
    notifiers: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """`slurm 17`, or only the engine where there is no job."""
        more = f" +{len(self.jobs) - 1}" if len(self.jobs) > 1 else ""
        return f"{self.engine} {self.jobs[-1]}{more}" if self.jobs else self.engine


def account_of(view: "RunView", now: float) -> Account:
    """Summarize a run; `now` is in seconds since 1970."""
    engine, jobs = _place(view)
    return Account(
        engine=engine,
        jobs=jobs,
        submitted=view.submitted,
        elapsed_s=_elapsed_s(view, now),
        exit_code=view.result.exit_code if view.result is not None else None,
        ended_by=_ended_by(view),
        notifiers=tuple(_describe_notifiers(view.run_dir)),
    )


def _describe_notifiers(run_dir: RunDir) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(run_dir.notifiers)):
            plain = atomic.read_json(os.path.join(run_dir.notifiers, name))
            with contextlib.suppress(LookupError, TypeError):  # half written
                for one in plain["receivers"]:
                    waits = f", {one['waiting']} waiting" if one["waiting"] else ""
                    why = f": {in_one_line(str(one['why']))}" if one["why"] else ""
                    to = in_one_line(str(one["to"]))
                    yield f"{plain['host']} to {to}: {one['sent']} sent{waits}{why}"


def _place(view: "RunView") -> tuple[str, tuple[str, ...]]:
    from torchmuster.launcher.views.find import read_jobs_of

    submitted = read_jobs_of(view.run_dir)
    if submitted is not None:
        return submitted
    job_id = view.plan.job_id if view.plan is not None else None
    return view.place, (job_id,) if job_id is not None else ()


def _elapsed_s(view: "RunView", now: float) -> float | None:
    times = [time for path in view.records() for time in record.ends_of(path)]
    if (
        view.result is None
        and not times
        and (began := record.changed_at(view.run_dir.arrays)) is not None
    ):
        return max(0.0, now - began)  # an array has no owner that could write a record
    if not times:
        return view.result.elapsed_s if view.result is not None else None
    if not view.state.is_final:
        return max(0.0, now - min(times))
    return max(max(times) - min(times), view.result.elapsed_s if view.result is not None else 0.0)


def whole(result: Result, run_dir: RunDir) -> Result:
    """Extend a result's time to the whole run; else it covers its link or last head only."""
    return replace(result, elapsed_s=max(result.elapsed_s, record.recorded_seconds(run_dir.events)))


def _ended_by(view: "RunView") -> str | None:
    result = view.result
    if view.state is RunState.SUCCEEDED or not view.state.is_final:
        return None
    if result is not None and result.report is not None:
        return result.report.error
    if result is not None:
        if view.state is RunState.CANCELLED and result.exit_code > 128:
            return f"the {view.kind.value} was stopped with {contract.signal_name(result.exit_code - 128)}"
        return f"exit code {result.exit_code}"
    if (damage := record.damage_of_result(view.run_dir)) is not None:
        return damage
    from torchmuster.launcher.views.find import view_job

    job = view_job(view.run_dir) if os.path.isfile(view.run_dir.job) else None
    if job is not None:
        return f"job {job.job_id} left no result: it is {job.state.value.replace('_', ' ')}"
    return "its owner process has ended without a result"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The snapshots that the training library has left of a run.

    Attributes:
        step: Step of the newest snapshot; None when there is none.
        folder: Folder of the snapshots: a path or a URL.
        is_seen: Whether a restart from here finds them.
        went: Whether they were on the disks of pods, which are gone.
    """

    step: int | None
    folder: str
    is_seen: bool
    went: bool = False


def find_saved(run_dir: RunDir) -> Saved | None:
    """Return what a run has saved; None if its script shows no use of the library's snapshots.

    The record names the folder, which the script may choose; the folder shows which snapshot is the
    newest.
    """
    if not os.path.exists(run_dir.training) and not os.path.exists(run_dir.snapshots):
        return None
    from torchmuster.launcher.views.training import TrainingReader

    training = TrainingReader(run_dir).read()
    folder = training.folder or run_dir.snapshots
    recorded = training.saved[0] if training.saved is not None else None
    if "://" in folder:  # a restart checks there
        return Saved(step=recorded, folder=folder, is_seen=True)
    step = None if _is_of_a_host(run_dir, folder) else last_step(folder)
    if step is not None:
        return Saved(step=step, folder=folder, is_seen=True)
    kept = elsewhere().kept(run_dir) if is_elsewhere(run_dir) else None
    by_pods = kept is not None and folder.startswith(f"{kept.home}/")
    on_volume = kept is not None and kept.outlives
    if recorded is not None and by_pods and on_volume:
        return Saved(step=recorded, folder=folder, is_seen=True)  # by the pods of a restart
    if not training.num_events:
        return None
    # Snapshots that are missing here were removed, or are on a disk of another host.
    went = by_pods and not on_volume
    return Saved(step=recorded, folder=folder, is_seen=recorded is None, went=went)


def _is_of_a_host(run_dir: RunDir, folder: str) -> bool:
    """Return whether the snapshots are in another host's own run directory, visible or not."""
    own = run_dir.snapshots
    of_run = folder.split(os.sep)[-2:] == own.split(os.sep)[-2:]
    return of_run and os.path.realpath(folder) != os.path.realpath(own)


def how_to_go_on(run_dir: RunDir, result: Result | None = None) -> str | None:
    """Return what an unsuccessful run has saved and how to continue it; None if neither is known.

    The one sentence for all ends: a requested stop, a failure, and a run whose owner was killed.
    """
    found = _going_on(run_dir, result)
    return _sentence(*found) if found is not None else None


def _going_on(
    run_dir: RunDir, result: Result | None
) -> tuple[Saved | None, int | None, str | None] | None:
    """Return what is saved, the step of the stop, and the command that continues; None as above."""
    plan = record.read_plan(run_dir)
    if plan is not None and plan.is_replay:
        return None
    kept = result or record.read_result(run_dir)
    if kept is not None and (
        kept.exit_code == MissingRecordError.exit_code or _found_none_good(kept)
    ):
        return None  # it may have succeeded, or has snapshots: what to do is in its report
    saved = find_saved(run_dir)
    stopped_at = result.trained_step if result is not None else None
    reported = result.saved_step if result is not None else None  # from the library, as it stopped
    if reported is not None and (saved is None or saved.step is None):  # the record is not here
        there = elsewhere().kept(run_dir) if is_elsewhere(run_dir) else None
        went = there is not None and not there.outlives
        saved = Saved(step=reported, folder=run_dir.snapshots, is_seen=False, went=went)
    if saved is None and stopped_at is None:
        return None
    # Not a run that a sweep has given up, nor that of `muster torchrun` on several machines.
    is_given_up = kept is not None and kept.state is RunState.STOPPED
    if plan is None or plan.is_of_many_commands or is_given_up:
        return saved, stopped_at, None
    again = f"muster restart {short_id(os.path.basename(run_dir.path))}"
    return saved, stopped_at, again


def next_command(run_dir: RunDir, run_id: str) -> str | None:
    """Return what to type after the end of a run; None if it never started: its hint says that."""
    result = record.read_result(run_dir)
    if result is not None and result.attempts == 0 and result.state is RunState.FAILED:
        return None
    has_stopped = result is not None and result.state in (RunState.PREEMPTED, RunState.CANCELLED)
    if has_stopped and (found := _going_on(run_dir, result)) is not None:
        saved, _, again = found
        is_there = saved is None or saved.step is None or (saved.is_seen and not saved.went)
        if again is not None and is_there:
            return again
    return f"muster report {short_id(run_id)}"


def answer_of(run_dir: RunDir) -> dict[str, Any]:
    """Return what `--json` prints last: the end of a run, why, and what to type next."""
    from torchmuster.launcher.views.find import view_run

    view = view_run(run_dir)
    result, saved = view.result, find_saved(run_dir)
    report = result.report if result is not None else None
    cause = result.cause if result is not None else None
    alive = f"muster wait {short_id(view.run_id)}"
    all_logs = (run_dir.logs, os.path.join(run_dir.path, "logs"))  # of a workflow, by task
    return {
        "id": view.run_id,
        "kind": view.kind.value,
        "state": view.state.value,
        "attempts": result.attempts if result is not None else len(view.record.attempts),
        "elapsed_s": result.elapsed_s if result is not None else None,
        "cause": report.error if report is not None else None,
        "at": report.at if report is not None else None,
        "rank": cause.rank if cause is not None and cause.rank >= 0 else None,
        "node": cause.node if cause is not None else None,
        "because": list(report.because[:40]) if report is not None else [],
        "hint": report.hint if report is not None else None,
        "more": list(report.more) if report is not None else [],
        "step": result.trained_step if result is not None else None,
        "saved_step": saved.step if saved is not None else None,
        "paths": {
            "run": run_dir.path,
            "logs": next((path for path in all_logs if os.path.isdir(path)), None),
            "snapshots": saved.folder if saved is not None else None,
            "report": run_dir.report if os.path.exists(run_dir.report) else None,
        },
        "next": next_command(run_dir, view.run_id) if view.state.is_final else alive,
    }


def _found_none_good(result: Result) -> bool:
    """Return whether damaged snapshots ended the run: they would end a restart, too."""
    error = result.cause.error if result.cause is not None else None
    return error is not None and error.type_name.rpartition(".")[2] == "NoGoodSnapshotError"


def _sentence(saved: Saved | None, stopped_at: int | None, again: str | None) -> str:
    if saved is None or saved.step is None:
        what = f"stopped at step {stopped_at}, " if stopped_at is not None else ""
        return f"{what}nothing was saved" + (f": {again} begins at step 0" if again else "")
    what = f"saved at step {saved.step}"
    if stopped_at is not None and saved.step < stopped_at:
        what = f"stopped at step {stopped_at}, the last snapshot is of step {saved.step}"
    if saved.went:
        return f"{what}, on the disk of a pod, and went with it: `claims` and `home` of the site keep snapshots"
    if not saved.is_seen:
        return f"{what}; its snapshots can't be seen from here: {saved.folder}"
    return what + (f"; continue with: {again}" if again else "")


def describe_results(run_dir: RunDir) -> str:
    """Describe where the results of a run are: its snapshots, if any, and its logs."""
    parts = []
    plan = record.read_plan(run_dir)
    saved = find_saved(run_dir) if plan is None or not plan.is_replay else None
    if saved is not None and saved.step is not None:
        place = saved.folder if "://" in saved.folder else near(saved.folder)
        unseen = "" if saved.is_seen else " (not visible from here)"
        unseen = " (went with the pods)" if saved.went else unseen
        parts.append(f"snapshots in {place}{unseen}, the last at step {saved.step}")
    parts.append(f"logs in {near(run_dir.logs)}")
    return "; ".join(parts)


def last_step(folder: str) -> int | None:
    """Return the step of the newest snapshot in a folder; None if it has none or isn't here."""
    try:
        found = [_STEP.fullmatch(name) for name in os.listdir(folder)]
    except OSError:
        return None
    return max((int(match.group(1)) for match in found if match), default=None)
