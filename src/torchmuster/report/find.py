"""Find a run, a workflow or a sweep and read its story, or raise why that is not possible."""

import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torchmuster
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.events import parse
from torchmuster.core.model.states import RunState
from torchmuster.core.owner.record import DAMAGED, RecordTail, read_events
from torchmuster.errors import NotFoundError
from torchmuster.launcher.model.run import lines, listed, mapped, number, text, whole
from torchmuster.launcher.views.find import find_run, view_run
from torchmuster.launcher.views.run_view import RunView
from torchmuster.launcher.views.training import newest_training
from torchmuster.multirun.views.sweep_view import MemberView, SweepRun, SweepView
from torchmuster.report import read, story
from torchmuster.workflow.owner.view import WorkflowRun
from torchmuster.workflow.record import (
    GroupStateEvent,
    GroupWaitsEvent,
    TaskStartedEvent,
    TaskStateEvent,
)

# The story of a sweep: its members with values, metric and state, the best first.


_MAX_MEMBERS = 10_000


def read_sweep_story(view: SweepRun) -> story.Story:
    """Return the story of a sweep."""
    sweep, gaps = view.sweep, []
    if sweep is None:
        gaps.append("sweep.json can't be read: what was tried is not known")
    # The plan of a member before it gets its values, in the form of `plan.json`.
    plan: dict[str, Any] = codec.to_plain(sweep.plan.run) if sweep is not None else {}
    events = view.record
    began, ended = events.began, events.last_at
    is_final = view.state.is_final
    return story.Story(
        made=time.time(),
        made_by=torchmuster.__version__,
        kind="sweep",
        run_id=text(view.run_id, 200),
        name=text(short_id(view.run_id), 200),
        folder=text(view.run_dir.path),
        what=read.read_what(view, plan, events, gaps),
        ending=_ending(view, sweep, began, ended),
        began=began,
        ended=ended if is_final else None,
        cost=story.Cost(),
        sweep=_sweep_story(sweep) if sweep is not None else None,
        gaps=tuple(gaps),
    )


def _ending(
    view: RunView, sweep: SweepView | None, began: float | None, ended: float | None
) -> story.Ending:
    until = ended if view.state.is_final else time.time()
    report = view.result.report if view.result is not None else None
    states = sweep.counted() if sweep is not None else {}
    counted = ", ".join(f"{num} {state.value}" for state, num in states.items())
    return story.Ending(
        state=view.state.value,
        is_final=view.state.is_final,
        exit_code=view.result.exit_code if view.result is not None else None,
        elapsed_s=until - began if began is not None and until is not None else None,
        sentence=text(report.error if report is not None else counted),
        because=tuple(text(line) for line in (report.because if report is not None else ())[:60]),
        hint=text(report.hint or "") if report is not None else "",
        go_on=_go_on(view),
    )


def _go_on(view: RunView) -> str:
    """Return how to continue; empty while it runs, and after a success."""
    if not view.state.is_final or view.state is RunState.SUCCEEDED:
        return ""
    return f"continue with: muster restart {text(short_id(view.run_id), 200)}"


def _sweep_story(sweep: SweepView) -> story.SweepStory:
    metric, best = sweep.plan.metric, sweep.best
    ordered = sorted(sweep.members, key=lambda member: _order(sweep, member))
    return story.SweepStory(
        names=tuple(text(name, 200) for name in sweep.plan.names),
        metric=text(metric.name, 200) if metric is not None else "",
        goal=metric.goal.value if metric is not None else "",
        best=best.number if best is not None else None,
        counted=tuple((state.value, num) for state, num in sweep.counted().items()),
        members=tuple(_member(sweep, member) for member in ordered[:_MAX_MEMBERS]),
    )


def _order(sweep: SweepView, member: MemberView) -> tuple[bool, float, int]:
    """Return a member's sort key: the best first, those without a value last, then by number."""
    metric, value = sweep.plan.metric, member.value
    if metric is None or value is None or math.isnan(value):
        return True, 0.0, member.number
    return False, -value if metric.is_better(1.0, 0.0) else value, member.number


def _member(sweep: SweepView, member: MemberView) -> story.MemberStory:
    value = member.value
    return story.MemberStory(
        number=member.number,
        values=tuple(text(one, 200) for one in sweep.plan.members[member.number]),
        state=member.state.value,
        metric=number(value),
        not_finite=str(value) if value is not None and not math.isfinite(value) else "",
        step=member.step,
        attempts=member.attempt + 1 if member.attempt is not None else 0,
        elapsed_s=number(member.elapsed_s),
        why=text(member.why or "", 300),
    )


