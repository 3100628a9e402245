"""View of a run, from its directory."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torchmuster.core.files.claims import Claims
from torchmuster.core.files.layout import Kind, RunDir, short_id
from torchmuster.core.model.contract import replay_order
from torchmuster.core.model.plan import GRACE_S, RunPlan
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import in_one_line
from torchmuster.core.model.verdict import Result
from torchmuster.core.owner.record import changed_at
from torchmuster.errors import NotFoundError
from torchmuster.launcher.model.live import LiveTask
from torchmuster.launcher.model.run import AttemptRecord, RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A training run as its directory shows it, and the interface of all kinds of records.

    Attributes:
        problem: Why the record can't be read; empty if it can.
        has_ranks: Whether it has ranks: its head knows their state, and each has a log.
    """

    kind: ClassVar[Kind] = Kind.RUN
    has_ranks: ClassVar[bool] = True
    run_id: str
    run_dir: RunDir
    state: RunState
    plan: RunPlan | None
    result: Result | None
    record: RunRecord = field(default_factory=RunRecord)
    losses: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""

    @property
    def is_headless_member(self) -> bool:
        """Whether it is a single process of a sweep, which the sweep's owner starts and ends."""
        whole = self.whole
        heads = (self.run_dir.head, os.path.join(self.run_dir.path, "pods"))
        return (
            whole is not None and whole.kind is Kind.SWEEP and not any(map(os.path.exists, heads))
        )

    @property
    def name(self) -> str:
        """A short description: the name of the script."""
        target = self.plan.program.target if self.plan is not None else "-"
        return in_one_line(os.path.basename(target))

    @property
    def command(self) -> str:
        """The command line; for a replay, the step that it repeats."""
        if self.plan is None:
            return "" if self.problem else "(plan.json can't be read)"
        if (order := replay_order(dict(self.plan.node_setup.environment))) is not None:
            return f"replay of {short_id(order.run_id)}, step {order.step}"
        return " ".join(self.plan.program.display())

    @property
    def whole(self) -> RunDir | None:
        """The sweep of a member, or the workflow of a task's training; None for other runs."""
        folders = self.run_dir.path.split(os.sep)
        sweep, workflow = (RunDir(os.sep.join(folders[:-up])) for up in (2, 5))
        if folders[-2:-1] == ["members"] and sweep.kind is Kind.SWEEP:
            return sweep
        is_task = folders[-3:-2] == ["training"] and workflow.kind is Kind.WORKFLOW
        return workflow if is_task else None

    @property
    def size(self) -> str:
        """Its number of workers, for display."""
        return str(self.record.num_workers or "-")

    @property
    def grace_s(self) -> float:
        """Its workers' time from SIGTERM to SIGKILL."""
        return self.plan.limits.grace_s if self.plan is not None else GRACE_S

    @property
    def is_readable(self) -> bool:
        """Whether its plan can be read."""
        return self.plan is not None

    @property
    def plan_problem(self) -> str:
        """Why its plan is not known; empty if it is."""
        what = "plan.json is missing, half written, or of another version of muster"
        return "" if self.plan is not None else what

    @property
    def place(self) -> str:
        """The engine it was sent to, for runs without a job."""
        return self.plan.engine if self.plan is not None else "local"

    @property
    def is_conducted_by_owner(self) -> bool:
        """Whether its owner, instead of a head, is asked to stop it."""
        return not self.has_ranks and not os.path.isfile(self.run_dir.job)

    @property
    def task_names(self) -> list[str]:
        """Its tasks; only a workflow has any."""
        return []

    def records(self) -> list[str]:
        """Return the files whose times show how long it took."""
        is_lost = self.state is RunState.LOST  # no end was recorded: the last write counts
        return [self.run_dir.events, *([self.run_dir.training] if is_lost else [])]

    def links(self) -> list[str]:
        """Return its folders, other than snapshots, that may be links into other runs."""
        return []

    def parts(self) -> tuple[LiveTask, ...]:
        """Return its parts for display: tasks or members."""
        return ()

    def member(self, number: int) -> RunDir | None:
        """Return the folder of a member; None if it is not a sweep."""
        return None

    def training(self, task: str) -> RunDir | None:
        """Return the folder of a task's last training; None if it is not a workflow."""
        return None

    def member_state(self, number: int) -> RunState | None:
        """Return the state of a member; None if it is not a sweep."""
        return None

    def task_logs(self) -> "list[tuple[str, list[tuple[int, str]]]] | None":
        """Return (attempt, path) of each task's logs; None where ranks have the logs."""
        return None

    def groups_to_enter(self) -> "dict[str, tuple[Any, ...]]":
        """Return its tasks by group, for `muster exec`; each has a name, a group and a state.

        Raises:
            NotFoundError: It has no tasks.
            UsageError: The tasks can't be entered.
        """
        raise NotFoundError(
            f"the run {self.run_id} has no tasks",
            where=self.run_dir.path,
            why="`muster exec` enters tasks of workflow files",
        )

    @property
    def attempts(self) -> list[AttemptRecord]:
        """Its attempts, with the cluster's message about lost pods."""
        return self.record.with_losses(self.losses)

    @property
    def submitted(self) -> float:
        """When it was submitted, in seconds since 1970: a job may begin days later."""
        return submitted_at(self.run_dir, self.record.began)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRun(RunView):
    """The holder of a session's nodes: not a run, but lives, ends and is recorded like one."""

    kind: ClassVar[Kind] = Kind.SESSION

    @property
    def command(self) -> str:
        """What it is."""
        return "session"


def problems_of(view: RunView) -> tuple[str, ...]:
    """Return why not everything about a run is known, one sentence each."""
    path = view.run_dir.path
    if not os.path.isdir(path):
        return (f"its folder has been removed: {path}",)
    if not os.access(path, os.R_OK | os.X_OK):
        return (f"its folder can't be read by this user: {path}",)
    if view.problem:
        return (view.problem,)
    if view.plan_problem:
        return (view.plan_problem,)
    if not view.has_ranks:
        return ()
    if (bad := view.record.num_bad) and not view.record.began:
        return (f"none of the {bad} events of its record can be understood",)
    return () if view.result is not None else lost_head(view.run_dir)


def lost_head(run_dir: RunDir) -> tuple[str, ...]:
    """Return a sentence if nodes have lost the head and none has replaced it yet."""
    claims = Claims(run_dir.succession)
    try:
        newest = claims.newest(fresh=False)
        votes = claims.votes(newest.number, fresh=False) if newest is not None else frozenset()
    except OSError:  # the usual case: a run whose head has no successor
        return ()
    if newest is None or not votes:
        return ()
    counts = f"{len(votes & set(newest.members))} of {len(newest.members)} nodes"
    said = f"{counts} have lost the head on {newest.node}; another one becomes it when more than half have, or when the"
    return (f"{said} scheduler says that its machine is lost",)


def submitted_at(run_dir: RunDir, began: float | None) -> float:
    """Return when a run was submitted: the earliest sign of it.

    The client writes these files before anything starts; a later link or a copy may write some of
    them again.
    """
    of_kind = (run_dir.plan, run_dir.workflow, run_dir.sweep)
    files = (run_dir.secret, *of_kind, run_dir.owner, run_dir.job)
    times = [time for path in files if (time := changed_at(path)) is not None]
    if began is not None:  # a queued job has no event
        times.append(began)
    return min(times, default=changed_at(run_dir.path) or 0.0)
