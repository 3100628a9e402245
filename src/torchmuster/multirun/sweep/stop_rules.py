"""Rules that stop the worst members early: Optuna's, or the user's own.

Optuna is imported only if one of its rules is used (`pip install torchmuster[sweep]`).
"""

import importlib
import os
import sys
from functools import partial
from typing import Any, Protocol

from torchmuster.core.model.text import did_you_mean
from torchmuster.errors import UsageError
from torchmuster.multirun.sweep.plan import MetricChoice, MetricGoal

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
