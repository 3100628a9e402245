import os

from torchmuster.core.files import layout


def test_runs_lie_in_muster_home(monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", "/scratch/m")

    assert layout.runs_dir() == "/scratch/m/runs"


def test_without_the_variable_home_is_used(monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", "")
    monkeypatch.setenv("HOME", "/home/u")

    assert layout.muster_home() == "/home/u/.muster"


def test_every_rank_of_every_attempt_has_a_log_of_its_own():
    run_dir = layout.RunDir("/runs/r")
    paths = {run_dir.rank_log(attempt, rank) for attempt in range(3) for rank in range(3)}

    assert len(paths) == 9
    assert run_dir.rank_log(1, 2) == "/runs/r/logs/main/train/attempt-1/rank-2.log"


def test_everything_lies_in_the_run_directory():
    run_dir = layout.RunDir("/runs/r")
    names = [
        name for name, value in vars(layout.RunDir).items() if isinstance(value, layout.PathBelow)
    ]
    paths = [getattr(run_dir, name) for name in names] + [run_dir.agent_log("n1")]

    assert len(paths) > 6
    assert all(os.path.commonpath([path, "/runs/r"]) == "/runs/r" for path in paths)


# The end of a log.


def test_only_the_end_of_a_long_log_is_read(tmp_path):
    log = tmp_path / "x.log"
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert layout.last_lines(str(log), 2) == ["line 99998", "line 99999"]
    assert len(layout.last_lines(str(log), 1000, num_bytes=55)) == 5


def test_a_log_that_is_not_there_has_no_lines(tmp_path):
    assert layout.last_lines(str(tmp_path / "no"), 3) == []


def test_of_a_progress_bar_the_last_state_is_a_line(tmp_path):
    (tmp_path / "x").write_bytes(b"begin\r\n\r 1%\r 2%\nend")
    assert layout.last_lines(str(tmp_path / "x"), 3) == ["begin", " 2%", "end"]


def test_bytes_that_are_no_text_are_shown_as_such(tmp_path):
    (tmp_path / "x").write_bytes(b"\xff\n")
    assert layout.last_lines(str(tmp_path / "x"), 3) == ["\ufffd"]
