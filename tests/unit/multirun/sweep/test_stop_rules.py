import pytest

from torchmuster.multirun.sweep.metric import load_rule
from torchmuster.multirun.sweep.plan import MetricChoice, MetricGoal

pytest.importorskip("optuna", reason="the rules need Optuna (extra `sweep`)")


@pytest.mark.parametrize("goal", [MetricGoal.MIN, MetricGoal.MAX])
def test_the_median_waits_for_the_first_member_that_completes(goal):
    rule = load_rule("median", MetricChoice(name="loss", goal=goal))
    sign = 1.0 if goal is MetricGoal.MIN else -1.0
    stopped = []
    for member in range(4):
        ends = [rule.report(member, step, sign * (member + 1.0)) for step in (1, 2, 3)]
        stopped.append(any(ends))
        rule.ended(member, not any(ends))
    assert stopped == [False, True, True, True]
