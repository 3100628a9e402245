import os
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


INTERRUPTED = """
import sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
from torchmuster.__main__ import main
sys.argv = ["muster", "ps"]
main()
"""


@pytest.mark.parametrize("module", ["torchmuster.cli.main", "click", "torchmuster.run.find"])
def test_ctrl_c_while_it_is_still_importing_ends_it_without_a_traceback(module, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.replace("sys.argv[1]", repr(module))],
        env={**os.environ, "MUSTER_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr.strip()) == (130, "")
