"""Read the story of a workflow: groups, tasks, times, attempts, outcome, outputs, and the runs of its training tasks."""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torchmuster
from torchmuster.errors import MusterError
from torchmuster.files.layout import RunDir, short_id
from torchmuster.model.record.events import (
    GroupStateEvent,
    GroupWaitsEvent,
    TaskStartedEvent,
    TaskStateEvent,
    parse,
)
from torchmuster.model.record.loose import lines, listed, mapped, number, text, whole
from torchmuster.owner.views.account import account_of
from torchmuster.owner.views.find import view_run
from torchmuster.owner.views.record import newest_training, read_events
from torchmuster.owner.views.run_view import RunView
from torchmuster.report.loose import LooseRecord, object_in
from torchmuster.report.read import MALFORMED, read_run_story, read_what
from torchmuster.report.story import Cost, Ending, GroupTold, Story, TaskTold

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


def read_workflow_story(view: RunView) -> Story:
    """Return the story of a workflow."""
    run_dir, gaps = view.run_dir, []
    plan, why = object_in(run_dir.workflow)
    if why or not plan:
        gaps.append(
            f"workflow.json can't be read ({why or 'it is empty'}): what was planned is not known"
        )
    result, why = object_in(run_dir.result)
    if why:
        gaps.append(f"result.json can't be read ({why}): how the workflow ended is not known")
    events = view.record
    if events.num_torn or events.why_not:
        gaps.append(
            f"events.jsonl is not complete: {events.why_not or f'{events.num_torn} lines are torn'}"
        )
    said = (one.event for one in read_events(run_dir.events))
    stated = {text(one.group, 200): one for one in said if isinstance(one, GroupStateEvent)}
    rows = [row for row in listed(plan.get("groups"))[:_MAX_GROUPS] if isinstance(row, dict)]
    found = [_group(run_dir, row, stated) for row in rows]
    groups = tuple(told for told, _, _ in found)
    times = [at for _, first, last in found for at in (first, last) if at is not None]
    times += [at for at in (events.began, events.last_at) if at is not None]
    began, ended = min(times, default=None), max(times, default=None)
    is_final = view.state.is_final
    return Story(
        made=time.time(),
        made_by=torchmuster.__version__,
        kind="workflow",
        run_id=text(view.run_id, 200),
        name=text(short_id(view.run_id), 200),
        folder=text(run_dir.path),
        what=read_what(view, {"engine": _engine(view)}, events, gaps),
        ending=_ending(view, result, began, ended),
        began=began,
        ended=ended if is_final else None,
        moments=tuple(events.moments),
        num_moments=events.num_moments,
        cost=Cost(),
        groups=groups,
        trainings=_trainings(groups, gaps),
        gaps=tuple(gaps),
    )


def _engine(view: RunView) -> str:
    try:
        return account_of(view, time.time()).engine
    except (*MALFORMED, MusterError):
        return ""


def _ending(
    view: RunView, result: Mapping[str, Any], began: float | None, ended: float | None
) -> Ending:
    reports = [mapped(one) for one in listed(result.get("reports"))]
    first = reports[0] if reports else {}
    if not reports and view.result is not None and view.result.report is not None:
        one = view.result.report
        first = {"error": one.error, "at": one.at, "because": list(one.because), "hint": one.hint}
    until = ended if view.state.is_final else time.time()
    return Ending(
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
        go_on=f"continue with: muster restart {text(short_id(view.run_id), 200)}"
        if view.state.is_final and view.state.value != "succeeded"
        else "",
    )


def _group(
    run_dir: RunDir, row: Mapping[str, Any], stated: Mapping[str, GroupStateEvent]
) -> tuple[GroupTold, float | None, float | None]:
    name = text(row.get("name"), 200)
    said = stated.get(name)
    group = _Group(state="SUBMITTING", why="")
    if said is not None:
        group = _Group(state=text(said.state, 60), why=text(said.why))
    folder = (
        run_dir.group(name) if name and os.sep not in name and name not in (".", "..") else None
    )
    if folder is not None:
        _take_events(group, LooseRecord(folder.events))
        outcome, _ = object_in(folder.result)
        group.state = text(outcome.get("state"), 60) or group.state
        report = mapped(outcome.get("report"))
        group.why = text(report.get("error")) or group.why
    tasks = [one for one in listed(row.get("tasks"))[:_MAX_TASKS] if isinstance(one, dict)]
    told = GroupTold(
        name=name,
        state=group.state,
        why=group.why,
        after=tuple(text(one, 200) for one in listed(row.get("after"))),
        tasks=tuple(_task(run_dir, text(one.get("name"), 200), one, group) for one in tasks),
    )
    return told, group.first_at, group.last_at


def _take_events(group: _Group, lines: Iterable[Mapping[str, Any]]) -> None:
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


def _task(run_dir: RunDir, name: str, row: Mapping[str, Any], group: _Group) -> TaskTold:
    said = group.tasks.get(name, _Task(state=group.state))
    is_plain = bool(name) and os.sep not in name and name not in (".", "..")
    output = run_dir.task_output(name) if is_plain else ""
    return TaskTold(
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


def _trainings(groups: Iterable[GroupTold], gaps: list[str]) -> tuple[tuple[str, Story], ...]:
    named = [
        (task.name, task.training) for group in groups for task in group.tasks if task.training
    ]
    found = []
    for name, folder in named[:_MAX_TRAININGS]:
        try:
            found.append((name, read_run_story(view_run(RunDir(folder)))))
        except MALFORMED as error:
            gaps.append(f"the run of task {name} can't be understood: {type(error).__name__}")
    if len(named) > _MAX_TRAININGS:
        gaps.append(
            f"of {len(named)} training tasks the first {_MAX_TRAININGS} are shown; `muster report FOLDER` shows each"
        )
    return tuple(found)
