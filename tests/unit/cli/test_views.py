import os

from torchmuster.cli.views import identity
from torchmuster.files.atomic import write_json
from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.plan import Program, RunPlan, ScriptKind
from torchmuster.model.states import RunState
from torchmuster.owner.views.run_view import RunView


def view_of(tmp_path, **fields):
    run_dir = RunDir(str(tmp_path / "20260101-000000-train-ab12"))
    os.makedirs(run_dir.path)
    program = Program(
        kind=ScriptKind.FILE, target="/code/train.py", args=("--lr", "1"), python=("py",), cwd="/"
    )
    plan = RunPlan(
        run_id="20260101-000000-train-ab12",
        program=program,
        min_nodes=1,
        max_nodes=1,
        workers_per_node=(1,),
    )
    write_json(run_dir.plan, codec.to_plain(plan))
    given = {"state": RunState.WAITING, "plan": plan, "result": None, "events": ()}
    return RunView(run_id=plan.run_id, run_dir=run_dir, **{**given, **fields})


def test_what_is_cancelled_is_named_with_its_script_state_and_job(tmp_path):
    view = view_of(tmp_path)
    write_json(view.run_dir.job, {"engine": "slurm", "job_id": "10", "chain": ["11"]})

    named = "train-ab12 (train.py, waiting, job 10, 11 of slurm)"
    assert identity(view) == named


def test_what_is_cancelled_on_this_machine_is_named_without_a_job(tmp_path):
    view = view_of(tmp_path, state=RunState.RUNNING)

    assert identity(view) == "train-ab12 (train.py, running)"
