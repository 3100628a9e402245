import copy

import click
import pytest

from torchmuster.core.cli.run import run
from torchmuster.core.cli.spelling import (
    hint_for_option,
    misplaced_options,
    option_names,
    warn_of_misplaced,
)

KNOWN = ["--nodes", "--nproc-per-node", "--max-restarts", "--on", "--tee", "--detach"]
SCHEDULERS_WORDS = ["--job-name", "-J", "--gpus", "--gres", "-N", "--walltime"]


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("--nproc_per_node", "it is spelled `--nproc-per-node`"),
        ("-nodes", "it is spelled `--nodes`"),
        ("--node", "did you mean `--nodes`?"),
        ("--max-restart", "did you mean `--max-restarts`?"),
        ("--frobnicate", None),
        ("--foo", None),
        ("-x", None),
    ],
)
def test_what_was_meant_is_guessed_only_when_it_is_near(given, hint):
    assert hint_for_option(given, KNOWN) == hint


@pytest.mark.parametrize(
    ("word", "begin"),
    [
        ("--timeout", "here it is `--time TIME`"),  # not the wait for nodes
        ("--nproc", "here it is `--nproc-per-node N`"),
        ("--shutdown-timeout", "this is an option of torchrun: here it is `--grace`"),
        *((word, "here it is `--") for word in SCHEDULERS_WORDS),
    ],
)
def test_the_word_of_another_launcher_or_scheduler_gets_ours(word, begin):
    assert hint_for_option(word, KNOWN).startswith(begin)


def test_words_of_other_views_get_ours_only_where_they_are_meant():
    assert hint_for_option("--lines", ["--tail", "--follow"]) == "here it is `--tail N`"
    assert "always listed" in hint_for_option("--running", ["--all", "--json"])
    assert hint_for_option("--running", KNOWN) is None


def test_what_is_not_needed_here_is_said_to_be_so():
    assert "leave it out" in hint_for_option("--rdzv_backend", KNOWN)


def test_an_option_of_ours_behind_a_script_that_does_not_know_it_is_pointed_out(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("parser.add_argument('--max_restarts')\n")
    ours = option_names(run)

    late = misplaced_options(str(script), ["--lr", "1", "--nproc_per_node=2", "--time", "1h"], ours)

    assert late == ["--nproc-per-node", "--time"]
    assert "`--nproc-per-node`, `--time` come after" in warn_of_misplaced("train.py", late)
    assert misplaced_options(str(script), ["--max-restarts", "2", "--help"], ours) == []
    assert misplaced_options("package.module", ["--nproc-per-node", "2"], ours) == []


@pytest.mark.parametrize(
    ("source", "is_known"),
    [
        ("import time\ntime.sleep(1)", False),
        ("x = dict(time=3)", True),
        ("@dataclass\nclass A:\n    time: float = 1", True),
        ("def main(lr, time=2): ...", True),
        ("flags.DEFINE_float('time', 1.0)", True),
        ('if "--time" in sys.argv: ...', True),
        ("# --time is not read here", False),
    ],
)
def test_a_script_knows_an_option_by_a_text_an_argument_or_a_field(tmp_path, source, is_known):
    script = tmp_path / "train.py"
    script.write_text(source)
    assert (misplaced_options(str(script), ["--time", "1"], option_names(run)) == []) is is_known


def test_every_option_of_run_stands_in_a_section_of_its_help():
    fresh = copy.copy(run)
    fresh._help_option = None  # click keeps what an earlier test's context has made of it
    context = click.Context(fresh, info_name="muster run", help_option_names=["-h", "--help"])
    text = fresh.get_help(context)

    assert "Workers:" in text
    other = " ".join(text.partition("Other:")[2].split())
    assert other == "-h, --help Show this message and exit."
