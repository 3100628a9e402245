import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmuster.core.model.lines import LineJoiner, StatusBelow, Terminal


@pytest.fixture
def joiner():
    """A joiner of several ranks."""
    return LineJoiner(prefix_always=True)


def written(joiner, chunks, *, rest=True):
    pieces = [piece for chunk in chunks for piece in joiner.add(*chunk)]
    return pieces + joiner.rest() if rest else pieces


def text_of(pieces):
    return "".join(text for _, text in pieces)


def test_a_single_rank_passes_as_it_is():
    chunks = [(0, 1, "half"), (0, 1, " line\n10%\r"), (0, 2, "20%\r"), (0, 1, "(Pdb) ")]

    assert written(LineJoiner(), chunks) == [(stream, text) for _, stream, text in chunks]


def test_from_the_second_rank_on_each_line_says_whose_it_is():
    joiner = LineJoiner()

    assert joiner.add(0, 1, "alone\n") == [(1, "alone\n")]
    assert joiner.add(1, 1, "second\n") == [(1, "[rank 1] second\n")]
    assert joiner.add(0, 1, "first\n") == [(1, "[rank 0] first\n")]


def test_the_raw_half_line_of_the_first_rank_is_ended_before_the_second_prints():
    assert text_of(written(LineJoiner(), [(0, 1, "half"), (1, 1, "x\n")])) == "half\n[rank 1] x\n"


def test_half_lines_wait_for_their_end(joiner):
    assert joiner.add(0, 1, "hel") == []
    assert joiner.add(1, 1, "wor") == []
    assert joiner.add(0, 1, "lo\n") == [(1, "[rank 0] hello\n")]
    assert joiner.add(1, 1, "ld\n") == [(1, "[rank 1] world\n")]


def test_half_lines_that_nobody_ends_are_written_at_the_end(joiner):
    joiner.add(0, 1, "last words")

    assert text_of(joiner.rest()) == "[rank 0] last words\n"
    assert joiner.rest() == []


def test_the_two_streams_of_a_rank_are_joined_apart(joiner):
    chunks = [(3, 1, "out"), (3, 2, "err"), (3, 1, "put\n"), (3, 2, "or\n")]

    assert written(joiner, chunks) == [(1, "[rank 3] output\n"), (2, "[rank 3] error\n")]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("10%\r20%\r30%\n", "30%"),
        ("windows\r\n", "windows"),
        ("10%\r20%\r\n", "20%"),
        ("\r\n", ""),
    ],
)
def test_of_a_progress_bar_only_the_last_state_is_written(joiner, line, shown):
    assert text_of(written(joiner, [(0, 1, line)])) == f"[rank 0] {shown}\n"


def test_a_line_without_end_does_not_grow_for_ever(joiner):
    pieces = written(joiner, [(0, 1, "x" * 1000)] * 200, rest=False)

    assert len(text_of(pieces)) > 100_000


@pytest.mark.parametrize(
    ("lacks_logs", "where"), [(False, "see its log"), (True, "not all are in its log")]
)
def test_lines_that_are_left_out_are_counted_in_a_line_of_their_own(lacks_logs, where):
    pieces = LineJoiner(lacks_logs=lacks_logs).add(2, 1, "on\n", 7)

    assert pieces == [(2, f"[rank 2: 7 lines are not shown here; {where}]\n"), (1, "on\n")]


def test_a_count_without_text_leaves_no_open_line():
    joiner = LineJoiner()
    joiner.add(0, 1, "", 7)

    assert joiner.interject() == []


def test_an_interjection_ends_an_open_line_once():
    joiner = LineJoiner()
    joiner.add(0, 2, "50%\r")

    assert joiner.interject() == [(2, "\n")]
    assert joiner.interject() == []


# A word names its rank, so that a line that mixes two ranks is seen.
LINES = st.lists(st.integers(0, 3).flatmap(lambda r: st.tuples(st.just(r), st.integers(0, 30))))


def take_some(left, data):
    """Take some of what a rank has left to say; return it as its joiner gets it."""
    rank = data.draw(st.sampled_from(sorted(left)))
    size = data.draw(st.integers(1, 40))
    text = left.pop(rank)
    if text[size:]:
        left[rank] = text[size:]
    return rank, 1, text[:size]


@given(LINES, st.data())
def test_for_any_chunking_every_line_is_a_whole_line_of_one_rank(lines, data):
    texts = {}
    for rank, length in lines:
        texts[rank] = texts.get(rank, "") + f"<{rank}:{'x' * length}>\n"
    joiner, pieces, left = LineJoiner(prefix_always=True), [], dict(texts)
    while left:
        pieces += joiner.add(*take_some(left, data))
    pieces += joiner.rest()

    shown = dict.fromkeys(texts, "")
    for line in text_of(pieces).splitlines(keepends=True):
        rank = int(line.removeprefix("[rank ").partition("]")[0])
        shown[rank] += line.removeprefix(f"[rank {rank}] ")
    assert shown == texts


def test_half_a_line_that_waits_is_shown_and_goes_on_where_it_stands(joiner):
    joiner.add(0, 1, "loading")

    assert joiner.waits
    assert joiner.show_halves() == [(1, "[rank 0] loading")]
    assert not joiner.waits
    joiner.add(0, 1, " ...")
    assert joiner.show_halves() == [(1, " ...")]
    assert joiner.add(0, 1, " done\nnext\n") == [(1, " done\n"), (1, "[rank 0] next\n")]


def test_half_a_line_is_ended_when_another_rank_speaks_and_then_shown_whole(joiner):
    joiner.add(0, 1, "loading")
    joiner.show_halves()

    assert text_of(joiner.add(1, 1, "hello\n")) == "\n[rank 1] hello\n"
    assert joiner.show_halves() == []  # it stands there already
    assert text_of(joiner.add(0, 1, " done\n")) == "[rank 0] loading done\n"


