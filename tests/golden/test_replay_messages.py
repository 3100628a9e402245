"""What `muster replay` says where a step can't be made again, word for word, before anything starts."""

import hashlib
import os
import sys

import pytest
from test_bad_input import refused

from kit.records import lines
from kit.transcripts import read_sections
from kit.values import run_plan, worker_end
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec, contract
from torchmuster.core.model.failure import EndKind, PythonError
from torchmuster.core.model.plan import NodeSetup

FILE = "replays.txt"
RUN_ID = "20260101-000000-train-ab12"
SCRIPT = "raise SystemExit('this must never run')\n"
CASES = {
    "misspelled_run": "replay trian-ab12",
    "step_before_the_first": "replay train-ab12 --step 0",
    "step_that_was_never_made": "replay train-ab12 --step 400",
    "no_snapshot_before_it": "replay train-ab12 --step 50",
    "rank_outside": "replay train-ab12 --rank 4",
    "code_that_has_changed": "replay train-ab12",
    "snapshots_out_of_sight": "replay train-ab12",
    "script_without_the_library": "replay train-ab12 --step 3",
    "nothing_has_failed": "replay train-ab12",
    "replay_of_a_replay": "replay train-ab12",
    "workflow": "replay train-ab12",
}
NOT_FOUND = ("misspelled_run", "no_snapshot_before_it", "snapshots_out_of_sight")


def plan_of(work, *environment):
    return run_plan(
        2,
        run_id=RUN_ID,
        target="train.py",
        python=(sys.executable,),
        cwd=str(work),
        workers_per_node=(2,),
        node_setup=NodeSetup(environment=environment),
    )


def failure():
    error = PythonError(
        type_name="ValueError", message="no", where="train.py:1", traceback="ValueError: no\n"
    )
    return worker_end(EndKind.EXCEPTION, rank=2, node="n2", elapsed_s=9.0, error=error, step=311)


@pytest.fixture
def place(tmp_path, request):
    """A run of 4 ranks that has failed in step 312, with three snapshots."""
    case, work = request.node.callspec.params["name"], tmp_path / "work"
    run_dir = RunDir(str(tmp_path / "home" / "runs" / RUN_ID))
    work.mkdir()
    os.makedirs(run_dir.path)
    (work / "train.py").write_text("pass\n" if case == "code_that_has_changed" else SCRIPT)
    own = ((contract.REPLAY_VARIABLE, "{}"),) if case == "replay_of_a_replay" else ()
    plan = plan_of(work, *own)
    name = run_dir.workflow if case == "workflow" else run_dir.plan
    lines(name, [codec.to_plain(plan)])
    if case != "script_without_the_library":
        rows = [{"event": "resumed", "step": 0, "world_size": 4, "folder": run_dir.snapshots}]
        rows += [{"event": "save", "step": step} for step in (100, 200, 300)]
        lines(run_dir.training, ({"time": "2026-01-01T00:00:02", **row} for row in rows))
    code = {"files": [{"path": "train.py", "sha256": hashlib.sha256(SCRIPT.encode()).hexdigest()}]}
    nodes = [{"node": "n1", "ranks": "0,1"}, {"node": "n2", "ranks": "2,3"}]
    events = [
        {"event": "attempt_started", "attempt": 0, "world_size": 4, "nodes": nodes},
        {"event": "worker_ended", "attempt": 0, "rank": 0, "code": code},
    ]
    if case != "nothing_has_failed":
        cause = codec.to_plain(failure())
        events.append({"event": "attempt_failed", "attempt": 0, "cause": cause})
    lines(run_dir.events, ({"time": "2026-01-01T00:00:01", **event} for event in events))
    if case != "snapshots_out_of_sight":
        for step in (100, 200, 300):
            os.makedirs(os.path.join(run_dir.snapshots, f"step-{step:09d}"))
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_a_step_that_can_t_be_made_again_is_refused_in_these_words(name, place, golden):
    done = refused(place, CASES[name], 4 if name in NOT_FOUND else 2)
    stderr = done.stderr.replace(str(place), "$TMP")
    golden(FILE, name, f"$ muster {CASES[name]}\n{stderr}exit {done.returncode}\n")


@pytest.mark.parametrize("name", CASES)
def test_every_refusal_says_what_to_do(name):
    lines = read_sections(FILE)[name].splitlines()[1:-1]
    assert lines[0].startswith("error: ")
    assert any(line.startswith(("hint: ", "  because: ")) for line in lines)
