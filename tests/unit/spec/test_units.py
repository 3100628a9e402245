import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.spec.units import parse_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("30", 30.0),
        ("30s", 30.0),
        (" 10 m ", 600.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
    ],
)
def test_a_duration_is_read_in_seconds(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1", "1h30m", "soon", "1e3", "inf", ".5", "²"])
def test_what_is_no_duration_is_none(text):
    assert parse_seconds(text) is None


@given(st.text())
def test_any_text_is_a_duration_or_none(text):
    seconds = parse_seconds(text)

    assert seconds is None or seconds >= 0.0
