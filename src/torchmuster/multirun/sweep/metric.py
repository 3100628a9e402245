"""The metric that members are compared by: its recorded or printed values, and rules that stop the worst.

Optuna is imported only if one of its rules is used (`pip install torchmuster[sweep]`).
"""

import importlib
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.text import did_you_mean
from torchmuster.core.owner.record import DAMAGED, RecordTail, next_attempt
from torchmuster.core.plainfile import open_plain
from torchmuster.errors import UsageError
from torchmuster.multirun.sweep.plan import MetricChoice, MetricGoal

_NUMBER = r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf)"
_MOST_BYTES = 4 << 20  # of a log, in one read
_MOST_LINE = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    """One value; `step` is the library's step, or counts the log lines with a value, from 1."""

    step: int
    value: float


def metric_pattern(name: str) -> re.Pattern[str]:
    """Return a pattern for `loss=0.1`, `loss: 0.1` and `"loss": 0.1`, but not `val_loss: 0.1`."""
    return re.compile(
        rf"(?<![\w./-]){re.escape(name)}[\"']?\s*[=:]\s*({_NUMBER})(?![\w.]*\w)", re.IGNORECASE
    )


@dataclass(slots=True)
class MetricReader:
    """Reads the points of one member, each once.

    They come from the training library's record if it has the metric, otherwise from the log.

    Args:
        run_dir: The run directory of the member.
        name: The name of the metric.
    """

    run_dir: RunDir
    name: str
    newest: MetricPoint | None = None
    _record: RecordTail = field(init=False)
    _pattern: re.Pattern[str] = field(init=False)
    _is_recorded: bool = False
    _log: str | None = None
    _position: int = 0
    _rest: str = ""
    _num_lines: int = 0

    def __post_init__(self) -> None:
        self._record = RecordTail(self.run_dir.training)
        self._pattern = metric_pattern(self.name)

    def read(self) -> list[MetricPoint]:
        """Return the points added since the last call."""
        points = self._recorded()
        if not self._is_recorded:
            points = self._printed()
        if points:
            self.newest = points[-1]
        return points

    def _recorded(self) -> list[MetricPoint]:
        points: list[MetricPoint] = []
        for event in self._record.read()[0]:
            with suppress(*DAMAGED):
                values = event["values"]
                points.append(MetricPoint(step=int(event["step"]), value=float(values[self.name])))
        self._is_recorded = self._is_recorded or bool(points)
        return points

    def _printed(self) -> list[MetricPoint]:
        log = self.run_dir.rank_log(max(0, next_attempt(self.run_dir) - 1), 0)
        if log != self._log:
            self._log, self._position, self._rest, self._num_lines = log, 0, "", 0
        try:
            with open_plain(log) as file:
                size = os.fstat(file.fileno()).st_size
                if size - self._position > _MOST_BYTES:
                    self._position, self._rest = size - _MOST_BYTES, ""
                file.seek(self._position)
                data = file.read(_MOST_BYTES)
        except OSError:
            return []
        self._position += len(data)
        text = self._rest + data.decode(errors="replace")
        # A progress bar writes carriage returns.
        *lines, rest = re.split(r"[\r\n]", text)
        self._rest = rest[-_MOST_LINE:]
        return [point for line in lines if (point := self._of_line(line)) is not None]

    def last_line(self) -> list[MetricPoint]:
        """Return the point in a last, unterminated line, once the log is complete."""
        line, self._rest = self._rest, ""
        point = self._of_line(line) if line and not self._is_recorded else None
        self.newest = point or self.newest
        return [point] if point is not None else []

    def _of_line(self, line: str) -> MetricPoint | None:
        found = self._pattern.findall(line[:_MOST_LINE])
        if not found:
            return None
        self._num_lines += 1
        return MetricPoint(step=self._num_lines, value=float(found[-1]))


# Rules that stop the worst members early: Optuna's, or the user's own.


RULES = ("asha", "median")


class StopRule(Protocol):
    """Decides from the reported values which members to stop."""

    def report(self, member: int, step: int, value: float) -> bool:
        """Record a member's metric value at a step; return whether the member should be stopped."""

    def ended(self, member: int, completed: bool) -> None:
        """Record that a member has ended; `completed` is False if it failed or was stopped."""


def check_rule(text: str) -> None:
    """Check the form of a rule's name; only `load_rule` finds out whether it exists.

    Raises:
        UsageError: The name is neither one of ours nor MODULE:NAME.
    """
    module, _, name = text.partition(":")
    if text not in RULES and not (module and name):
        fix = did_you_mean(text, RULES, f"{', '.join(RULES)}, or MODULE:NAME of your own")
        raise UsageError(f"there is no rule `{text}`", where="--stop", fix=fix)


def load_rule(text: str, metric: MetricChoice) -> StopRule:
    """Return the rule that `--stop` names: `asha`, `median`, or `MODULE:NAME` of the user's.

    Raises:
        UsageError: The rule does not exist, or needs a package that is not installed.
    """
    if text in RULES:
        return _OptunaRule(text, metric)
    check_rule(text)
    module, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        rule: StopRule = getattr(importlib.import_module(module), name)(metric.goal.value)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        fix = "MODULE:NAME is called with `min` or `max`; docs/sweeps.md has an example"
        what = f"the rule `{text}` can't be made"
        raise UsageError(what, where="--stop", why=why, fix=fix) from error
    finally:
        sys.path.remove(os.getcwd())
    missing = [word for word in ("report", "ended") if not callable(getattr(rule, word, None))]
    if missing:
        raise UsageError(f"the rule `{text}` has no method `{missing[0]}`", where="--stop")
    return rule


class _OptunaRule:
    """A pruner of Optuna: each member is a trial of one study in memory."""

    def __init__(self, name: str, metric: MetricChoice) -> None:
        try:
            import optuna
        except ImportError as error:
            raise UsageError(
                f"the rule `{name}` needs Optuna",
                where=f"--stop {name}",
                why=str(error),
                fix='pip install "torchmuster[sweep]"',
            ) from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        pruners: dict[str, Any] = {
            "asha": optuna.pruners.SuccessiveHalvingPruner,
            "median": partial(optuna.pruners.MedianPruner, n_startup_trials=1),
        }
        directions = optuna.study.StudyDirection
        is_min = metric.goal is MetricGoal.MIN
        direction = directions.MINIMIZE if is_min else directions.MAXIMIZE
        sampler = optuna.samplers.RandomSampler(seed=0)
        self._optuna = optuna
        self._study = optuna.create_study(
            direction=direction, pruner=pruners[name](), sampler=sampler
        )
        self._trials: dict[int, Any] = {}

    def report(self, member: int, step: int, value: float) -> bool:
        """Record a value; return whether the pruner wants to stop the member."""
        trial = self._trials.get(member)
        if trial is None:
            trial = self._trials[member] = self._study.ask()
        trial.report(value, step)
        return bool(trial.should_prune())

    def ended(self, member: int, completed: bool) -> None:
        """End the member's trial."""
        trial = self._trials.pop(member, None)
        if trial is None:
            return
        states = self._optuna.trial.TrialState
        values = self._study.get_trials(deepcopy=False)[trial.number].intermediate_values
        if completed and values:
            self._study.tell(trial, values[max(values)])
        else:
            self._study.tell(trial, state=states.PRUNED if values else states.FAIL)
