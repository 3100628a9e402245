"""`muster explain`: the command around the rules."""

import json

import pytest

from torchmuster.cli.main import main

TRACEBACK = """Traceback (most recent call last):
  File "/home/u/train.py", line 9, in <module>
    step()
ValueError: bad label
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words):
    with pytest.raises(SystemExit) as ended:
        main(["explain", *words])
    return ended.value.code


def test_log_is_explained(home, capsys):
    (home / "job.log").write_text(TRACEBACK)
    assert run("job.log") == 0
    assert "ValueError: bad label" in capsys.readouterr().out


def test_what_can_t_be_told_ends_with_3(home, capsys):
    (home / "job.log").write_text("frobnicator failed badly\n")
    assert run("job.log") == 3
    assert "can't be told" in capsys.readouterr().out


def test_json_has_the_word_of_the_cause(home, capsys):
    (home / "job.log").write_text(TRACEBACK)
    run("job.log", "--json")
    assert json.loads(capsys.readouterr().out)["found"][0]["cause"] == "exception"


def test_all_missing_files_are_named_at_once_with_a_near_miss(home, capsys):
    (home / "job.log").write_text(TRACEBACK)
    assert run("jop.log", "other.log") == 2
    said = capsys.readouterr().err
    assert "`jop.log`" in said
    assert "`other.log`" in said
    assert "did you mean `job.log`?" in said


def test_run_that_is_not_there_is_said_to_be_missing(capsys):
    assert run("20990101") == 4
    assert "20990101" in capsys.readouterr().err