# The story of a workflow: groups, tasks, times, attempts, outcome, outputs, runs of training tasks.


_MAX_GROUPS, _MAX_TASKS, _MAX_TRAININGS = 500, 2000, 20


@dataclass(slots=True)
class _Task:
    state: str = ""
    attempt: int = 0
    began: float | None = None
    ended: float | None = None
    why: str = ""
    code: int | None = None


@dataclass(slots=True)
class _Group:
    state: str = ""
    why: str = ""
    first_at: float | None = None
    last_at: float | None = None
    tasks: dict[str, _Task] = field(default_factory=dict)


def read_workflow_story(view: RunView) -> story.Story:
    """Return the story of a workflow."""
    run_dir, gaps = view.run_dir, []
    plan, why = read.object_in(run_dir.workflow)
    if why or not plan:
        gaps.append(
            f"workflow.json can't be read ({why or 'it is empty'}): what was planned is not known"
        )
    result, why = read.object_in(run_dir.result)
    if why:
        gaps.append(f"result.json can't be read ({why}): how the workflow ended is not known")
    events, account = view.record, read.known_account(view)
    if events.num_torn or events.why_not:
        gaps.append(
            f"events.jsonl is not complete: {events.why_not or f'{events.num_torn} lines are torn'}"
        )
    said = (one.event for one in read_events(run_dir.events))
    stated = {text(one.group, 200): one for one in said if isinstance(one, GroupStateEvent)}
    rows = [row for row in listed(plan.get("groups"))[:_MAX_GROUPS] if isinstance(row, dict)]
    found = [_group(run_dir, row, stated) for row in rows]
    groups = tuple(group_story for group_story, _, _ in found)
    times = [at for _, first, last in found for at in (first, last) if at is not None]
    times += [at for at in (events.began, events.last_at) if at is not None]
    began, ended = min(times, default=None), max(times, default=None)
    is_final = view.state.is_final
    return story.Story(
        made=time.time(),
        made_by=torchmuster.__version__,
        kind="workflow",
        run_id=text(view.run_id, 200),
        name=text(short_id(view.run_id), 200),
        folder=text(run_dir.path),
        what=read.read_what(view, {"engine": account.engine if account else ""}, events, gaps),
        ending=_workflow_ending(view, result, began, ended),
        began=began,
        ended=ended if is_final else None,
        moments=tuple(events.moments),
        num_moments=events.num_moments,
        cost=story.Cost(),
        groups=groups,
        trainings=_trainings(groups, gaps),
        gaps=tuple(gaps),
    )


def _workflow_ending(
    view: RunView, result: Mapping[str, Any], began: float | None, ended: float | None
) -> story.Ending:
    reports = [mapped(one) for one in listed(result.get("reports"))]
    first = reports[0] if reports else {}
    if not reports and view.result is not None and view.result.report is not None:
        one = view.result.report
        first = {"error": one.error, "at": one.at, "because": list(one.because), "hint": one.hint}
    until = ended if view.state.is_final else time.time()
    return story.Ending(
        state=view.state.value,
        is_final=view.state.is_final,
        exit_code=whole(result.get("exit_code")),
        elapsed_s=until - began
        if began is not None and until is not None
        else number(result.get("elapsed_s")),
        sentence=text(first.get("error")),
        at=text(first.get("at")),
        because=lines(first.get("because")),
        hint=text(first.get("hint")),
        notes=tuple(text(one.get("error")) for one in reports[1:20]),
        go_on=_go_on(view),
    )


def _group(
    run_dir: RunDir, row: Mapping[str, Any], stated: Mapping[str, GroupStateEvent]
) -> tuple[story.GroupStory, float | None, float | None]:
    name = text(row.get("name"), 200)
    said = stated.get(name)
    group = _Group(state="SUBMITTING")
    if said is not None:
        group = _Group(state=text(said.state, 60), why=text(said.why))
    if _is_plain(name):
        folder = run_dir.group(name)
        _apply_events(group, RecordTail(folder.events).read()[0])
        outcome, _ = read.object_in(folder.result)
        group.state = text(outcome.get("state"), 60) or group.state
        report = mapped(outcome.get("report"))
        group.why = text(report.get("error")) or group.why
    tasks = [one for one in listed(row.get("tasks"))[:_MAX_TASKS] if isinstance(one, dict)]
    group_story = story.GroupStory(
        name=name,
        state=group.state,
        why=group.why,
        after=tuple(text(one, 200) for one in listed(row.get("after"))),
        tasks=tuple(_task(run_dir, text(one.get("name"), 200), one, group) for one in tasks),
    )
    return group_story, group.first_at, group.last_at


