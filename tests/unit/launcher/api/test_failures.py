"""Errors of the command, read back from its text."""

from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.model.text import render_report, report_of_error
from torchmuster.errors import MusterError
from torchmuster.launcher.api.failures import RunFailed, read_errors

WORDS = st.text("abc :`/.-", min_size=1, max_size=30).map(str.strip).filter(bool)
LINES = st.lists(WORDS, min_size=1, max_size=3).map("\n".join)


@given(
    st.lists(st.tuples(WORDS, st.none() | WORDS, st.none() | LINES, st.none() | WORDS), max_size=3)
)
def test_what_is_printed_is_read_back(parts):
    errors = [MusterError(what, where=at, why=why, fix=fix) for what, at, why, fix in parts]
    text = "muster: a note\n" + "\n".join(render_report(report_of_error(e)) for e in errors)

    assert [e.parts() for e in read_errors(text)] == [e.parts() for e in errors]


def test_text_without_an_error_has_none():
    assert read_errors("Traceback (most recent call last):\n    error: x\n") == []


def test_a_run_without_a_result_is_lost():
    failed = RunFailed("train-12ab", None, "lost")

    assert str(failed) == "the run train-12ab ended as lost\nhint: muster status train-12ab"
    assert (failed.rank, failed.traceback, failed.exit_code) == (None, "", 1)
