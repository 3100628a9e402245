"""A command on another node has the head's variables and folder, and says where it can't start."""

import json
import sys

import pytest

from kit.command import ran
from torchmuster.launcher.programs.enter import EnterOrder, enter_argv

SHOW = "import os, sys; print(os.getcwd(), os.environ['WORD'], os.environ['MINE'], sys.argv[1:])"


def enter(environment, cwd, *command, **given):
    """Run a command in a folder with the variables that a file holds."""
    order = EnterOrder(environment=str(environment), cwd=str(cwd), command=command, **given)
    return ran(enter_argv(sys.executable, order), limit_s=30, env={"PATH": "/bin"}, cwd="/")


@pytest.fixture
def variables(tmp_path):
    """Return the file with a head's variables."""
    path = tmp_path / "environment.json"
    path.write_text(json.dumps({"WORD": "w"}))
    return path


def test_command_has_variables_folder_and_words(variables, tmp_path):
    command = (sys.executable, "-c", SHOW, "--x", "y z")
    done = enter(variables, tmp_path, *command, variable=("MINE=a=b c",))
    assert done.stdout == f"{tmp_path} w a=b c ['--x', 'y z']\n"
    assert done.stderr == ""


def test_folder_that_is_not_there_is_named(variables):
    done = enter(variables, "/no/such", "/bin/true")
    assert done.returncode == 1
    assert "can't be started in /no/such" in done.stderr
    assert "Traceback" not in done.stderr


def test_variables_that_are_not_there_are_named():
    done = enter("/no/such", "/", "/bin/true")
    assert done.returncode != 0
    assert "the job's variables can't be read" in done.stderr
