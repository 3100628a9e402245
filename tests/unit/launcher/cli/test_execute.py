"""The command line of `muster exec`."""

import click
import pytest

from torchmuster.errors import UsageError
from torchmuster.launcher.cli import execute

COMMAND = execute.exec


def parse(*words):
    """Return (run, task, argv) of a command line."""
    with COMMAND.make_context("exec", list(words)) as context:
        given = context.params
        return given["run"], *execute._split(
            given["words"], context.meta[execute._COMMAND], given["group"]
        )


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (("r", "t"), ("r", "t", ())),
        (("r", "t", "--", "ls", "-l"), ("r", "t", ("ls", "-l"))),
        (("r", "t", "ls"), ("r", "t", ("ls",))),
        (("r", "t", "--no-tty", "--", "a", "--", "b"), ("r", "t", ("a", "--", "b"))),
        (("r", "--group", "g", "--", "ls"), ("r", None, ("ls",))),
        (("--group", "g", "r", "ls"), ("r", None, ("ls",))),
        (("r", "t", "--", "--tty", "-h"), ("r", "t", ("--tty", "-h"))),
    ],
)
def test_what_stands_behind_two_hyphens_is_the_command(line, wanted):
    assert parse(*line) == wanted


@pytest.mark.parametrize("line", [("r",), ("r", "--", "ls"), ("r", "t", "x", "--", "ls")])
def test_a_line_without_a_task_or_with_a_word_too_many_is_refused(line):
    with pytest.raises(UsageError):
        parse(*line)


def test_a_task_beside_a_group_is_refused():
    with pytest.raises(UsageError, match="`t` comes before `--`"):
        parse("r", "t", "--group", "g", "--", "ls")


def test_a_run_is_needed():
    with pytest.raises(click.MissingParameter):
        parse()


def test_the_help_tells_the_exit_codes():
    with COMMAND.make_context("exec", ["r", "t"]) as context:
        text = COMMAND.get_help(context)
    assert all(word in text for word in ("124", "125", "126", "137", "128 + N"))


def test_lines_of_many_tasks_stay_whole_and_say_whose_they_are(capsys):
    lines = execute._Lines(["a", "b"])
    lines.write("a", 1, "ä".encode()[:1])
    lines.write("b", 2, b"other\n")
    lines.write("a", 1, "ä".encode()[1:] + b"\nhalf")
    lines.end()
    out, err = capsys.readouterr()
    assert (out, err) == ("[a] ä\n[a] half\n", "[b] other\n")
