"""The status below the output: it is seen while it is wanted, and afterwards the screen is as if it had never been."""

import pyte
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmuster.core.model.lines import LineJoiner, StatusBelow

COLUMNS, ROWS = 30, 8


class Screen:
    """What a terminal shows of what is written, with what has scrolled away."""

    def __init__(self):
        self._screen = pyte.HistoryScreen(COLUMNS, ROWS, history=1000)
        self._stream = pyte.ByteStream(self._screen)

    def write(self, data):
        self._stream.feed(data.replace(b"\n", b"\r\n"))  # as the kernel's line discipline does

    @property
    def lines(self):
        above = ["".join(row[at].data for at in range(COLUMNS)) for row in self._screen.history.top]
        whole = [line.rstrip() for line in (*above, *self._screen.display)]
        while whole and not whole[-1]:
            whole.pop()
        return whole


class Played:
    """Output and status as a terminal gets them."""

    def __init__(self):
        self.screen = Screen()
        self.joiner = LineJoiner()
        self.below = StatusBelow(self.joiner)
        self.may_draw = True

    def show(self, text):
        for _, piece in self.joiner.add(0, 1, text):
            self.screen.write((self.below.cover() + piece).encode())
        self.settle()

    def status(self, *rows):
        self.below.wanted = rows
        self.settle()

    def settle(self):
        if self.below.is_due(may_draw=self.may_draw):
            self.screen.write(self.below.draw(may_draw=self.may_draw).encode())


def test_the_status_stands_below_whole_lines_and_moves_down_with_them():
    played = Played()
    played.show("one\n")
    played.status("STATUS")
    assert played.screen.lines == ["one", "STATUS"]
    played.show("two\n")
    assert played.screen.lines == ["one", "two", "STATUS"]
    played.status("STATUS 2", "more")
    assert played.screen.lines == ["one", "two", "STATUS 2", "more"]
    played.status()
    assert played.screen.lines == ["one", "two"]


def test_a_progress_bar_moves_above_the_status():
    played = Played()
    played.status("STATUS")
    for text in ("\r 10%", "\r 20%", "\r 30%"):
        played.show(text)
    assert played.screen.lines == [" 30%", "STATUS"]
    played.show("\n")
    assert played.screen.lines == [" 30%", "STATUS"]


def test_below_a_prompt_there_is_no_status():
    played = Played()
    played.status("STATUS")
    played.show("(Pdb) ")
    assert played.screen.lines == ["(Pdb)"]
    played.show("42\n")
    assert played.screen.lines == ["(Pdb) 42", "STATUS"]


def test_enter_typed_by_the_user_leaves_nothing_of_the_status():
    played = Played()
    played.status("STATUS", "SECOND")
    played.screen.write(b"\n")  # the echo
    played.show("out\n")
    played.status()
    assert "SECOND" not in "".join(played.screen.lines)


def test_in_the_background_nothing_is_drawn():
    played = Played()
    played.may_draw = False
    played.status("STATUS")
    played.show("one\n")
    assert played.screen.lines == ["one"]


OUTPUT = st.lists(
    st.one_of(
        st.text("abc\r\n", min_size=1, max_size=12),
        st.sampled_from([(), ("STATUS",), ("STATUS", "SECOND ROW"), ("S" * 60,)]),
    ),
    max_size=30,
)


@settings(max_examples=200)
@given(OUTPUT)
def test_after_the_end_the_screen_is_as_if_there_had_been_no_status(steps):
    with_status, without = Played(), Played()
    for step in steps:
        if isinstance(step, tuple):
            with_status.status(*step)
        else:
            with_status.show(step)
            without.show(step)
    with_status.status()
    assert with_status.screen.lines == without.screen.lines
