"""Compare two runs: code, environment, data order, speed, loss, and the first step that differs."""

import difflib
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.text import span
from torchmuster.core.owner.record import RecordTail
from torchmuster.launcher.model.run import mapped, number, text, whole
from torchmuster.report.story import (
    FORM,
    RankTotals,
    SeriesStory,
    Story,
    figure,
    node_time,
    percent,
)

_MAX_LINES = 2000  # of the difference between two differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One property of both runs, as text; empty if it is not known."""

    what: str
    one: str
    other: str

    @property
    def differs(self) -> bool:
        """Return whether both are known and not the same."""
        return bool(self.one and self.other) and self.one != self.other


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """Where the metrics of two runs start to differ.

    Attributes:
        step: The first step that both have recorded at which a metric of both differs, or only one
            of them has it.
        one, other: The values; `nan`, `inf` or `-inf` as strings, None where the run has none.
        equal_until: The last common step before it, at which all metrics are the same; None if
            the first common step differs.
        num_common: The number of steps that both runs have recorded.
    """

    step: int
    metric: str
    one: float | str | None
    other: float | str | None
    equal_until: int | None
    num_common: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How two runs differ; each list has all that was compared, also what is the same.

    Attributes:
        code_difference: The diff between the runs' differences from their commits, as lines.
        first: The first difference; None if no common step differs, or there is none.
        num_common: The number of steps that both have recorded.
        sentence: A summary in one sentence.
    """

    form: int = FORM
    one: str
    other: str
    code: tuple[Compared, ...]
    code_difference: tuple[str, ...]
    environment: tuple[Compared, ...]
    data: tuple[Compared, ...]
    speed: tuple[Compared, ...]
    loss: tuple[Compared, ...]
    first: FirstDifference | None
    num_common: int
    sentence: str


Value = float | str  # a string if it is not finite
_MUCH_SLOWER = 1.2


@dataclass(frozen=True, slots=True)
class Point:
    """A recorded value: the mean of the steps after `since`, unless the script logged it itself."""

    value: Value
    since: int


Points = dict[int, dict[str, Point]]


def compare(one: Story, other: Story) -> Comparison:
    """Return how two runs differ; read their metrics again, because a story thins long series."""
    mine, theirs = (
        _points(RecordTail(RunDir(story.folder).training).read()[0]) for story in (one, other)
    )
    first, num_common = first_difference(mine, theirs)
    code, environment = _code(one, other), _environment(one, other)
    data, speed, loss = (tuple(_joined(rows(one), rows(other))) for rows in (_data, _speed, _loss))
    return Comparison(
        one=one.name,
        other=other.name,
        code=code,
        code_difference=_between(one, other),
        environment=environment,
        data=data,
        speed=speed,
        loss=loss,
        first=first,
        num_common=num_common,
        sentence=_sentence(first, num_common, code=code, environment=environment, data=data)
        + _only_in_one(one.name, other.name, _names(mine), _names(theirs))
        + _how_much_slower(one, other),
    )


def first_difference(one: Points, other: Points) -> tuple[FirstDifference | None, int]:
    """Return the first step at which a metric of both differs, and the number of common steps."""
    common = sorted(one.keys() & other.keys())
    of_both = _names(one) & _names(other)  # metrics of only one run are reported separately
    equal_until = None
    compared = {
        step
        for step in common
        for name in of_both
        if _comparable(one[step].get(name), other[step].get(name))
    }
    for step in common:
        for name in [n for n in dict.fromkeys((*one[step], *other[step])) if n in of_both]:
            a, b = one[step].get(name), other[step].get(name)
            if not _comparable(a, b):
                continue
            if (a and a.value) != (b and b.value):
                found = FirstDifference(
                    step=step,
                    metric=name,
                    one=a.value if a is not None else None,
                    other=b.value if b is not None else None,
                    equal_until=equal_until,
                    num_common=len(compared),
                )
                return found, len(compared)
        equal_until = step if step in compared else equal_until
    return None, len(compared)


def _comparable(a: Point | None, b: Point | None) -> bool:
    """Say whether two values, or a value and its absence, are of the same steps.

    They are not where one run was continued between two of its values, or records more often.
    """
    return (a is not None or b is not None) and (a is None or b is None or a.since == b.since)


def _names(points: Points) -> set[str]:
    return {name for values in points.values() for name in values}


def _points(events: Iterable[Mapping[str, Any]]) -> Points:
    """Return the metrics by step; for a step that was done again, the last."""
    found: Points = {}
    begun, newest = 0, dict[str, int]()
    for event in events:
        step, kind = whole(event.get("step")), event.get("event")
        if step is None:
            continue
        if kind == "resumed":
            begun, newest = step, {}
            found = {one: points for one, points in found.items() if one <= step}
        elif kind == "metrics":
            values = mapped(event.get("values"))
            by_name = {text(name, 80): _value(value) for name, value in values.items()}
            known = {name: value for name, value in by_name.items() if value is not None}
            points = {name: Point(v, newest.get(name, begun)) for name, v in known.items()}
            found.setdefault(step, {}).update(points)
            newest |= dict.fromkeys(known, step)
    return found


def _value(value: Any) -> Value | None:
    """Return a number, or a string if it is not finite; None if it is not a number."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return number(value)


