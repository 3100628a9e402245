import pytest

from torchmuster.errors import MusterError
from torchmuster.model.display.text import (
    few_of,
    printable,
    render_report,
    report_of_error,
    show_size,
)


def test_an_error_is_printed_in_its_four_parts():
    error = MusterError("it broke", where="a.py:1", why="first\n\n  second", fix="mend it")

    assert render_report(report_of_error(error)) == (
        "error: it broke\n  at: a.py:1\n  because: first\n\n      second\nhint: mend it\n"
    )


def test_parts_that_are_unknown_are_left_out():
    assert render_report(report_of_error(MusterError("it broke"))) == "error: it broke\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext, ünïcode 漢字\n", "plain\ttext, ünïcode 漢字\n"),
        ("\x1b]0;owned\x07title", "\\x1b]0;owned\\x07title"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2Jgone\x9b2J", "\\x1b[2Jgone\\x9b2J"),
        ("10%\r20%\x08", "10%\\x0d20%\\x08"),
        ("a\u202eb\u2066", "a\\u202eb\\u2066"),
    ],
)
def test_a_terminal_obeys_nothing_in_a_text_of_others(text, shown):
    assert printable(text) == shown


def test_a_report_is_printable_in_all_of_its_parts():
    bad = "\x1b]0;owned\x07"
    error = MusterError(bad, where=bad, why=bad, fix=bad)

    assert render_report(report_of_error(error)).count("\\x1b]0;owned\\x07") == 4


@pytest.mark.parametrize(
    ("names", "shown"),
    [(["a"], "a"), (["a", "b\n"], "a, b\\n"), (list("abcd"), "a, b and 2 more")],
)
def test_of_many_names_a_few_are_shown_with_how_many_there_are_more(names, shown):
    assert few_of(names, 2) == shown


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (30 << 30, "30 GiB"),
        (1 << 40, "1 TiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_a_size_is_shown_in_its_largest_unit(size_bytes, text):
    assert show_size(size_bytes) == text
