"""A run as its directory shows it."""

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
    """A training run as its directory shows it, and what all kinds of records answer.

    Attributes:
        problem: Why its record can't be read; empty where it can.
        has_ranks: Its head knows how ranks stand, and each has a log.
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
        """Say whether it is a single process of a sweep, which the sweep's owner starts and ends."""
        whole = self.whole
        heads = (self.run_dir.head, os.path.join(self.run_dir.path, "pods"))
        return (
            whole is not None and whole.kind is Kind.SWEEP and not any(map(os.path.exists, heads))
        )

    @property
    def name(self) -> str:
        """What it is, in a few words."""
        target = self.plan.program.target if self.plan is not None else "-"
        return in_one_line(os.path.basename(target))

    @property
    def command(self) -> str:
        """What is run, in words: of a replay the step that it makes again."""
        if self.plan is None:
            return "" if self.problem else "(plan.json can't be read)"
        if (order := replay_order(dict(self.plan.node_setup.environment))) is not None:
            return f"replay of {short_id(order.run_id)}, step {order.step}"
        return " ".join(self.plan.program.display())

    @property
    def whole(self) -> RunDir | None:
        """The run that it is a part of: the sweep of a member, the workflow of a task's training; None of any other."""
        folders = self.run_dir.path.split(os.sep)
        sweep, workflow = (RunDir(os.sep.join(folders[:-up])) for up in (2, 5))
        if folders[-2:-1] == ["members"] and sweep.kind is Kind.SWEEP:
            return sweep
        is_task = folders[-3:-2] == ["training"] and workflow.kind is Kind.WORKFLOW
        return workflow if is_task else None

    @property
    def size(self) -> str:
        """How much of it there is."""
        return str(self.record.num_workers or "-")

    @property
    def grace_s(self) -> float:
        """How long its workers have from SIGTERM to SIGKILL."""
        return self.plan.limits.grace_s if self.plan is not None else GRACE_S

    @property
    def is_readable(self) -> bool:
        """Whether its folder says what it is."""
        return self.plan is not None

    @property
    def plan_problem(self) -> str:
        """Why its plan is not known; empty where it is."""
        what = "plan.json is missing, half written, or of another version of muster"
        return "" if self.plan is not None else what

    @property
    def place(self) -> str:
        """Where it was sent, where it has no job."""
        return self.plan.engine if self.plan is not None else "local"

    @property
    def is_conducted_by_owner(self) -> bool:
        """Whether there is no head that could be told to stop it, but an owner."""
        return not self.has_ranks and not os.path.isfile(self.run_dir.job)

    @property
    def task_names(self) -> list[str]:
        """Its tasks; none but of a workflow."""
        return []

    def records(self) -> list[str]:
        """Return the records by which one knows how long it took."""
        is_lost = self.state is RunState.LOST  # nobody wrote its end: what was written last is
        return [self.run_dir.events, *([self.run_dir.training] if is_lost else [])]

    def links(self) -> list[str]:
        """Return the folders of it that may be links into other runs, besides its snapshots."""
        return []

    def parts(self) -> tuple[LiveTask, ...]:
        """Return what it consists of, as that is shown: tasks, members."""
        return ()

    def member(self, number: int) -> RunDir | None:
        """Return the folder of a member; None of what is no sweep."""
        del number
        return None

    def training(self, task: str) -> RunDir | None:
        """Return the folder of the last training of a task; None of what is no workflow."""
        del task
        return None

    def member_state(self, number: int) -> RunState | None:
        """Return how a member stands; None of what is no sweep."""
        del number
        return None

    def task_logs(self) -> "list[tuple[str, list[tuple[int, str]]]] | None":
        """Return the logs of each task, (attempt, path); None where ranks have them."""
        return None

    def groups_to_enter(self) -> "dict[str, tuple[Any, ...]]":
        """Return its tasks by group, for commands beside them; each has a name, a group and a state.

        Raises:
            NotFoundError: It has none.
            UsageError: They can't be entered.
        """
        raise NotFoundError(
            f"the run {self.run_id} has no tasks",
            where=self.run_dir.path,
            why="`muster exec` enters tasks of workflow files",
        )

    @property
    def attempts(self) -> list[AttemptRecord]:
        """Its attempts, those that lost a pod with what the cluster said of it."""
        return self.record.with_losses(self.losses)

    @property
    def submitted(self) -> float:
        """When somebody asked for it, seconds since 1970: a job may begin days later."""
        return submitted_at(self.run_dir, self.record.began)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRun(RunView):
    """What holds the nodes of a session: no run itself, but it lives, is cancelled and leaves a record as one."""

    kind: ClassVar[Kind] = Kind.SESSION

    @property
    def command(self) -> str:
        """What it is."""
        return "session"


def problems_of(view: RunView) -> tuple[str, ...]:
    """Return why not all of a run is known, one sentence each."""
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
    """Return a sentence where nodes have lost the head, and none has taken its place yet."""
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
    """Return when a run was asked for: the earliest sign of it.

    The client writes these files before anything starts; a later link or a copy may write some of them again.
    """
    of_kind = (run_dir.plan, run_dir.workflow, run_dir.sweep)
    files = (run_dir.secret, *of_kind, run_dir.owner, run_dir.job)
    times = [time for path in files if (time := changed_at(path)) is not None]
    if began is not None:  # a job in a queue has no event
        times.append(began)
    return min(times, default=changed_at(run_dir.path) or 0.0)