def value_text(value: Value | None) -> str:
    """Return a metric's value as text."""
    return value if isinstance(value, str) else figure(value) if value is not None else "none"


def _sentence(first: FirstDifference | None, num_common: int, **parts: Sequence[Compared]) -> str:
    named = {"code": "code", "environment": "command or environment", "data": "order of the data"}
    differing = [named[name] for name, rows in parts.items() if any(row.differs for row in rows)]
    same = "code, command and order of the data are the same"
    if not parts["code"]:
        same = "command and order of the data are the same, the code is not known"
    why = f"different: {', '.join(differing)}" if differing else f"{same}, as far as is recorded"
    if first is not None:
        until = (
            f"the same until step {first.equal_until:,}, and "
            if first.equal_until is not None
            else ""
        )
        return f"The metrics are {until}different from step {first.step:,} on ({first.metric}: {value_text(first.one)} and {value_text(first.other)}); {why}."
    if num_common:
        return (
            f"The metrics are the same at all {num_common:,} steps that both have recorded; {why}."
        )
    return f"Nothing can be compared: no value of the same steps was recorded by both; {why}."


def _only_in_one(one: str, other: str, mine: set[str], theirs: set[str]) -> str:
    """Return sentences about metrics that only one run records; empty if a run has no metrics."""
    if not mine or not theirs:
        return ""
    lines = [
        f" Only {name} records {', '.join(sorted(names)[:8])}."
        for name, names in ((one, mine - theirs), (other, theirs - mine))
        if names
    ]
    return "".join(lines)


def _code(one: Story, other: Story) -> tuple[Compared, ...]:
    def rows(story: Story) -> dict[str, str]:
        code = story.what.code
        files = {f"file {path}": digest[:12] for path, digest, _ in story.what.ran}
        if code is None:
            return files
        changed = (
            f"{code.num_changed}: {', '.join(code.changed[:20])}" if code.num_changed else "none"
        )
        return {
            "commit": code.commit,
            "branch": code.branch,
            "changed files": changed,
            "folder of the code": code.root,
            **files,
        }

    found = _joined(rows(one), rows(other))
    mine, theirs = one.what.code, other.what.code
    if mine is not None and theirs is not None:
        same = mine.difference == theirs.difference
        here, there = ("one" if code.difference else "none" for code in (mine, theirs))
        there = there if same or here != there else "another one"
        found.append(Compared(what="difference from the commit", one=here, other=there))
    return tuple(found)


def _between(one: Story, other: Story) -> tuple[str, ...]:
    mine, theirs = one.what.code, other.what.code
    if mine is None or theirs is None or mine.difference == theirs.difference:
        return ()
    lines = difflib.unified_diff(
        mine.difference.splitlines()[:_MAX_LINES],
        theirs.difference.splitlines()[:_MAX_LINES],
        one.name,
        other.name,
        lineterm="",
    )
    return tuple(lines)[:_MAX_LINES]


