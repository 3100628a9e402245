"""The matrix of faults on its page is the one that was measured."""

from matrix import page
from matrix.faults import FAULTS
from matrix.worlds import WORLDS


def test_the_page_holds_the_measured_matrix():
    assert page.PAGE.read_text() == page.page(page.read()), "make matrix"


def test_every_fault_was_tried_on_every_engine():
    document = page.read()
    assert list(document) == list(WORLDS)
    for known in document.values():
        assert list(known["cells"]) == [fault.name for fault in FAULTS]


def test_a_table_names_what_has_failed_and_why_a_cell_is_empty():
    cells = {fault.name: {"word": "ok", "shown_s": 0.55} for fault in FAULTS}
    cells["link"] = {"word": "impossible", "why": "there is no link"}
    cells["disk"] = {"word": "failed", "why": "the cause is rank 1, not 2"}
    lines = page.table({"local": {"cells": cells}}).splitlines()
    assert "| link cut | - (1) | not run |" in "\n".join(lines)
    assert "| disk full | **FAILED**: the cause is rank 1, not 2 | not run |" in "\n".join(lines)
    assert lines[-1] == "1. there is no link"
