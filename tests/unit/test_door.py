"""The one door of the programs on nodes: it knows them all, imports only the one, and refuses others in a sentence."""

import importlib.util
import re
import subprocess
import sys

import pytest

from torchmuster.core import plugs, proc


def run(argv):
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, cwd="/", env={})


PROGRAMS = {name: what.partition(":")[0] for name, what in plugs.table("programs").items()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_can_be_called(name):
    assert callable(plugs.find("programs", name))


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
    assert " ctypes\n" in done.stderr  # what the program itself imports
    assert not any(
        f" {name}\n" in done.stderr for name in ("argparse", "subprocess", "torchmuster.core.proc")
    )


def test_a_program_that_is_not_isolated_does_not_see_its_own_folder_first():
    done = run([sys.executable, proc.NODE_ENTRY, "conduct"])
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: a program of muster does not understand how it was started"
    )


def test_what_a_program_can_not_do_is_an_error_and_no_traceback():
    done = run(proc.node_program("conduct", "--run-dir=/no/such/run", "--engine=slurm"))
    assert done.returncode == 3
    assert done.stderr == (
        "error: the plan of the run can't be read\n  at: /no/such/run/plan.json\n"
    )


# What a user types himself, a command or a message that is passed on, a path, and the JSON of who must import little.
NOT_TYPED = {"task-muster", "dies_with_parent", "proxy", "debugger", "view"}


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - NOT_TYPED))
def test_a_program_decodes_what_it_is_told(name):
    path = importlib.util.find_spec(f"torchmuster.{PROGRAMS[name]}").origin
    with open(path) as file:
        text = file.read()
    assert "argparse" not in text
    assert re.search(
        r"from_arguments\(|from_word\(|from_plain\(|messages\.decode\(|conduct\(arguments|launch\(",
        text,
    )