def _is_plain(name: str) -> bool:
    """Return whether a name is that of one folder: a record may hold any text."""
    return bool(name) and os.sep not in name and name not in (".", "..")


def _apply_events(group: _Group, lines: Iterable[Mapping[str, Any]]) -> None:
    for one in filter(None, map(parse, lines)):
        group.first_at = one.at if group.first_at is None else group.first_at
        group.last_at = one.at
        match one.event:
            case TaskStateEvent() as event:
                task = group.tasks.setdefault(text(event.task, 200), _Task())
                task.state, task.why = text(event.state, 60), text(event.why)
                task.attempt, task.code = whole(event.attempt) or 0, whole(event.code)
                task.ended = one.at if task.state.startswith(("COMPLETED", "FAILED")) else None
            case TaskStartedEvent(task=name):
                task = group.tasks.setdefault(text(name, 200), _Task())
                task.began = one.at if task.began is None else task.began
            case GroupWaitsEvent(text=why):
                group.why = text(why)


def _task(run_dir: RunDir, name: str, row: Mapping[str, Any], group: _Group) -> story.TaskStory:
    said = group.tasks.get(name, _Task(state=group.state))
    is_plain = _is_plain(name)
    output = run_dir.task_output(name) if is_plain else ""
    return story.TaskStory(
        name=name,
        state=said.state or group.state,
        attempts=said.attempt + 1 if said.began is not None else 0,
        began=said.began,
        ended=said.ended,
        why=said.why,
        code=said.code,
        is_lead=row.get("lead") is True,
        output=text(output) if output and os.path.exists(output) else "",
        training=(newest_training(run_dir, name) or "") if is_plain else "",
    )


def _trainings(
    groups: Iterable[story.GroupStory], gaps: list[str]
) -> tuple[tuple[str, story.Story], ...]:
    named = [
        (task.name, task.training) for group in groups for task in group.tasks if task.training
    ]
    found = []
    for name, folder in named[:_MAX_TRAININGS]:
        try:
            found.append((name, read.read_run_story(view_run(RunDir(folder)))))
        except DAMAGED as error:
            gaps.append(f"the run of task {name} can't be understood: {type(error).__name__}")
    if len(named) > _MAX_TRAININGS:
        gaps.append(
            f"of {len(named)} training tasks the first {_MAX_TRAININGS} are shown; `muster report FOLDER` shows each"
        )
    return tuple(found)


def find_story(word: str) -> story.Story:
    """Return the story of the run that `word` names.

    Raises:
        NotFoundError: There is no such run, or its record can't be read.
    """
    return read_story(_open_run(word))


def _open_run(word: str) -> RunView:
    """Return the run that `word` names, a path or an id; check that its record can be read.

    Raises:
        NotFoundError: There is no such run, or its record can't be read.
    """
    if os.sep in word and os.path.isdir(word):
        path = os.path.abspath(word)
        _check_readable(path)
        run_dir = RunDir(path)
        of_kind = (run_dir.plan, run_dir.workflow, run_dir.sweep)
        if not any(map(os.path.exists, (*of_kind, run_dir.events))):
            raise NotFoundError(
                "this folder is no run directory",
                where=path,
                why="it has no plan.json, no workflow.json and no events.jsonl",
                fix="`muster ps` lists the runs",
            )
        view = view_run(run_dir)
    else:
        view = find_run(word)
        _check_readable(view.run_dir.path)
    if view.problem:
        raise NotFoundError(
            "the record of this run can't be understood",
            where=view.run_dir.path,
            why=view.problem,
            fix="was it written by another version of muster, or damaged? `muster explain` reads its logs",
        )
    return view


def _check_readable(path: str) -> None:
    if os.access(path, os.R_OK | os.X_OK):
        return
    raise NotFoundError(
        "the directory of this run can't be read",
        where=path,
        why=f"it belongs to {read.owner_of(path)}, and runs are private",
        fix="ask its owner for the page: `muster report` writes one file that can be passed on",
    )


def read_story(view: RunView) -> story.Story:
    """Return the story of a run, a workflow or a sweep."""
    if isinstance(view, WorkflowRun):
        return read_workflow_story(view)
    return read_sweep_story(view) if isinstance(view, SweepRun) else read.read_run_story(view)
