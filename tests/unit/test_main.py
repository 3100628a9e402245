import os
import re
import sys

import click
import pytest

from kit.command import SOURCE, ran, run_muster
from torchmuster.core import plugs
from torchmuster.core.cli.main import SECTIONS


def muster(*words, home):
    return run_muster(
        *words, env={"PYTHONPATH": str(SOURCE), "MUSTER_HOME": str(home), "PATH": "/usr/bin:/bin"}
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


@pytest.mark.parametrize(
    "module", ["torchmuster.core.cli.main", "click", "torchmuster.launcher.views.find"]
)
def test_ctrl_c_while_it_is_still_importing_ends_it_without_a_traceback(module, tmp_path):
    done = ran(
        [sys.executable, "-c", INTERRUPTED.replace("sys.argv[1]", repr(module))],
        limit_s=60,
        env={**os.environ, "MUSTER_HOME": str(tmp_path)},
    )
    assert (done.returncode, done.stderr.strip()) == (130, "")


def test_commands_are_grouped_and_all_are_there(tmp_path):
    shown = muster("--help", home=tmp_path).stdout

    assert re.findall(r"^(\w+):$", shown, re.MULTILINE) == ["Options", *SECTIONS]
    assert all(f"\n  {name} " in shown for name in plugs.table("commands"))


@pytest.mark.parametrize("words", [("help", "ps"), ("ps", "--help")])
def test_help_is_a_command_too(words, tmp_path):
    assert muster(*words, home=tmp_path).stdout.startswith("Usage: muster ps")


def test_no_help_text_shows_the_mark_that_keeps_lines_apart(tmp_path):
    for name, (_, _, what) in plugs.table("commands").items():
        command = plugs.load(what)
        context = click.Context(command, info_name=name, help_option_names=["-h", "--help"])
        assert "\\b" not in command.get_help(context)


def complete(*words, home):
    typed = ["muster", *words]
    environment = {
        "PYTHONPATH": str(SOURCE),
        "MUSTER_HOME": str(home),
        "HOME": str(home),
        "_MUSTER_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(typed),
        "COMP_CWORD": str(len(typed) - 1),
    }
    done = ran([sys.executable, "-X", "importtime", "-m", "torchmuster"], cwd=home, env=environment)
    return done.stdout.split(), done.stderr


def test_completion_knows_commands_runs_and_engines_and_imports_nothing_heavy(tmp_path):
    (tmp_path / "runs" / "20260101-000000-train-ab12").mkdir(parents=True)
    (tmp_path / "muster.toml").write_text('[engines.small]\nkind = "slurm"\n')

    assert complete("st", home=tmp_path)[0] == ["plain,status", "plain,stacks"]
    assert complete("status", "tr", home=tmp_path)[0] == ["plain,train-ab12"]
    assert complete("status", "20", home=tmp_path)[0] == ["plain,20260101-000000-train-ab12"]
    found, imported = complete("run", "--on", "s", home=tmp_path)
    assert found == ["plain,slurm", "plain,small", "plain,ssh"]
    assert "pydantic" not in imported