def _environment(one: Story, other: Story) -> tuple[Compared, ...]:
    def rows(story: Story) -> dict[str, str]:
        what = story.what
        found = {
            "command": " ".join(what.command),
            "folder": what.folder,
            "interpreter": what.interpreter,
            "who": f"{what.user} on {what.host}",
            "where": what.engine,
            "nodes": what.num_nodes,
            "workers per node": ", ".join(map(str, what.workers_per_node)),
            "torchmuster": what.torchmuster,
        }
        for row in what.software[:1]:
            found |= {name: value for name, value in row.items() if name not in ("node", "nodes")}
        found |= {f"variable {name}": value for name, value in what.environment}
        found |= {f"limit {name}": value for name, value in what.limits}
        return found

    mine, theirs = rows(one), rows(other)
    for name in [name for name in (*mine, *theirs) if name.startswith("variable ")]:
        mine.setdefault(name, "not set")
        theirs.setdefault(name, "not set")
    return (*_joined(mine, theirs), *_packages(one, other))


def _packages(one: Story, other: Story) -> list[Compared]:
    """Return the packages that differ in version or presence; empty if one list is not known."""
    mine, theirs = (
        dict(package.split("==", 1) for package in story.what.packages if "==" in package)
        for story in (one, other)
    )
    if not mine or not theirs:
        return []
    names = [name for name in sorted(mine | theirs) if mine.get(name) != theirs.get(name)]
    same = Compared(what="packages", one=f"{len(mine)}", other=f"{len(theirs)}")
    rows = [
        Compared(
            what=f"package {name}",
            one=mine.get(name, "not installed"),
            other=theirs.get(name, "not installed"),
        )
        for name in names
    ]
    return [same, *rows]


def _data(story: Story) -> dict[str, str]:
    training = story.training
    found = dict(training.order) if training is not None else {}
    for epoch in training.epochs[:3] if training is not None else ():
        if epoch.samples is not None:
            found[f"samples of epoch {epoch.epoch}"] = f"{epoch.samples}"
    return found


def _speed(story: Story) -> dict[str, str]:
    training, cost = story.training, story.cost
    step_s = _step_s(story)
    slowest = story.slowest
    none = "none stands out" if step_s is not None else ""
    return {
        "state": story.ending.state,
        "took": span(story.ending.elapsed_s),
        "attempts": str(story.num_attempts),
        "steps": f"{training.step:,}" if training is not None else "",
        "median time of a step": span(step_s) if step_s is not None else "",
        "goodput": percent(cost.goodput, 1),
        "node time": node_time(cost.held_s),
        "slowest rank": _slowest(slowest) if slowest is not None else none,
    }


def _how_much_slower(one: Story, other: Story) -> str:
    """Return a sentence if a step, or without steps the whole run, took much longer in one of them."""
    times = [_step_s(one), _step_s(other)]
    what = "A step of"
    if None in times:
        times, what = [one.ending.elapsed_s, other.ending.elapsed_s], "All of"
    first, second = times
    if not first or not second or max(first, second) < _MUCH_SLOWER * min(first, second):
        return ""
    slow, quick = (one, other) if first > second else (other, one)
    ratio = max(first, second) / min(first, second)
    who = f"; its slowest rank is {_slowest(slow.slowest)}" if slow.slowest is not None else ""
    took = f"{span(max(first, second))} and {span(min(first, second))}"
    return f" {what} {slow.name} took {ratio:.1f} times as long as of {quick.name} ({took}){who}."


def _step_s(story: Story) -> float | None:
    series = story.training.step_time if story.training is not None else None
    times = [value for value in series.values if value is not None] if series is not None else []
    return statistics.median(times) if times else None


def _slowest(slowest: RankTotals) -> str:
    return f"{slowest.rank} on {slowest.node}, {percent(slowest.over_median)} over the median"


def _loss(story: Story) -> dict[str, str]:
    found: dict[str, str] = {}
    for series in story.training.series if story.training is not None else ():
        found[f"last {series.name}"] = _last(series)
        known = [v for v in series.values if v is not None]
        found[f"least {series.name}"] = f"{min(known):.6g}" if known else ""
    return found


def _last(series: SeriesStory) -> str:
    if series.bad_since is not None:
        return f"{series.bad_since[1]} since step {series.bad_since[0]:,}"
    known = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if v is not None]
    return f"{known[-1][1]:.6g} at step {known[-1][0]:,}" if known else ""


def _joined(one: Mapping[str, str], other: Mapping[str, str]) -> list[Compared]:
    names = dict.fromkeys([*one, *other])
    return [Compared(what=name, one=one.get(name, ""), other=other.get(name, "")) for name in names]
