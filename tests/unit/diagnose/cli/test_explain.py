"""`muster explain`: the command around the rules."""

import gzip
import io
import json
import os
import sys

import pytest

from torchmuster.core.cli.main import main
from torchmuster.diagnose import logs
from unit.diagnose.explain.logs import traceback_of

TRACEBACK = traceback_of("ValueError: bad label")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words):
    with pytest.raises(SystemExit) as ended:
        main(["explain", *words])
    return ended.value.code


def test_what_can_only_be_guessed_ends_with_3(home, capsys):
    (home / "job.log").write_text("frobnicator: error: no such widget\n")
    assert run("job.log") == 3
    assert "no rule knows this message" in capsys.readouterr().out


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


def give(monkeypatch, data):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_standard_input_is_explained(monkeypatch, capsys, pack):
    give(monkeypatch, pack(TRACEBACK.encode()))
    assert run("-") == 0
    said = capsys.readouterr().out
    assert "ValueError: bad label" in said
    assert "stdin:4" in said


def test_standard_input_and_a_file_are_explained_together(home, monkeypatch, capsys):
    (home / "n1.log").write_text(TRACEBACK)
    give(monkeypatch, b"step 1\n")
    assert run("-", "n1.log", "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_files"] == 2


def test_terminal_on_standard_input_is_refused_with_what_to_type(monkeypatch, capsys):
    leader, terminal = os.openpty()
    try:
        monkeypatch.setattr("sys.stdin", open(terminal))  # noqa: SIM115 - closed by its owner below
        assert run("-") == 2
    finally:
        sys.stdin.close()
        os.close(leader)
    said = capsys.readouterr().err
    assert "standard input is a terminal" in said
    assert "kubectl logs POD | muster explain -" in said


def test_closed_standard_input_is_an_error_with_a_hint(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    assert run("-") == 2
    assert "hint: " in capsys.readouterr().err


def test_zstd_is_refused_with_the_command_that_reads_it(home, capsys, monkeypatch):
    monkeypatch.setattr(logs, "can_unpack", lambda _packing: False)
    (home / "logs.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd....")
    assert run("logs.tar.zst") == 2
    assert "zstd -dc logs.tar.zst | muster explain -" in capsys.readouterr().err


def test_source_code_is_no_log(home, capsys):
    code = 'import os\nfor step in range(9):\n    print(f"step {step} loss 1")\n'
    (home / "train.py").write_text(code)
    assert run("train.py") == 3
    said = capsys.readouterr().out
    assert "train.py is left out: it is source code in Python, no log" in said
    assert "its steps go on" not in said


@pytest.mark.parametrize("name", ["job.log", "job.py"], ids=["", "only named like source code"])
def test_log_is_explained(home, capsys, name):
    (home / name).write_text(TRACEBACK)
    assert run(name) == 0
    assert "ValueError: bad label" in capsys.readouterr().out
