"""What `follow` shows where: in a cell, on a terminal, in a file."""

from torchmuster.launcher.api import follow


def test_on_a_terminal_the_status_stands_below_the_output_and_goes_before_more(capsys):
    shown = follow._Terminal()
    shown.write("step 1\n")
    shown.show("running")
    shown.write("step 2\n")
    shown.show("")

    clear = "\r\x1b[K"
    assert capsys.readouterr().out == f"step 1\nrunning{clear}step 2\nrunning{clear}"


def test_on_a_terminal_no_status_stands_in_the_middle_of_a_line(capsys):
    shown = follow._Terminal()
    shown.write("half")
    shown.show("running")
    shown.write(" and the rest\n")
    shown.show("run\x1b[2Jning")

    assert capsys.readouterr().out == "half and the rest\nrun\\x1b[2Jning"


def test_a_cell_has_one_output_for_the_status_which_is_replaced():
    made = []

    class Handle:
        def update(self, data, *, raw):
            made.append(("update", data["text/plain"], raw))

    def display(data, *, raw, display_id):
        made.append(("display", data["text/plain"], raw, display_id))
        return Handle()

    shown = follow._Cell(display)
    shown.show("")
    assert made == []
    shown.show("waiting")
    shown.show("running\x07")
    shown.show("")

    assert made == [
        ("display", "waiting", True, True),
        ("update", "running\\x07", True),
        ("update", "", True),
    ]


def test_outside_of_a_notebook_there_is_no_cell():
    assert follow._cell() is None
