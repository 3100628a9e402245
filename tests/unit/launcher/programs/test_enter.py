"""A command on another node has the head's variables and folder, and says where it can't start."""

import json
import subprocess
import sys

from kit.command import ran
from torchmuster.launcher.programs.enter import EnterOrder, enter_argv

SHOW = "import os, sys; print(os.getcwd(), os.environ['WORD'], os.environ['MINE'], sys.argv[1:])"


def argv_of(environment, cwd, command, **given):
    order = EnterOrder(environment=str(environment), cwd=str(cwd), command=tuple(command), **given)
    return enter_argv(sys.executable, order)


def enter(folder, command, **variables):
    """Run a command with a head's variables in a folder."""
    path = folder / "environment.json"
    path.write_text(json.dumps(variables))
    argv = argv_of(path, folder, command, variable=("MINE=a=b c",))
    return ran(argv, limit_s=30, env={"PATH": "/bin"}, cwd="/")


def test_command_has_variables_folder_and_words(tmp_path):
    done = enter(tmp_path, [sys.executable, "-c", SHOW, "--x", "y z"], WORD="w")
    assert done.stdout == f"{tmp_path} w a=b c ['--x', 'y z']\n"
    assert done.stderr == ""


def test_folder_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "environment.json"
    path.write_text("{}")
    argv = argv_of(path, "/no/such", ["/bin/true"])
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "can't be started in /no/such" in done.stderr
    assert "Traceback" not in done.stderr


def test_variables_that_are_not_there_are_named():
    argv = argv_of("/no/such", "/", ["/bin/true"])
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert done.returncode != 0
    assert "the job's variables can't be read" in done.stderr
