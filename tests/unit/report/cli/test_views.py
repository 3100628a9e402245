import json
import math
import os
from dataclasses import replace

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


def view_of(tmp_path, **fields):
    run_dir = RunDir(str(tmp_path / "20260101-000000-train-ab12"))
    os.makedirs(run_dir.path)
    plan = run_plan(
        run_id="20260101-000000-train-ab12",
        target="/code/train.py",
        args=("--lr", "1"),
        python=("py",),
    )
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
    with open(made.rank_log(0, 0), "w") as log:
        log.write("step 1\n")
    return made


@pytest.fixture
def muster(capsys):
    """Run a command; return what it has printed."""

    def run(words):
        with pytest.raises(SystemExit):
            main(words.split())
        return "".join(capsys.readouterr())

    return run


def leave_start(run_dir, world_size):
    start = f'"event":"attempt_started","attempt":0,"num_nodes":1,"world_size":{world_size}'
    with open(run_dir.events, "w") as file:
        file.write(f'{{"time":"2026-01-01T00:00:00Z",{start}}}\n')


def test_a_run_of_a_removed_engine_is_shown(run_dir, muster, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    write_json(run_dir.job, {"engine": "torque", "job_id": "10.server"})
    result = run_result(run_id=os.path.basename(run_dir.path), elapsed_s=2.0)
    write_json(run_dir.result, codec.to_plain(result))

    assert "succeeded" in muster("status train")
    assert "step 1" in muster("logs train")


@pytest.mark.parametrize("world_size", ["1e400", '"many"', "null", "-1", "[2]", "9" * 400])
def test_a_number_of_workers_that_is_none_is_not_shown(run_dir, muster, world_size):
    leave_start(run_dir, world_size)

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
    [
        ("", "begin\n 2%\nend\n 5%\n"),
        (" -n 3", " 2%\nend\n 5%\n"),
        (" -n 1", " 5%\n"),
    ],
)
def test_of_a_progress_bar_a_log_shows_the_last_state_as_a_line(run_dir, muster, more, shown):
    with open(run_dir.rank_log(0, 0), "w", newline="") as log:
        log.write("begin\n\r 1%\r 2%\nend\n\r 3%\r 4%\r 5%")

    assert muster(f"logs last{more}") == shown


@pytest.mark.parametrize("words", ["logs last", "logs last -f", "ps", "status last"])
def test_a_command_whose_reader_has_gone_ends_without_a_word(run_dir, words, monkeypatch, capfd):
    with open(run_dir.rank_log(0, 0), "w") as log:
        log.write("step\n" * 100_000)
    with open(run_dir.result, "w") as file:
        file.write("[1]")  # it is over
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
    with open(run_dir.result, "w") as file:
        file.write("[1]")

    told = muster("wait last")

    assert f"at: {run_dir.result}\n" in told
    assert "because: result.json is damaged" in told


@pytest.mark.parametrize("left", [None, "", '{"run_id": "2', "[1]"])
def test_a_plan_that_can_not_be_read_is_said(run_dir, muster, left):
    os.unlink(run_dir.plan)
    if left is not None:
        with open(run_dir.plan, "w") as file:
            file.write(left)
    write_owner(run_dir)  # it lives

    assert "(plan.json can't be read)" in muster("ps")
    assert "problem  plan.json is missing, half written" in muster("status train-ab12")
    assert "plan.json is missing, half written" in muster("top --once")


@pytest.mark.parametrize(
    ("values", "in_list", "in_status"),
    [
        ({"acc": 0.5, "loss": math.nan}, "loss nan (since step 100)", "loss nan (since step 100)"),
        (
            {"acc": 0.5, "loss": -math.inf},
            "loss -inf (since step 100)",
            "loss -inf (since step 100)",
        ),
        ({"loss": 0.5, "valid_loss": math.nan}, "", "valid_loss nan (since step 100)"),
        ({"f1": math.nan}, "", "f1 nan (since step 100)"),
        ({"loss": 0.5}, "", ""),
    ],
)
def test_a_loss_that_is_not_finite_is_said_by_all_views(
    run_dir, capsys, values, in_list, in_status
):
    with open(run_dir.training, "w") as record:
        for step, logged in [(50, dict.fromkeys(values, 1.0)), (100, values), (150, values)]:
            line = {"time": "2027-01-15T08:00:10Z", "event": "metrics", "step": step}
            record.write(json.dumps({**line, "values": logged}) + "\n")
    ended = run_result()
    write_json(run_dir.result, codec.to_plain(ended))
    views = {
        ("ps",): in_list,
        ("top", "--once"): in_list,
        ("status", "last"): in_status,
        ("top", "last", "--once"): in_status.partition(" ")[2],
    }
    for command, words in views.items():
        with pytest.raises(SystemExit):
            main([*command])
        said = capsys.readouterr().out
        assert words in said
        assert ("(since step 100)" in said) == bool(words)
        with pytest.raises(SystemExit):
            main([*(word for word in command if word != "--once"), "--json"])
        json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    live = replace(LiveReader(run_dir).read(), is_final=False)
    assert in_list in status_rows(live, 120, 1)[0]
