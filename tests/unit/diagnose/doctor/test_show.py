"""Rows, matrices and blocks for people."""

from torchmuster.diagnose.doctor.show import COLUMNS, NodeView, matrix_rows, node_row, table_row
from unit.diagnose.doctor.made_up import node


def test_a_row_has_a_cell_for_each_column():
    cells = table_row(node_row(node(1)))
    assert len(cells) == len(COLUMNS)
    assert cells[:5] == ["n1", "n1", "10.0.0.1", "3.11.7", "2.13.0+cpu"]


def test_a_node_that_said_nothing_has_question_marks():
    row = node_row(NodeView(name="n2", why_not="it did not answer in time"))
    assert set(table_row(row)[1:]) == {"?"}
    assert row["unknown"] == {"all": "it did not answer in time"}


def test_a_matrix_says_why_a_pair_is_not_reached():
    header, rows = matrix_rows(
        ["n1", "n2"], [[0, 1, "connection refused", None, None], [1, 0, None, 120, 940.0]]
    )
    assert header == ["from \\ to", "n1", "n2"]
    assert rows == [["n1", "-", "connection refused"], ["n2", "0.12 ms, 940 MB/s", "-"]]


def test_a_large_matrix_has_a_row_for_each_node():
    names = [f"n{k}" for k in range(20)]
    pairs = [[s, t, None, 100, 50.0 + t] for s in range(20) for t in range(20) if s != t]
    pairs[0] = [0, 1, "refused", None, None]
    _, rows = matrix_rows(names, pairs)
    assert len(rows) == 20
    assert rows[0][:3] == ["n0", "18 of 19", "19 of 19"]
    assert rows[1][2] == "18 of 19"
