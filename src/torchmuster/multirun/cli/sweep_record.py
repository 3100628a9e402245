"""Show a sweep in `muster status` and at its end: one table of all members."""

import math
import time
from typing import TYPE_CHECKING, Any

from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import span
from torchmuster.core.model.verdict import Result
from torchmuster.errors import NotFoundError, UsageError
from torchmuster.launcher.cli.echo import echo, echo_json
from torchmuster.launcher.ui.table import render_table
from torchmuster.multirun.views.sweep_view import MemberView, SweepRun, SweepView

if TYPE_CHECKING:
    from torchmuster.core.files.terminal import TerminalVoice

_MAX_ROWS = 40
_CELL = 40
_WHY = 70
# Members that get a row first when there are too many; the best of the rest follow.
_FIRST = (RunState.RUNNING, RunState.FAILED, RunState.LOST, RunState.PREEMPTED)


def check_logs(view: "SweepRun", task: str | None) -> None:
    """Refuse to show logs of a sweep.

    Raises:
        NotFoundError: Always, because only its members write logs.
    """
    name = short_id(view.run_id)
    what = f"the sweep {name} writes no log of its own: each member does"
    raise NotFoundError(what, fix=f"muster logs {name}.0; muster status {name}")


def check_replay(view: "SweepRun") -> None:
    """Refuse to replay a step of a sweep.

    Raises:
        UsageError: Always, because only its members have steps.
    """
    name = short_id(view.run_id)
    raise UsageError(
        f"{name} is a sweep: its members have steps",
        fix=f"muster replay {name}.NUMBER; `muster status {name}` lists them",
    )


def print_status(view: "SweepRun", *, as_json: bool) -> int:
    """Print the state of a sweep: its members with their values, states and metric."""
    from torchmuster.launcher.cli.record import print_account
    from torchmuster.launcher.views.account import account_of

    sweep = view.sweep_view()
    if as_json:
        echo_json(_plain(view, sweep))
        return 0
    name = short_id(view.run_id)
    echo(f"sweep    {name}")
    echo(f"state    {view.state.value}: {counted(sweep)}")
    echo(f"command  {' '.join(sweep.plan.run.program.display())}")
    echo(f"folder   {view.run_dir.path}")
    print_account(account_of(view, time.time()))
    if (best := describe_best(sweep)) is not None:
        echo(f"best     {best}")
    if (missing := describe_missing_metric(sweep, view.run_dir)) is not None:
        echo(f"problem  {missing}")
    echo()
    echo(members_table(sweep), nl=False)
    if view.state.is_final and view.state is not RunState.SUCCEEDED:
        echo(
            f"\nhint: muster restart {name} goes on with the members that have not succeeded",
            err=True,
        )
    return 0


def counted(sweep: "SweepView") -> str:
    """Return the number of members in each state: `998 succeeded, 2 failed`."""
    return ", ".join(f"{number} {state.value}" for state, number in sweep.counted().items())


def describe_best(sweep: "SweepView") -> str | None:
    """Return the best value so far with its member and values, in words; None without any."""
    best, metric = sweep.best, sweep.plan.metric
    if best is None or metric is None or best.value is None:
        return None
    words = sweep.plan.words_of(best.number)
    return f"{metric.name} {best.value:.6g}: member {best.number}, {words}"


def describe_missing_metric(sweep: "SweepView", run_dir: RunDir) -> str | None:
    """Return a sentence if members have succeeded but none reported the metric; otherwise None.

    It names the metrics that were reported instead.
    """
    from torchmuster.launcher.views.training import training_of
    from torchmuster.multirun.sweep.members import member_dir

    metric, done = sweep.plan.metric, [m for m in sweep.members if m.state is RunState.SUCCEEDED]
    if metric is None or not done or any(member.value is not None for member in sweep.members):
        return None
    training = training_of(member_dir(run_dir, sweep.plan, done[0].number))
    names = ", ".join(f"`{name}`" for name in training.values) if training is not None else ""
    ways = f"a line `{metric.name}=0.5`, run.log, or what a function returns"
    instead = f"it has told {names}" if names else f"{ways} tells it"
    return f"no member has told `{metric.name}`: {instead}"


def members_table(sweep: "SweepView") -> str:
    """Return the table of the members; if there are many, of the most relevant ones."""
    shown = _chosen(sweep)
    metric = sweep.plan.metric
    header = ["MEMBER", "STATE", "TRY", "TIME", *sweep.plan.names]
    header += [metric.name, "STEP"] if metric is not None else []
    header.append("WHY")
    rows = []
    for member in shown:
        tries = "-" if member.attempt is None else str(member.attempt + 1)
        row = [str(member.number), member.state.value, tries]
        row.append(span(member.elapsed_s))
        row += [value[:_CELL] for value in sweep.plan.members[member.number]]
        if metric is not None:
            row.append("-" if member.value is None else f"{member.value:.6g}")
            row.append("-" if member.step is None else str(member.step))
        row.append((member.why or "")[:_WHY])
        rows.append(row)
    text = render_table(header, rows)
    left = len(sweep.members) - len(shown)
    return text + (f"and {left} more members: muster status --json has all\n" if left else "")


def _chosen(sweep: "SweepView") -> "list[MemberView]":
    members = list(sweep.members)
    if len(members) <= _MAX_ROWS:
        return members
    metric = sweep.plan.metric

    def key(member: "MemberView") -> tuple[int, float, int]:
        urgent = _FIRST.index(member.state) if member.state in _FIRST else len(_FIRST)
        value = member.value
        if metric is None or value is None or not math.isfinite(value):
            rank = math.inf
        else:
            rank = value if metric.is_better(0.0, 1.0) else -value
        return urgent, rank, member.number

    half = _MAX_ROWS // 2
    urgent = [m for m in sorted(members, key=key) if m.state in _FIRST][:half]
    rest = [m for m in sorted(members, key=key) if m not in urgent]
    return urgent + rest[: _MAX_ROWS - len(urgent)]


def _plain(view: "SweepRun", sweep: "SweepView") -> dict[str, Any]:
    members = []
    for member in sweep.members:
        plain = codec.to_plain(member)
        plain["run_id"] = sweep.plan.member_id(member.number)
        plain["values"] = sweep.plan.values_of(member.number)
        members.append(plain)
    best = sweep.best
    return {
        "run_id": view.run_id,
        "kind": "sweep",
        "state": view.state.value,
        "counts": {state.value: number for state, number in sweep.counted().items()},
        "metric": codec.to_plain(sweep.plan.metric) if sweep.plan.metric is not None else None,
        "best": best.number if best is not None else None,
        "members": members,
        "result": codec.to_plain(sweep.result) if sweep.result else None,
    }


def say_end(
    sweep: "SweepView | None", result: "Result", voice: "TerminalVoice", run_dir: RunDir
) -> None:
    """Report how a sweep has ended: the table, the failure, the best."""
    from torchmuster.core.cli.messages import paint_report, uses_colour

    if sweep is not None:
        voice.print(members_table(sweep))
    if result.report is not None:
        voice.print(paint_report(result.report, colour=uses_colour()))
    if sweep is not None:
        best = describe_best(sweep)
        more = f"; best {best}" if best is not None else ""
        voice.say(f"{counted(sweep)}, in {span(result.elapsed_s)}{more}")
        if (missing := describe_missing_metric(sweep, run_dir)) is not None:
            voice.say(missing)
    if result.state is not RunState.SUCCEEDED and result.report is None:
        voice.say(f"muster restart {short_id(result.run_id)} goes on with what has not succeeded")
