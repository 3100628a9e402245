"""The one door of the programs on nodes: it knows them all, imports only the one, and refuses others in a sentence."""

import importlib
import subprocess
import sys

import pytest

from torchmuster import proc
from torchmuster.programs.__main__ import PROGRAMS


def run(argv):
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, cwd="/", env={})


@pytest.mark.parametrize("module", PROGRAMS.values())
def test_every_program_has_a_main(module):
    assert callable(importlib.import_module(f"torchmuster.{module}").main)


def test_a_program_of_another_version_is_refused_in_a_sentence():
    done = run(proc.node_program("agent-of-the-future", "--run-dir=/x"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: muster has no program `agent-of-the-future`\nat: /")


def test_words_of_another_version_are_refused_in_a_sentence():
    done = run(proc.node_program("task", "--run-dir=/x", "--colour=red"))
    assert done.returncode == 2
    assert (
        "at: --run-dir=/x --colour=red\n  because: TaskOrder: unknown field colour\n" in done.stderr
    )


def test_what_becomes_a_task_imports_little():
    [python, *flags, door] = proc.node_program("view")[:-1]
    done = run([python, "-X", "importtime", *flags, door, "view", "--probe"])
    assert "torchmuster.node.sandbox.place_launch" in done.stderr
    assert not any(
        f" {name}\n" in done.stderr for name in ("argparse", "subprocess", "torchmuster.proc")
    )


def test_a_program_that_is_not_isolated_does_not_see_its_own_folder_first():
    done = run([sys.executable, proc.NODE_DOOR, "conduct", "--help"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: conduct" in done.stdout


def test_what_a_program_can_not_do_is_an_error_and_no_traceback():
    done = run(proc.node_program("conduct", "/no/such/run", "--engine=slurm"))
    assert done.returncode == 3
    assert done.stderr == (
        "error: the plan of the run can't be read\n  at: /no/such/run/plan.json\n"
    )


@pytest.mark.parametrize("name", ["conduct", "conduct_group"])
def test_a_job_that_an_earlier_version_has_submitted_finds_the_door(name):
    path = importlib.import_module(f"torchmuster.owner.jobs.{name}").__file__
    done = run([sys.executable, path, "--help"])
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: {name}" in done.stdout
