"""`muster doctor` and the look before a start, with simulated nodes and real agents."""

import json
import os

import pytest

from kit.command import muster_env, run_muster
from torchmuster.core.files.layout import RunDir
from torchmuster.core.owner.record import read_lines

LIMIT_S = 120


@pytest.fixture
def muster(tmp_path):
    """Return a function that runs `muster` in an empty folder with a home of its own."""
    env = muster_env(tmp_path / "home")

    def run(*words, **more):
        return run_muster(*words, env=env | more, cwd=tmp_path, limit_s=LIMIT_S)

    run.home = tmp_path / "home"
    return run


def test_doctor_alone_looks_at_this_machine(muster):
    done = muster("doctor", "--json")
    said = json.loads(done.stdout)
    assert done.returncode == said["exit_code"] < 2, done.stdout
    assert [row["node"] for row in said["nodes"]] == ["this machine"]
    assert said["pairs"] == []
    assert not muster.home.exists()


def test_doctor_of_two_nodes_shows_table_matrix_and_what_the_job_measured(muster):
    done = muster("doctor", "--nodes", "2", "--seconds", "0.3")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["node", "host", "address"]
    assert [line.split()[0] for line in lines[1:3]] == ["n1", "n2"]
    assert lines[4].startswith("from \\ to")
    assert "MB/s" in lines[5]
    assert "all-reduce over 2 ranks: alpha" in done.stdout
    assert "R²" in done.stdout
    assert os.listdir(muster.home / "runs") == []


def test_doctor_without_a_job_starts_no_worker(muster):
    done = muster("doctor", "--nodes", "3", "--no-job", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["job"] is None
    assert len(said["pairs"]) == 6
    assert {pair["why_not"] for pair in said["pairs"]} == {None}


def test_a_variable_that_nobody_understands_is_named(muster):
    done = muster("doctor", "--nodes", "2", "--no-job", NCCL_SOCKET_IFNAME="^docker0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "warning: NCCL_SOCKET_IFNAME=^docker0 is not a valid value" in done.stdout


def test_mistakes_on_the_command_line_are_named(muster):
    done = muster("doctor", "--script", "no.py")
    assert done.returncode == 2
    assert "the script does not exist" in done.stderr
    done = muster("doctor", "--nodes", "zero")
    assert done.returncode == 2
    assert "`zero` is not a valid number of nodes" in done.stderr


def test_every_start_of_several_nodes_looks_and_holds_nothing_up(muster, tmp_path):
    (tmp_path / "train.py").write_text("print('trained')\n")
    done = muster("run", "--nodes", "2", "--run-id", "r", "train.py")
    assert done.returncode == 0, done.stderr
    assert "preflight" not in done.stdout + done.stderr
    (event,) = [e for e in events(muster, "r") if e["event"] == "preflight"]
    assert event["form"] == "short"
    assert event["held_s"] <= 0.3


@pytest.mark.parametrize("how", ["option", "variable", "one node"])
def test_nothing_is_looked_at_where_nobody_wants_it(muster, tmp_path, how):
    (tmp_path / "train.py").write_text("print('trained')\n")
    words = ["run", "--run-id", "r", "--nodes", "1" if how == "one node" else "2"]
    words += ["--no-preflight"] if how == "option" else []
    more = {"MUSTER_PREFLIGHT": "off"} if how == "variable" else {}
    done = muster(*words, "train.py", **more)
    assert done.returncode == 0, done.stderr
    assert not [e for e in events(muster, "r") if e["event"] == "preflight"]


def events(muster, run_id):
    return list(read_lines(RunDir(str(muster.home / "runs" / run_id)).events))
