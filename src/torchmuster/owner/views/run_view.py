"""A run as its directory shows it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from torchmuster.files.claims import Claims
from torchmuster.files.layout import RunDir, short_id
from torchmuster.model.contract import replay_order
from torchmuster.model.event import moment_of
from torchmuster.model.plan import RunPlan
from torchmuster.model.states import RunState
from torchmuster.model.verdict import Result
from torchmuster.owner.views.record import changed_at
from torchmuster.owner.views.sweep_view import SweepView
from torchmuster.owner.views.workflow_view import WorkflowView

_MOST_WORKERS = 10**7  # more than any machine has processors: the record is damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run as its directory shows it; `problem` says why its record can't be read, or is empty."""

    run_id: str
    run_dir: RunDir
    state: RunState
    plan: RunPlan | None
    result: Result | None
    events: tuple[dict[str, object], ...]
    workflow: WorkflowView | None = None
    sweep: SweepView | None = None
    problem: str = ""

    @property
    def is_sweep(self) -> bool:
        """Say whether it was started by `muster sweep`."""
        return os.path.isfile(self.run_dir.sweep)

    @property
    def is_headless_member(self) -> bool:
        """Say whether it is a single process of a sweep, which the sweep's owner starts and ends."""
        whole = self.whole
        heads = (self.run_dir.head, os.path.join(self.run_dir.path, "pods"))
        return (
            whole is not None
            and os.path.isfile(whole.sweep)
            and not any(map(os.path.exists, heads))
        )

    @property
    def is_session(self) -> bool:
        """Say whether it is a session, in which runs are started, and no run itself."""
        return self.plan is not None and self.plan.is_session

    @property
    def command(self) -> str:
        """What is run, in words: of a replay the step that it makes again."""
        if self.plan is None or self.is_session:
            return "session" if self.is_session else ""
        if (order := replay_order(dict(self.plan.node_setup.environment))) is not None:
            return f"replay of {short_id(order.run_id)}, step {order.step}"
        return " ".join(self.plan.program.display())

    @property
    def whole(self) -> RunDir | None:
        """The run that it is a part of: the sweep of a member, the workflow of a task's training; None of any other."""
        folders = self.run_dir.path.split(os.sep)
        sweep, workflow = (RunDir(os.sep.join(folders[:-up])) for up in (2, 5))
        if folders[-2:-1] == ["members"] and os.path.isfile(sweep.sweep):
            return sweep
        is_task = folders[-3:-2] == ["training"] and os.path.isfile(workflow.workflow)
        return workflow if is_task else None

    @property
    def is_workflow(self) -> bool:
        """Say whether it was started by `muster submit`."""
        return os.path.isfile(self.run_dir.workflow)

    @property
    def attempts(self) -> list[dict[str, object]]:
        """The starts of its attempts, in order."""
        return [e for e in self.events if e.get("event") == "attempt_started"]

    @property
    def num_workers(self) -> int | None:
        """How many workers its last attempt has; None before the first one, and where its record is damaged."""
        return workers_of(self.attempts[-1]) if self.attempts else None

    @property
    def spares(self) -> list[str]:
        """The nodes that wait for the loss of another one, as far as the record says."""
        names: list[str] = []
        for event in self.events:
            match event:
                case {"event": "attempt_started", "spares": [*told]}:
                    names = [str(name) for name in told]
                case {"event": "spare_joined", "node": node}:
                    names.append(str(node))
                case {"event": "spare_lost" | "spare_taken", "node": node} if str(node) in names:
                    names.remove(str(node))
        return names

    @property
    def started(self) -> str:
        """When it began, as the record says."""
        return str(self.events[0].get("time", "")) if self.events else ""

    @property
    def submitted(self) -> float:
        """When somebody asked for it, seconds since 1970: a job may begin days later."""
        return submitted_at(self.run_dir, self.started)


def problems_of(view: RunView) -> tuple[str, ...]:
    """Return why not all of a run is known, one sentence each."""
    path = view.run_dir.path
    if not os.path.isdir(path):
        return (f"its folder has been removed: {path}",)
    if not os.access(path, os.R_OK | os.X_OK):
        return (f"its folder can't be read by this user: {path}",)
    if view.problem:
        return (view.problem,)
    if view.is_workflow:
        return () if view.workflow is not None else ("the plan of the workflow can't be read",)
    if view.is_sweep:
        return () if view.sweep is not None else ("the plan of the sweep can't be read",)
    if view.plan is None:
        return ("plan.json is missing, half written, or of another version of muster",)
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


def workers_of(start: Mapping[str, object]) -> int | None:
    """Return how many workers an attempt has, by the event of its start; None where that is no such number."""
    count = start.get("world_size")
    return count if type(count) is int and 0 < count <= _MOST_WORKERS else None


def submitted_at(run_dir: RunDir, started: str) -> float:
    """Return when a run was asked for: the earliest sign of it.

    The client writes these files before anything starts; a later link or a copy may write some of them again.
    """
    of_kind = (run_dir.plan, run_dir.workflow, run_dir.sweep)
    files = (run_dir.secret, *of_kind, run_dir.owner, run_dir.job)
    times = [time for path in files if (time := changed_at(path)) is not None]
    if (begun := moment_of(started)) is not None:  # a job in a queue has no event
        times.append(begun)
    return min(times, default=changed_at(run_dir.path) or 0.0)
