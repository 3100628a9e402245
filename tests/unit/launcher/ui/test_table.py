"""Tables, and numbers in few columns; what nobody knows is a dash, what is no number keeps its name."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.model.text import span
from torchmuster.launcher.ui import table


def test_columns_are_as_wide_as_their_widest_cell():
    text = table.render_table(["RUN", "STATE"], [["a", "running"], ["digits", "x"]])

    assert text == "RUN     STATE\na       running\ndigits  x\n"


def test_a_table_may_be_empty():
    assert table.render_table(["RUN", "STATE"], []) == "RUN  STATE\n"


def test_a_cell_of_somebody_else_s_words_breaks_no_row():
    text = table.render_table(["RUN", "COMMAND"], [["a", "train\n.py\t\r\x1b[2J"], ["b", "x"]])

    assert text == "RUN  COMMAND\na    train\\n.py\\t\\x0d\\x1b[2J\nb    x\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (-3.0, "0 s"),
        (59.9, "59 s"),
        (61.0, "1 min 1 s"),
        (3661.0, "1 h 1 min"),
        (190_061.0, "2 d 4 h"),
    ],
)
def test_times(seconds, text):
    assert span(seconds, whole=True) == text


@pytest.mark.parametrize(
    ("show", "values", "texts"),
    [
        (table.show_number, (None, 22.154, 1234.5, math.nan, -math.inf), "- 22.2 1234 nan -inf"),
        (table.show_mib, (None, 265, 12595), "- 265M 12.3G"),
        (table.show_bytes, (None, 0, 83078, 3 << 40), "- 0 B 81.1 KiB 3 TiB"),
        (table.show_share, (None, 0.314, math.nan), "- 31% -"),
    ],
)
def test_numbers_and_sizes(show, values, texts):
    assert " ".join(show(value) for value in values) == texts


def test_a_curve_falls_where_the_values_fall():
    assert table.curve([8, 7, 6, 5, 4, 3, 2, 1], 8, unicode=True) == "█▇▆▅▄▃▂▁"
    assert table.curve([2, 1], 8, unicode=False) == "#_"
    assert table.curve([1, 1, 1], 8, unicode=False) == "___"
    assert table.curve([], 8, unicode=True) == ""


def test_a_loss_that_is_no_number_is_seen_in_the_curve():
    assert table.curve([1.0, 0.5, math.nan, math.inf], 8, unicode=False) == "#_xx"
    assert table.curve([math.nan], 8, unicode=True) == "x"


@given(st.lists(st.floats(), max_size=50), st.integers(0, 20), st.booleans())
def test_any_values_make_a_curve_that_fits(values, width, unicode):
    assert len(table.curve(values, width, unicode=unicode)) <= width
