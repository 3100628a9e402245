import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kit.values import run_plan, run_result
from torchmuster.core.cli.main import main
from torchmuster.core.files.atomic import write_json
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.states import RunState
from torchmuster.core.owner.create import write_owner
from torchmuster.launcher.cli.views import identity
from torchmuster.launcher.ui.run_lines import status_rows
from torchmuster.launcher.views.live import LiveReader
from torchmuster.launcher.views.run_view import RunView

RUN_ID = "20260101-000000-train-ab12"


def view_of(tmp_path, **fields):
    run_dir = RunDir(str(tmp_path / RUN_ID))
    os.makedirs(run_dir.path)
    plan = run_plan(run_id=RUN_ID, target="/code/train.py", args=("--lr", "1"), python=("py",))
    write_json(run_dir.plan, codec.to_plain(plan))
    given = {"state": RunState.WAITING, "plan": plan, "result": None}
    return RunView(run_id=plan.run_id, run_dir=run_dir, **{**given, **fields})


def test_what_is_cancelled_is_named_with_its_script_state_and_job(tmp_path):
    view = view_of(tmp_path)
    write_json(view.run_dir.job, {"engine": "slurm", "job_id": "10", "chain": ["11"]})

    named = "train-ab12 (train.py, waiting, job 10, 11 of slurm)"
    assert identity(view) == named


def test_what_is_cancelled_on_this_machine_is_named_without_a_job(tmp_path):
    view = view_of(tmp_path, state=RunState.RUNNING)

    assert identity(view) == "train-ab12 (train.py, running)"


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A run with a plan and one line in its log, which has ended without a result."""
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    os.makedirs(tmp_path / "runs")
    made = view_of(tmp_path / "runs").run_dir
    os.makedirs(os.path.dirname(made.rank_log(0, 0)))
    Path(made.rank_log(0, 0)).write_text("step 1\n")
    return made


@pytest.fixture
def muster(capsys):
    """Run a command; return what it has printed."""

    def run(words):
        with pytest.raises(SystemExit):
            main(words.split())
        return "".join(capsys.readouterr())

    return run


def test_a_run_of_a_removed_engine_is_shown(run_dir, muster, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    write_json(run_dir.job, {"engine": "torque", "job_id": "10.server"})
    result = run_result(run_id=os.path.basename(run_dir.path), elapsed_s=2.0)
    write_json(run_dir.result, codec.to_plain(result))

    assert "succeeded" in muster("status train")
    assert "step 1" in muster("logs train")


@pytest.mark.parametrize("world_size", ["1e400", '"many"', "null", "-1", "[2]", "9" * 400])
def test_a_number_of_workers_that_is_none_is_not_shown(run_dir, muster, world_size):
    started = '{"time":"2026-01-01T00:00:00Z","event":"attempt_started","attempt":0,"num_nodes":1'
    Path(run_dir.events).write_text(f'{started},"world_size":{world_size}}}\n')

    assert muster("logs last") == "step 1\n"
    row = muster("ps").splitlines()[-1].split()
    assert row[row.index("local") + 1] == "-"
    rows = muster("status last").partition("ATTEMPT")[2].splitlines()
    assert rows[1].split() == ["0", "-"]


@pytest.mark.parametrize(
    "words", ["ps", "status last", "top --once", "top last --once", "wait last"]
)
def test_a_pipe_in_place_of_a_record_holds_no_command(run_dir, muster, words):
    os.mkfifo(run_dir.events)

    assert "train-ab12" in muster(words)


def test_a_pipe_in_place_of_a_log_is_refused(run_dir, muster):
    os.unlink(run_dir.rank_log(0, 0))
    os.mkfifo(run_dir.rank_log(0, 0))

    assert "not a file" in muster("logs last")


@pytest.mark.parametrize(
    ("more", "shown"),
    [("", "begin\n 2%\nend\n 5%\n"), (" -n 3", " 2%\nend\n 5%\n"), (" -n 1", " 5%\n")],
)
def test_of_a_progress_bar_a_log_shows_the_last_state_as_a_line(run_dir, muster, more, shown):
    log = "begin\n\r 1%\r 2%\nend\n\r 3%\r 4%\r 5%"
    Path(run_dir.rank_log(0, 0)).write_bytes(log.encode())

    assert muster(f"logs last{more}") == shown


@pytest.mark.parametrize("words", ["logs last", "logs last -f", "ps", "status last"])
def test_a_command_whose_reader_has_gone_ends_without_a_word(run_dir, words, monkeypatch, capfd):
    Path(run_dir.rank_log(0, 0)).write_text("step\n" * 100_000)
    Path(run_dir.result).write_text("[1]")  # it is over
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with open(write_fd, "w", closefd=False) as nobody:
        monkeypatch.setattr("sys.stdout", nobody)
        with pytest.raises(SystemExit) as end:
            main(words.split())
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), write_fd)  # for what its buffer holds
    os.close(write_fd)

    assert end.value.code == 141
    assert capfd.readouterr().err == ""


def test_who_waits_for_a_run_with_a_damaged_result_is_told_of_the_damage(run_dir, muster):
    Path(run_dir.result).write_text("[1]")

    told = muster("wait last")

    assert f"at: {run_dir.result}\n" in told
    assert "because: result.json is damaged" in told


@pytest.mark.parametrize("left", [None, "", '{"run_id": "2', "[1]"])
def test_a_plan_that_can_not_be_read_is_said(run_dir, muster, left):
    os.unlink(run_dir.plan)
    if left is not None:
        Path(run_dir.plan).write_text(left)
    write_owner(run_dir)  # it lives

    assert "(plan.json can't be read)" in muster("ps")
    assert "problem  plan.json is missing, half written" in muster("status train-ab12")
    assert "plan.json is missing, half written" in muster("top --once")


@pytest.mark.parametrize(
    ("values", "said", "is_in_list"),
    [
        ({"acc": 0.5, "loss": math.nan}, "loss nan (since step 100)", True),
        ({"acc": 0.5, "loss": -math.inf}, "loss -inf (since step 100)", True),
        ({"loss": 0.5, "valid_loss": math.nan}, "valid_loss nan (since step 100)", False),
        ({"f1": math.nan}, "f1 nan (since step 100)", False),
        ({"loss": 0.5}, "", False),
    ],
)
def test_a_loss_that_is_not_finite_is_said_by_all_views(run_dir, muster, values, said, is_in_list):
    with open(run_dir.training, "w") as record:
        for step, logged in [(50, dict.fromkeys(values, 1.0)), (100, values), (150, values)]:
            line = {"time": "2027-01-15T08:00:10Z", "event": "metrics", "step": step}
            record.write(json.dumps({**line, "values": logged}) + "\n")
    write_json(run_dir.result, codec.to_plain(run_result()))
    in_list = said if is_in_list else ""
    views = {"ps": in_list, "top --once": in_list, "status last": said}
    for command, words in {**views, "top last --once": said.partition(" ")[2]}.items():
        shown = muster(command)
        assert words in shown
        assert ("(since step 100)" in shown) == bool(words)
        json.loads(muster(f"{command.removesuffix(' --once')} --json"), parse_constant=pytest.fail)
    live = replace(LiveReader(run_dir).read(), is_final=False)
    assert in_list in status_rows(live, 120, 1)[0]
