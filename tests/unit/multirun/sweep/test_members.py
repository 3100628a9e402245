"""The folder of a member, before it runs again."""

import os
from pathlib import Path

import pytest

from kit.values import run_plan
from torchmuster.multirun.sweep.members import create_sweep_dir, prepare_member
from torchmuster.multirun.sweep.plan import SweepPlan


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    run = run_plan(run_id="s", target="fit.py", cwd=str(tmp_path))
    plan = SweepPlan(run=run, names=("n",), members=(("0",),), slots=1)
    return plan, create_sweep_dir(plan)


@pytest.mark.parametrize("has_ended", [True, False])
def test_only_a_member_that_has_not_ended_may_have_a_job_that_still_runs(sweep, has_ended):
    plan, run_dir = sweep
    member, attempt = prepare_member(run_dir, plan, 0)
    assert attempt == 0
    Path(member.job).write_text("{}")
    if has_ended:
        Path(member.result).write_text("{}")
    prepare_member(run_dir, plan, 0)
    assert os.path.exists(member.job) is not has_ended
    assert not os.path.exists(member.result)
