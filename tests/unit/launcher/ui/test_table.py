from torchmuster.launcher.ui.table import render_table


def test_columns_are_as_wide_as_their_widest_cell():
    table = render_table(["RUN", "STATE"], [["a", "running"], ["digits", "x"]])

    assert table == "RUN     STATE\na       running\ndigits  x\n"


def test_a_table_may_be_empty():
    assert render_table(["RUN", "STATE"], []) == "RUN  STATE\n"


def test_a_cell_of_somebody_else_s_words_breaks_no_row():
    table = render_table(["RUN", "COMMAND"], [["a", "train\n.py\t\r\x1b[2J"], ["b", "x"]])

    assert table == "RUN  COMMAND\na    train\\n.py\\t\\x0d\\x1b[2J\nb    x\n"
