"""What the owner of a sweep takes from an earlier life of it, and the folder of a member that runs again."""

import os
from pathlib import Path

import pytest

from kit.records import lines
from kit.values import run_plan
from torchmuster.core.files.layout import RunDir
from torchmuster.multirun.sweep.members import create_sweep_dir, prepare_member
from torchmuster.multirun.sweep.owner import SweepOwner
from torchmuster.multirun.sweep.plan import SweepPlan


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    run = run_plan(run_id="s", cwd=str(tmp_path))
    return SweepPlan(run=run, names=("n",), members=(("0",), ("1",)), slots=2)


def begun(number, attempt):
    return {"event": "member_started", "time": "t", "member": number, "attempt": attempt}


def test_a_user_who_goes_on_with_a_sweep_gets_all_members_again_that_have_not_succeeded(plan):
    run_dir = create_sweep_dir(plan)
    lines(run_dir.events, [begun(0, 0), begun(1, 4)])
    owner = SweepOwner(plan, RunDir(run_dir.path), lambda sentence: None)
    assert owner._settle_earlier() == {}


@pytest.mark.parametrize("has_ended", [True, False])
def test_only_a_member_that_has_not_ended_may_have_a_job_that_still_runs(plan, has_ended):
    run_dir = create_sweep_dir(plan)
    member, attempt = prepare_member(run_dir, plan, 0)
    assert attempt == 0
    Path(member.job).write_text("{}")
    if has_ended:
        Path(member.result).write_text("{}")
    prepare_member(run_dir, plan, 0)
    assert os.path.exists(member.job) is not has_ended
    assert not os.path.exists(member.result)
