from torchmuster.errors import MusterError
from torchmuster.model.text import render_report, report_of_error


def test_an_error_is_printed_in_its_four_parts():
    error = MusterError("it broke", where="a.py:1", why="first\n\n  second", fix="mend it")

    assert render_report(report_of_error(error)) == (
        "error: it broke\n  at: a.py:1\n  because: first\n\n      second\nhint: mend it\n"
    )


def test_parts_that_are_unknown_are_left_out():
    assert render_report(report_of_error(MusterError("it broke"))) == "error: it broke\n"
