"""The package of docs/plugging-in.md, as installed: its command, its place, its part of a head."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from examples.example_runs import EXAMPLES
from kit.command import ran
from kit.installed import install_metadata

ROOT = Path(__file__).parents[2]
TOY = EXAMPLES / "toy_plug"
SCRIPT = "import os\nprint('rank', os.environ['RANK'])\n"


@pytest.fixture
def muster(tmp_path):
    """Return a function that runs `muster` where the package is installed."""
    site = tmp_path / "site"
    install_metadata(TOY / "pyproject.toml", site)
    shutil.copytree(TOY / "toy_plug", site / "toy_plug")
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(site)]),
        "MUSTER_HOME": str(tmp_path / "home"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }

    def run(*words):
        argv = [sys.executable, "-m", "torchmuster", *words]
        return ran(argv, limit_s=90, cwd=tmp_path, env=environment)

    return run


def notices(tmp_path):
    (record,) = tmp_path.glob("home/runs/*/events.jsonl")
    events = map(json.loads, record.read_text().splitlines())
    return [one["text"] for one in events if one["event"] == "notice"]


def test_its_command_is_listed_and_runs(muster):
    shown = muster("--help").stdout
    assert "Other packages:\n  cheer  Of toy-plug.\n" in shown
    assert muster("cheer", "--help").stdout.startswith("Usage: muster cheer")
    refused = muster("cheer")
    assert refused.returncode == 4
    assert refused.stderr.startswith("error: there is no run `last`")


def test_its_place_starts_runs_and_its_part_hears_them(muster, tmp_path):
    done = muster("run", "--on", "toybox", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr
    assert "muster: everything goes into the toybox\n" in done.stderr
    assert "4 workers on 2 nodes" in done.stderr
    assert notices(tmp_path) == ["all 4 workers have ended"]
    assert muster("cheer").stdout.endswith(": succeeded!\n")


@pytest.mark.parametrize("command", ["run", "torchrun"])
def test_its_part_is_of_every_run(muster, tmp_path, command):
    assert muster(command, "--nproc-per-node", "1", "train.py").returncode == 0
    assert notices(tmp_path) == ["all 1 workers have ended"]


def test_near_misses_and_help_know_it(muster):
    assert "did you mean `muster cheer`?" in muster("chear").stderr
    assert muster("help", "cheer").stdout.startswith("Usage: muster cheer")
    assert muster("cheer", "--not-there").stderr.startswith("error: `muster cheer` has no option")


def test_its_place_notes_what_is_wrong_with_all_else_that_is(muster):
    done = muster("run", "--on", "toybox", "--hosts", "a", "--nodes", "x", "train.py")
    assert done.returncode == 2
    assert "error: a toybox has no hosts\n" in done.stderr
    assert "`x` is not a valid number of nodes" in done.stderr


def test_what_can_not_be_loaded_is_said_with_its_package(muster, tmp_path):
    (tmp_path / "site/toy_plug/command.py").write_text("import not_there\n")
    done = muster("cheer")
    assert done.returncode == 2
    assert done.stderr == (
        "error: `cheer` of toy-plug can't be loaded\n"
        "  at: entry point torchmuster.commands: cheer = toy_plug.command:cheer\n"
        "  because: No module named 'not_there'\n"
        "hint: install toy-plug again, or without it: pip uninstall toy-plug\n"
    )


def test_a_part_that_a_node_lacks_is_left_out_with_a_sentence(muster, tmp_path):
    (tmp_path / "site/toy_plug/part.py").unlink()
    assert muster("run", "--nproc-per-node", "1", "train.py").returncode == 0
    (said,) = notices(tmp_path)
    assert said == (
        f"a part of the head of another package, `counter` (toy_plug.part:Counter, from {tmp_path}/site)"
        " is left out: No module named 'toy_plug.part'"
    )


def install_other(folder, command):
    """Install a package that brings this command, too."""
    other = folder / "site" / "other-1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (other / "entry_points.txt").write_text(
        f"[torchmuster.commands]\n{command} = other:{command}\n"
    )


def test_two_packages_with_the_same_name_are_refused(muster, tmp_path):
    install_other(tmp_path, "cheer")
    done = muster("cheer")
    assert done.returncode == 2
    assert "two packages bring the same of commands: `cheer`" in done.stderr


def test_a_name_of_ours_can_not_be_taken(muster, tmp_path):
    install_other(tmp_path, "run")
    assert muster("run", "--nproc-per-node", "1", "train.py").returncode == 0
    assert "the same of commands: `run`, of muster and other" in muster("--help").stderr


def test_the_page_shows_this_package():
    page = (ROOT / "docs" / "plugging-in.md").read_text()
    for name in ("command", "place", "part"):
        text = (TOY / "toy_plug" / f"{name}.py").read_text()
        assert text.partition('"""\n')[2].strip() in page, name
