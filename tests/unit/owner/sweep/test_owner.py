"""What the owner of a sweep takes from an earlier life of it."""

import json

import pytest

from torchmuster.files.layout import RunDir
from torchmuster.model.plan import Program, RunPlan, ScriptKind
from torchmuster.model.states import RunState
from torchmuster.owner.create import create_sweep_dir
from torchmuster.owner.sweep.owner import NOT_AGAIN, SweepOwner
from torchmuster.spec.sweep_plan import SweepPlan


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    program = Program(
        kind=ScriptKind.FILE, target="t.py", args=(), python=("python3",), cwd=str(tmp_path)
    )
    run = RunPlan(run_id="s", program=program, min_nodes=1, max_nodes=1, workers_per_node=(1,))
    return SweepPlan(run=run, names=("n",), members=(("0",), ("1",)), slots=2)


class Silent:
    def say(self, sentence):
        pass


def begun(number, attempt):
    return {"event": "member_started", "time": "t", "member": number, "attempt": attempt}


def settled_of(plan, events, done):
    run_dir = create_sweep_dir(plan)
    with open(run_dir.events, "w") as file:
        file.writelines(f"{json.dumps(event)}\n" for event in events)
    run_dir = RunDir(run_dir.path)
    owner = SweepOwner(plan, run_dir, Silent(), done=done)
    return owner._settle_earlier()


def test_a_member_that_was_lost_with_the_first_pod_runs_again_but_not_for_ever(plan):
    goes_on = (*NOT_AGAIN, RunState.FAILED)
    assert settled_of(plan, [begun(0, 0), begun(1, 4)], goes_on) == {1: RunState.LOST}


def test_a_user_who_wants_it_gets_any_member_again(plan):
    assert settled_of(plan, [begun(0, 0), begun(1, 4)], NOT_AGAIN) == {}
