from torchmuster.ui.table import render_table


def test_columns_are_as_wide_as_their_widest_cell():
    table = render_table(["RUN", "STATE"], [["a", "running"], ["digits", "x"]])

    assert table == "RUN     STATE\na       running\ndigits  x\n"


def test_a_table_may_be_empty():
    assert render_table(["RUN", "STATE"], []) == "RUN  STATE\n"