def test_a_progress_bar_is_drawn_in_place_and_covers_what_it_was(joiner):
    shown = []
    for state in ("100 left", "99 left", "done"):
        joiner.add(0, 2, f"\r{state}")
        shown += joiner.show_halves()
    shown += joiner.add(0, 2, "\n")

    assert text_of(shown) == (
        "[rank 0] 100 left\r[rank 0] 99 left \r[rank 0] done   \r[rank 0] done\n"
    )


def test_the_bars_of_two_ranks_take_turns_on_one_line(joiner):
    for percent in (10, 20):
        for rank in (0, 1):
            joiner.add(rank, 2, f"\r{percent}%")
        shown = text_of(joiner.show_halves())

    assert shown == "\r[rank 0] 20%\r[rank 1] 20%"
    assert text_of(joiner.rest()) == "\n"


def test_what_is_shown_already_is_not_written_again_at_the_end(joiner):
    joiner.add(0, 1, "last words")
    joiner.show_halves()

    assert text_of(joiner.rest()) == "\n"


def test_a_line_without_end_keeps_a_bounded_part(joiner):
    for _ in range(200):
        joiner.add(0, 1, "x" * 10_000)
        joiner.show_halves()

    assert sum(len(half) for half in joiner._half.values()) <= 64 << 10


@given(LINES, st.data())
def test_whenever_halves_are_shown_every_line_of_a_rank_is_there_whole_and_in_order(lines, data):
    texts = {}
    for rank, length in lines:
        texts.setdefault(rank, []).append(f"<{rank}:{'x' * length}>")
    joiner, pieces = LineJoiner(prefix_always=True), []
    left = {rank: "\n".join([*own, ""]) for rank, own in texts.items()}
    while left:
        pieces += joiner.add(*take_some(left, data))
        pieces += joiner.show_halves() if data.draw(st.booleans()) else []
    pieces += joiner.rest()

    shown = {rank: [] for rank in texts}
    for line in text_of(pieces).splitlines():
        name, _, words = line.partition("] ")
        if words.endswith(">"):  # others are halves that somebody has interrupted
            shown[int(name.removeprefix("[rank "))].append(words)
    assert shown == texts


@given(LINES, st.data())
def test_no_byte_of_a_raw_rank_is_lost_when_a_second_one_joins(lines, data):
    joiner = LineJoiner()
    written_text = ""
    for rank, length in lines:
        text = f"<{rank}:{'x' * length}>\n"
        cut = data.draw(st.integers(0, len(text)))
        for part in (text[:cut], text[cut:]):
            written_text += text_of(joiner.add(rank, 1, part)) if part else ""
    written_text += text_of(joiner.rest())

    bare = written_text.replace("\n", "")
    for rank in range(4):
        bare = bare.replace(f"[rank {rank}] ", "")
    assert sorted(bare) == sorted("".join(f"<{r}:{'x' * n}>" for r, n in lines))


def test_into_a_file_no_line_is_written_in_parts():
    alone = LineJoiner(whole=frozenset({1, 2}))
    several = LineJoiner(whole=frozenset({1}), prefix_always=True)

    pieces = [*alone.add(0, 1, "half"), *alone.add(0, 2, "error\n"), *alone.add(0, 1, " whole\n")]
    of_two = [*several.add(0, 1, "ha"), *several.show_halves(), *several.add(1, 1, "one\nen")]
    of_two += [*several.add(0, 1, "lf\n"), *several.rest()]

    assert pieces == [(2, "error\n"), (1, "half whole\n")]
    assert text_of(of_two) == "[rank 1] one\n[rank 0] half\n[rank 1] en\n"


def test_a_terminal_survives_a_command_line():
    terminal = Terminal(streams=frozenset({1, 2}), columns=120, rows=40)

    assert Terminal.from_word(terminal.to_word()) == terminal


def test_a_prefix_takes_its_width_but_never_all_of_it():
    terminal = Terminal(streams=frozenset({1}), columns=30, rows=40)

    assert terminal.behind("[rank 0] ").columns == 21
    assert terminal.behind("[a-task-with-a-long-name] ").columns == 20


# The status below the output: it is seen while it is wanted, and afterwards the screen is as if it had never been.


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


@pytest.fixture
def played():
    return Played()


def test_the_status_stands_below_whole_lines_and_moves_down_with_them(played):
    played.show("one\n")
    played.status("STATUS")
    assert played.screen.lines == ["one", "STATUS"]
    played.show("two\n")
    assert played.screen.lines == ["one", "two", "STATUS"]
    played.status("STATUS 2", "more")
    assert played.screen.lines == ["one", "two", "STATUS 2", "more"]
    played.status()
    assert played.screen.lines == ["one", "two"]


def test_a_progress_bar_moves_above_the_status(played):
    played.status("STATUS")
    for text in ("\r 10%", "\r 20%", "\r 30%"):
        played.show(text)
    assert played.screen.lines == [" 30%", "STATUS"]
    played.show("\n")
    assert played.screen.lines == [" 30%", "STATUS"]


def test_below_a_prompt_there_is_no_status(played):
    played.status("STATUS")
    played.show("(Pdb) ")
    assert played.screen.lines == ["(Pdb)"]
    played.show("42\n")
    assert played.screen.lines == ["(Pdb) 42", "STATUS"]


def test_enter_typed_by_the_user_leaves_nothing_of_the_status(played):
    played.status("STATUS", "SECOND")
    played.screen.write(b"\n")  # the echo
    played.show("out\n")
    played.status()
    assert "SECOND" not in "".join(played.screen.lines)


def test_in_the_background_nothing_is_drawn(played):
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
