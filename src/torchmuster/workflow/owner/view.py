"""The state of a workflow, read from the records of its owner and of its groups' heads."""

import contextlib
import graphlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import Kind, RunDir, near, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.plan import GRACE_S
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import did_you_mean, few_of
from torchmuster.core.model.verdict import Result
from torchmuster.core.owner.record import changed_at, read_events, recorded_seconds
from torchmuster.errors import MusterError, NotFoundError, UsageError
from torchmuster.launcher.model.job import JobState, JobView, describe_job
from torchmuster.launcher.model.live import LiveTask
from torchmuster.launcher.model.run import RunRecord
from torchmuster.launcher.views.elsewhere import elsewhere, is_elsewhere
from torchmuster.launcher.views.run_view import RunView
from torchmuster.launcher.views.training import newest_training
from torchmuster.workflow.plan import GroupPlan, WorkflowPlan
from torchmuster.workflow.record import (
    DatasetVersionEvent,
    GroupStateEvent,
    GroupWaitsEvent,
    State,
    TaskStartedEvent,
    TaskStateEvent,
    WorkflowResult,
    read_outcome,
    state_of_job,
    workflow_state,
)

_NEXT_GROUP_S = 30.0  # maximum gap between two groups of a workflow on a cluster
_LOST_REASON = "it had not ended when its owner was killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskView:
    """The state of one task."""

    name: str
    group: str
    state: State
    attempt: int = 0
    why: str | None = None
    code: int | None = None
    started: str | None = None
    is_lead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """The state of one group."""

    name: str
    state: State
    why: str | None
    tasks: tuple[TaskView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowView:
    """The state of a workflow and of its groups.

    Attributes:
        is_elsewhere: Whether its owner is on another machine, so that only its jobs are visible
            here.
    """

    plan: WorkflowPlan
    state: RunState
    groups: tuple[GroupView, ...]
    result: WorkflowResult | None
    is_elsewhere: bool = False

    def finished_groups(self) -> list[str]:
        """Return the completed groups, which need not run again."""
        return [group.name for group in self.groups if group.state is State.COMPLETED]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowRun(RunView):
    """A run of `muster submit`; `workflow` is None if its plan can't be read."""

    kind: ClassVar[Kind] = Kind.WORKFLOW
    has_ranks: ClassVar[bool] = False
    workflow: WorkflowView | None = None

    @property
    def _groups(self) -> tuple[GroupView, ...]:
        return self.workflow.groups if self.workflow is not None else ()

    @property
    def name(self) -> str:
        """Return `workflow NAME`."""
        return f"workflow {self.workflow.plan.name}" if self.workflow is not None else "workflow"

    @property
    def command(self) -> str:
        """Return the same as `name`."""
        return self.name

    @property
    def size(self) -> str:
        """Return the number of tasks, as text."""
        num_tasks = len(self.task_names)
        return f"{num_tasks} task{'s' if num_tasks != 1 else ''}"

    @property
    def grace_s(self) -> float:
        """Return the time from SIGTERM to SIGKILL of its tasks."""
        return self.workflow.plan.grace_s if self.workflow is not None else GRACE_S

    @property
    def is_readable(self) -> bool:
        """Return True: the kind of the folder is known."""
        return True

    @property
    def plan_problem(self) -> str:
        """Return why its plan is unknown; empty if it is known."""
        return "" if self.workflow is not None else "the plan of the workflow can't be read"

    @property
    def place(self) -> str:
        """Return the site that it was sent to without a job, or `local`."""
        noted = atomic.read_json(self.run_dir.site)
        return str(noted.get("site", "ssh")) if isinstance(noted, dict) else "local"

    def task_logs(self) -> list[tuple[str, list[tuple[int, str]]]]:
        """Return the logs of each task: (attempt, path).

        Raises:
            NotFoundError: The plan can't be read.
        """
        return list(task_logs(self.tasks_view(), self.run_dir))

    def groups_to_enter(self) -> dict[str, tuple[TaskView, ...]]:
        """Return its tasks by group, for commands next to them.

        Raises:
            NotFoundError: The plan can't be read.
            UsageError: The tasks are in containers.
        """
        if self.workflow is None:
            return RunView.groups_to_enter(self)  # `super()` fails, since `slots` makes a new class
        if (container := self.workflow.plan.container) != "none":
            raise UsageError(
                f"the tasks of the run {self.run_id} are in containers",
                why=f"only {container} itself can enter them",
                fix=f"{container} exec -it CONTAINER COMMAND",
            )
        return {group.name: group.tasks for group in self.workflow.groups}

    @property
    def task_names(self) -> list[str]:
        """Return the names of its tasks, in file order."""
        return [task.name for group in self._groups for task in group.tasks]

    def records(self) -> list[str]:
        """Return the records that show how long it took."""
        groups = [self.run_dir.group(group.name).events for group in self._groups]
        records = [self.run_dir.events, *groups]
        if self.state is RunState.LOST:  # no record has its end: use those of its training runs
            plans = self.workflow.plan.groups if self.workflow is not None else ()
            trains = [task.name for group in plans for task in group.tasks if task.training]
            found = (newest_training(self.run_dir, task) for task in trains)
            runs = [RunDir(run).training for run in found if run]
            records += [self.run_dir.training, *runs]
        return records

    def links(self) -> list[str]:
        """Return its folders that may be links into other runs."""
        plan = self.workflow.plan if self.workflow is not None else None
        reused = list(plan.reused.values()) if plan is not None else []
        return [*reused, *(self.run_dir.task_output(name) for name in self.task_names)]

    def parts(self) -> tuple[LiveTask, ...]:
        """Return its tasks for live displays."""
        return tuple(
            LiveTask(
                group=group.name,
                name=task.name,
                state=task.state.value,
                attempt=task.attempt,
                why=task.why or (group.why if not task.state.is_final else None) or "",
                folder=newest_training(self.run_dir, task.name) or "",
                log=self.run_dir.task_log(group.name, task.name, task.attempt),
            )
            for group in self._groups
            for task in group.tasks
        )

    def tasks_view(self) -> WorkflowView:
        """Return the states of its groups and tasks.

        Raises:
            NotFoundError: The plan can't be read.
        """
        if self.workflow is None:
            what = "the plan of the workflow can't be read"
            raise NotFoundError(what, where=self.run_dir.workflow)
        return self.workflow

    def training(self, task: str) -> RunDir | None:
        """Return the run directory of the last training run of a task; None if the plan is unknown.

        Raises:
            NotFoundError: The task has no training run.
        """
        if self.workflow is None:
            return None
        if (training := newest_training(self.run_dir, task)) is None:
            what = f"the workflow {short_id(self.run_id)} has no training of a task `{task}`"
            fix = did_you_mean(task, self.task_names)
            raise NotFoundError(what, where=self.run_dir.path, fix=fix)
        return RunDir(training)


def read_workflow(run_dir: RunDir) -> WorkflowPlan | None:
    """Return the plan of a workflow, or None if there is no readable one."""
    try:
        return codec.from_plain(WorkflowPlan, atomic.read_json(run_dir.workflow))
    except codec.CodecError:
        return None


def read_workflow_result(run_dir: RunDir) -> WorkflowResult | None:
    """Return the result of a workflow, or None if there is no readable one."""
    try:
        return codec.from_plain(WorkflowResult, atomic.read_json(run_dir.result))
    except codec.CodecError:
        return None


def view_job_workflow(run_dir: RunDir, jobs: Mapping[str, JobView]) -> WorkflowView | None:
    """Return the view of a workflow whose groups are jobs, from their records and the scheduler."""
    plan = read_workflow(run_dir)
    if plan is None:
        return None
    views: dict[str, GroupView] = {}
    for group in _upstream_first(plan):
        failed = [name for name in group.after if name in views and views[name].state.is_failed]
        waits = [name for name in group.after if name in views and not views[name].state.is_final]
        state, why = _state_of_job(jobs.get(group.name), failed, waits)
        if group.name in plan.reused:
            state, why = State.COMPLETED, f"taken from {os.path.basename(plan.reused[group.name])}"
        stated = GroupStateEvent(group=group.name, state=state.value, why=why)
        views[group.name] = _view_group(group, run_dir, stated, is_lost=False)
    view = _view_of_groups(plan, run_dir, views, is_lost=False)
    open_jobs = [jobs[g.name] for g in view.groups if g.name in jobs and not g.state.is_final]
    if any(job.state is JobState.UNKNOWN for job in open_jobs) and not view.state.is_final:
        return replace(view, state=RunState.UNKNOWN)
    return view


def view_remote_workflow(
    run_dir: RunDir, jobs: Mapping[str, JobView], begun: frozenset[str], *, is_recent: bool
) -> WorkflowView | None:
    """Return the view of a workflow with its owner elsewhere, which makes groups' jobs in turn.

    Args:
        run_dir: The local copy of its run directory.
        jobs: The cluster's view of the jobs that groups have now.
        begun: The groups that have, or had, a job.
        is_recent: Whether a group had a job a moment ago, so that another may follow.
    """
    plan = read_workflow(run_dir)
    if plan is None:
        return None
    is_cancelled = os.path.exists(run_dir.cancelled)
    in_order = _upstream_first(plan)
    completed: set[str] = set()
    for group in reversed(in_order):
        if group.name in begun or group.name in completed:
            completed.update(group.after)
    views: dict[str, GroupView] = {}
    for group in in_order:
        job = jobs.get(group.name)
        why: str | None
        if group.name in completed:
            state, why = State.COMPLETED, "a group that needs it has begun"
        elif is_cancelled:
            state, why = State.FAILED_CANCELED, "the workflow was cancelled"
        elif job is not None and not job.state.is_final:
            state, why = _state_of_job(job, [], [])
        elif group.name in begun:
            state, why = State.PROCESSING, "its job is over: its end is on the machine of its owner"
        else:
            open_ones = [name for name in group.after if not views[name].state.is_final]
            waits = f"waits for the outputs of {', '.join(open_ones)}"
            state, why = State.WAITING, waits if open_ones else "its owner has not begun it"
        stated = GroupStateEvent(group=group.name, state=state.value, why=why)
        views[group.name] = _view_group(group, run_dir, stated, is_lost=False)
    is_lost = not is_recent and all(job.state.is_final for job in jobs.values())
    return replace(_view_of_groups(plan, run_dir, views, is_lost=is_lost), is_elsewhere=True)


def _view_of_groups(
    plan: WorkflowPlan, run_dir: RunDir, views: Mapping[str, GroupView], *, is_lost: bool
) -> WorkflowView:
    """Return the view of a workflow without a result of its own, from those of its groups."""
    groups = tuple(views[group.name] for group in plan.groups)
    result = _result_of_jobs(plan, run_dir, groups)
    state = _run_state(result, groups, is_lost=is_lost)
    return WorkflowView(plan=plan, state=state, groups=groups, result=result)


def _upstream_first(plan: WorkflowPlan) -> list[GroupPlan]:
    order = graphlib.TopologicalSorter({group.name: group.after for group in plan.groups})
    return [plan.group(name) for name in order.static_order()]


def _state_of_job(
    job: JobView | None, failed: list[str], waits: list[str]
) -> tuple[State, str | None]:
    """Return the state of a group without a result, and why it waits or has ended."""
    never_began = (JobState.PENDING, JobState.UNKNOWN)
    if failed and (job is None or job.state.is_final or job.state in never_began):
        return State.FAILED_UPSTREAM, f"it needs the output of {', '.join(failed)}"
    if job is None:
        why = "the scheduler does not know its job, and it left no result"
        return State.FAILED_BACKEND_ERROR, why
    state, name = state_of_job(job.state), f"job {job.job_id}"
    if state is State.SCHEDULING and waits and job.state is not JobState.UNKNOWN:
        return State.WAITING, f"waits for the outputs of {', '.join(waits)}"
    reasons = {
        State.RUNNING: None,
        State.SCHEDULING: describe_job(job),
        State.FAILED_CANCELED: f"{name} was cancelled",
        State.FAILED_EXEC_TIMEOUT: f"{name} ran into its time limit",
        State.FAILED_PREEMPTED: f"{name} was preempted",
    }
    if job.state is JobState.UNKNOWN:  # the scheduler has no answer now: not an end
        reasons[state] = f"{name} is unknown: {job.reason}"
    return state, reasons.get(state, f"{name} is {job.state.value} and left no result")


def _result_of_jobs(
    plan: WorkflowPlan, run_dir: RunDir, groups: tuple[GroupView, ...]
) -> WorkflowResult | None:
    if not all(group.state.is_final for group in groups):
        return None
    outcomes = [o for g in groups if (o := read_outcome(run_dir, g.name)) is not None]
    state = workflow_state(group.state for group in groups)
    codes = [outcome.exit_code for outcome in outcomes if outcome.state.is_failed]
    if state is State.FAILED_CANCELED:
        codes = [128 + signal.SIGTERM]
    records = [run_dir.group(group.name).events for group in groups]
    recorded_s = recorded_seconds(*records, until=changed_at(run_dir.cancelled))
    return WorkflowResult(
        run_id=plan.run_id,
        state=state,
        exit_code=(codes[0] if codes else 1) if state.is_failed else 0,
        elapsed_s=recorded_s or sum(outcome.elapsed_s for outcome in outcomes),
        groups={group.name: group.state.value for group in groups},
        reports=tuple(outcome.report for outcome in outcomes if outcome.report is not None),
    )


def view_workflow(run_dir: RunDir, *, is_alive: bool) -> WorkflowView | None:
    """Return the view of a workflow from its records; None if its plan can't be read."""
    plan = read_workflow(run_dir)
    if plan is None:
        return None
    result = read_workflow_result(run_dir)
    said = (one.event for one in read_events(run_dir.events))
    stated = {event.group: event for event in said if isinstance(event, GroupStateEvent)}
    is_lost = result is None and not is_alive
    groups = tuple(
        _view_group(group, run_dir, stated.get(group.name), is_lost=is_lost)
        for group in plan.groups
    )
    state = _run_state(result, groups, is_lost=is_lost)
    return WorkflowView(plan=plan, state=state, groups=groups, result=result)


def as_result(result: WorkflowResult) -> Result:
    """Convert the result of a workflow into that of a run."""
    return Result(
        run_id=result.run_id,
        state=result.state.of_run,
        exit_code=result.exit_code,
        attempts=1,
        restarts_spent=0,
        elapsed_s=result.elapsed_s,
        report=result.reports[0] if result.reports else None,
    )


def task_logs(view: WorkflowView, run_dir: RunDir) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Yield (task, [(attempt, path of its log)]) for every task that has a log."""
    for group in view.plan.groups:
        for task in group.tasks:
            folder = os.path.dirname(os.path.dirname(run_dir.task_log(group.name, task.name, 0)))
            try:
                names = os.listdir(folder)
            except OSError:
                continue
            words = (name.removeprefix("attempt-") for name in names)
            numbers = sorted(int(word) for word in words if word.isdigit())
            logs = [(k, run_dir.task_log(group.name, task.name, k)) for k in numbers]
            if logs:
                yield task.name, logs


def _view_group(
    group: GroupPlan, run_dir: RunDir, stated: GroupStateEvent | None, *, is_lost: bool
) -> GroupView:
    state = State(stated.state if stated is not None else State.SUBMITTING.value)
    own_why = stated.why if stated is not None else None
    why = own_why
    tasks: dict[str, TaskStateEvent] = {}
    started: dict[str, str] = {}
    for one in read_events(run_dir.group(group.name).events):
        match one.event:
            case TaskStateEvent(task=task) as event:
                tasks[task] = event
            case TaskStartedEvent(task=task):
                started[task] = one.time
                if started.keys() >= {task.name for task in group.tasks}:
                    why = own_why  # no task is waited for any more
            case GroupWaitsEvent(text=text):
                why = text
            case GroupStateEvent(state=new_state) if new_state != State.RUNNING.value:
                why = own_why
    outcome = read_outcome(run_dir, group.name)
    if outcome is not None:
        state = outcome.state
        why = outcome.report.error if outcome.report is not None else None
    elif is_lost and not state.is_final:
        why = _LOST_REASON
    views = []
    for plan in group.tasks:
        base = TaskView(
            name=plan.name, group=group.name, state=state, why=why, is_lead=plan is group.lead
        )
        said = tasks.get(plan.name)  # None: the task has no event of its own
        started_at = started.get(plan.name)
        views.append(base if said is None else _view_task(base, said, started_at))
    return GroupView(name=group.name, state=state, why=why, tasks=tuple(views))


def _view_task(of_group: TaskView, said: TaskStateEvent, started: str | None) -> TaskView:
    """Return the view of a task from its last event; `of_group` has the state of its group."""
    state, why = of_group.state, of_group.why
    own, reason = State(said.state), said.why
    if not own.is_final and (state.is_final or why == _LOST_REASON):  # its last events are missing
        own, reason = (state if state.is_final else own), why
    return replace(
        of_group, state=own, attempt=said.attempt, why=reason, code=said.code, started=started
    )


def _run_state(
    result: WorkflowResult | None, groups: tuple[GroupView, ...], *, is_lost: bool
) -> RunState:
    if result is not None:
        return result.state.of_run
    if is_lost:
        return RunState.LOST
    runs = any(group.state.of_run is RunState.RUNNING for group in groups)
    return RunState.RUNNING if runs else RunState.WAITING


def view_of_record(run_dir: RunDir, record: RunRecord) -> RunView:
    """Return the view of a workflow's record."""
    from torchmuster.launcher.views.find import owner_lives

    del record  # its groups have their own records
    if os.path.isfile(run_dir.jobs):
        workflow = _view_of_jobs(run_dir)
        result = workflow.result if workflow is not None else None
    else:
        workflow = view_workflow(run_dir, is_alive=owner_lives(run_dir))
        result = read_workflow_result(run_dir)
    return WorkflowRun(
        run_id=os.path.basename(run_dir.path),
        run_dir=run_dir,
        state=workflow.state if workflow is not None else RunState.LOST,
        plan=None,
        result=as_result(result) if result is not None else None,
        workflow=workflow,
    )


def _view_of_jobs(run_dir: RunDir) -> WorkflowView | None:
    from torchmuster.launcher.jobs.jobs import read_jobs, view_jobs

    found = read_jobs(run_dir)
    if found is None:
        return None
    dialect, job_ids = found
    open_ids = [i for name, i in job_ids.items() if read_outcome(run_dir, name) is None]
    views = view_jobs(dialect, open_ids) if open_ids else {}
    by_group = {name: views[job_id] for name, job_id in job_ids.items() if job_id in views}
    noted = atomic.read_json(run_dir.jobs)
    if "elsewhere" in noted:
        begun = frozenset(job_ids)
        is_recent = time.time() - float(noted.get("seen_at", 0.0)) < _NEXT_GROUP_S
        return view_remote_workflow(run_dir, by_group, begun, is_recent=is_recent)
    return view_job_workflow(run_dir, by_group)


def result_of_record(run_dir: RunDir) -> Result | None:
    """Return the result of a workflow as that of a run; None before its end."""
    workflow = read_workflow_result(run_dir)
    return as_result(workflow) if workflow is not None else None


def stop_jobs(run_dir: RunDir) -> bool:
    """Cancel the jobs of a workflow, or its groups on a cluster; return whether it has any.

    Raises:
        MusterError: A cluster refuses.
    """
    from torchmuster.launcher.jobs.jobs import cancel_job, read_jobs
    from torchmuster.launcher.views.elsewhere import elsewhere

    jobs = read_jobs(run_dir)
    if jobs is None:
        return False
    if not elsewhere().cancel_groups(run_dir):
        for job_id in jobs[1].values():
            with contextlib.suppress(MusterError):  # the job may have ended
                cancel_job(jobs[0], job_id)
    return True


def describe_workflow_results(run_dir: RunDir, groups: tuple[str, ...]) -> str:
    """Describe where a workflow's results are: the dataset versions it made, outputs and logs."""
    versions = [
        one.event.version
        for group in groups
        for one in read_events(run_dir.group(group).events)
        if isinstance(one.event, DatasetVersionEvent)
    ]
    parts = []
    if versions:
        word = "datasets" if len(versions) > 1 else "dataset"
        parts.append(f"{word} {few_of(versions, 8)}")
    folders = [run_dir.group(group) for group in groups]
    all_kept = filter(None, (elsewhere().kept(one) for one in folders if is_elsewhere(one)))
    if (kept := next(all_kept, None)) is not None and kept.outlives:
        parts.append(f"outputs on the volume, in {os.path.join(kept.path, 'tasks')}")
    else:
        parts.append(f"outputs in {near(os.path.join(run_dir.path, 'tasks'))}")
    parts.append(f"logs in {near(os.path.join(run_dir.path, 'logs'))}")
    return "; ".join(parts)
