import os

from torchmuster.core.files.layout import PathBelow, RunDir, muster_home, runs_dir


def test_runs_lie_in_muster_home(monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", "/scratch/m")

    assert runs_dir() == "/scratch/m/runs"


def test_without_the_variable_home_is_used(monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", "")
    monkeypatch.setenv("HOME", "/home/u")

    assert muster_home() == "/home/u/.muster"


def test_every_rank_of_every_attempt_has_a_log_of_its_own():
    run_dir = RunDir("/runs/r")
    paths = {run_dir.rank_log(attempt, rank) for attempt in range(3) for rank in range(3)}

    assert len(paths) == 9
    assert run_dir.rank_log(1, 2) == "/runs/r/logs/main/train/attempt-1/rank-2.log"


def test_everything_lies_in_the_run_directory():
    run_dir = RunDir("/runs/r")
    names = [name for name, value in vars(RunDir).items() if isinstance(value, PathBelow)]
    paths = [getattr(run_dir, name) for name in names] + [run_dir.agent_log("n1")]

    assert len(paths) > 6
    assert all(os.path.commonpath([path, "/runs/r"]) == "/runs/r" for path in paths)
