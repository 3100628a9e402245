"""Read the story of a sweep: its members with their values, the metric, and how each stands; the best first."""

import math
import time

import torchmuster
from torchmuster.files.layout import short_id
from torchmuster.model.record.loose import number, text
from torchmuster.model.states import RunState
from torchmuster.owner.views.run_view import RunView
from torchmuster.owner.views.sweep_view import MemberView, SweepRun, SweepView
from torchmuster.report.read import read_what
from torchmuster.report.story import Cost, Ending, MemberTold, Story, SweepTold

_MAX_MEMBERS = 10_000


def read_sweep_story(view: SweepRun) -> Story:
    """Return the story of a sweep."""
    sweep, gaps = view.sweep, []
    if sweep is None:
        gaps.append("sweep.json can't be read: what was tried is not known")
    events = view.record
    began, ended = events.began, events.last_at
    is_final = view.state.is_final
    return Story(
        made=time.time(),
        made_by=torchmuster.__version__,
        kind="sweep",
        run_id=text(view.run_id, 200),
        name=text(short_id(view.run_id), 200),
        folder=text(view.run_dir.path),
        what=read_what(view, _plan(sweep), events, gaps),
        ending=_ending(view, sweep, began, ended),
        began=began,
        ended=ended if is_final else None,
        cost=Cost(),
        sweep=_told(sweep) if sweep is not None else None,
        gaps=tuple(gaps),
    )


def _plan(sweep: SweepView | None) -> dict[str, object]:
    """Return what a member is, before its values, in the form of `plan.json`."""
    from torchmuster.model import codec

    return dict(codec.to_plain(sweep.plan.run)) if sweep is not None else {}


def _ending(
    view: RunView, sweep: SweepView | None, began: float | None, ended: float | None
) -> Ending:
    until = ended if view.state.is_final else time.time()
    report = view.result.report if view.result is not None else None
    lacking = view.state.is_final and view.state is not RunState.SUCCEEDED
    return Ending(
        state=view.state.value,
        is_final=view.state.is_final,
        exit_code=view.result.exit_code if view.result is not None else None,
        elapsed_s=until - began if began is not None and until is not None else None,
        sentence=text(report.error if report is not None else _counted(sweep)),
        because=tuple(text(line) for line in (report.because if report is not None else ())[:60]),
        hint=text(report.hint or "") if report is not None else "",
        go_on=f"continue with: muster restart {text(short_id(view.run_id), 200)}"
        if lacking
        else "",
    )


def _counted(sweep: SweepView | None) -> str:
    if sweep is None:
        return ""
    counted = sweep.counted()
    return ", ".join(f"{num} {state.value}" for state, num in counted.items())


def _told(sweep: SweepView) -> SweepTold:
    metric, best = sweep.plan.metric, sweep.best
    ordered = sorted(sweep.members, key=lambda member: _order(sweep, member))
    return SweepTold(
        names=tuple(text(name, 200) for name in sweep.plan.names),
        metric=text(metric.name, 200) if metric is not None else "",
        goal=metric.goal.value if metric is not None else "",
        best=best.number if best is not None else None,
        counted=tuple((state.value, num) for state, num in sweep.counted().items()),
        members=tuple(_member(sweep, member) for member in ordered[:_MAX_MEMBERS]),
    )


def _order(sweep: SweepView, member: MemberView) -> tuple[bool, float, int]:
    """Return what sorts members: the best first, those without a number last, equal ones by their numbers."""
    metric, value = sweep.plan.metric, member.value
    if metric is None or value is None or math.isnan(value):
        return True, 0.0, member.number
    return False, -value if metric.is_better(1.0, 0.0) else value, member.number


def _member(sweep: SweepView, member: MemberView) -> MemberTold:
    value = member.value
    return MemberTold(
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
