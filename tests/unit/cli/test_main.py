import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = str(Path(__file__).parents[3] / "src")


def muster(*words, home):
    return subprocess.run(
        [sys.executable, "-m", "torchmuster", *words],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": SOURCE, "MUSTER_HOME": str(home), "PATH": "/usr/bin:/bin"},
    )


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_command_alone_shows_its_help(words, tmp_path):
    done = muster(*words, home=tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    for command in ("run", "torchrun", "ps", "status", "logs", "wait", "cancel"):
        assert f"\n  {command} " in done.stdout


@pytest.mark.parametrize("command", ["run", "torchrun", "ps", "status", "logs", "wait", "cancel"])
def test_every_command_has_help(command, tmp_path):
    done = muster(command, "--help", home=tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.lower().startswith("usage: ")


def test_without_runs_the_list_is_empty_and_says_so(tmp_path):
    done = muster("ps", home=tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "no runs yet\n")
