import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.model.lines import LineJoiner


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


def test_half_lines_wait_for_their_end():
    joiner = LineJoiner(prefix_always=True)

    assert joiner.add(0, 1, "hel") == []
    assert joiner.add(1, 1, "wor") == []
    assert joiner.add(0, 1, "lo\n") == [(1, "[rank 0] hello\n")]
    assert joiner.add(1, 1, "ld\n") == [(1, "[rank 1] world\n")]


def test_half_lines_that_nobody_ends_are_written_at_the_end():
    joiner = LineJoiner(prefix_always=True)
    joiner.add(0, 1, "last words")

    assert text_of(joiner.rest()) == "[rank 0] last words\n"
    assert joiner.rest() == []


def test_the_two_streams_of_a_rank_are_joined_apart():
    chunks = [(3, 1, "out"), (3, 2, "err"), (3, 1, "put\n"), (3, 2, "or\n")]

    assert written(LineJoiner(prefix_always=True), chunks) == [
        (1, "[rank 3] output\n"),
        (2, "[rank 3] error\n"),
    ]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("10%\r20%\r30%\n", "30%"),
        ("windows\r\n", "windows"),
        ("10%\r20%\r\n", "20%"),
        ("\r\n", ""),
    ],
)
def test_of_a_progress_bar_only_the_last_state_is_written(line, shown):
    pieces = written(LineJoiner(prefix_always=True), [(0, 1, line)])

    assert text_of(pieces) == f"[rank 0] {shown}\n"


def test_a_line_without_end_does_not_grow_for_ever():
    joiner = LineJoiner(prefix_always=True)

    pieces = written(joiner, [(0, 1, "x" * 1000)] * 200, rest=False)

    assert len(text_of(pieces)) > 100_000


def test_lines_that_are_left_out_are_counted_in_a_line_of_their_own():
    pieces = LineJoiner().add(2, 1, "on\n", 7)

    assert pieces == [
        (2, "[rank 2: 7 lines are not shown here; see its log]\n"),
        (1, "on\n"),
    ]


def test_lines_that_are_left_out_are_not_all_in_a_log_that_lacks_lines():
    pieces = LineJoiner(lacks_logs=True).add(2, 1, "", 7)

    assert pieces == [(2, "[rank 2: 7 lines are not shown here; not all are in its log]\n")]


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


@given(LINES, st.data())
def test_for_any_chunking_every_line_is_a_whole_line_of_one_rank(lines, data):
    texts = {}
    for rank, length in lines:
        texts[rank] = texts.get(rank, "") + f"<{rank}:{'x' * length}>\n"
    joiner = LineJoiner(prefix_always=True)
    pieces = []
    left = dict(texts)
    while left:
        rank = data.draw(st.sampled_from(sorted(left)))
        size = data.draw(st.integers(1, 40))
        pieces += joiner.add(rank, 1, left[rank][:size])
        left[rank] = left[rank][size:]
        if not left[rank]:
            del left[rank]
    pieces += joiner.rest()

    shown = dict.fromkeys(texts, "")
    for line in text_of(pieces).splitlines(keepends=True):
        rank = int(line.removeprefix("[rank ").partition("]")[0])
        shown[rank] += line.removeprefix(f"[rank {rank}] ")
    assert shown == texts


def test_half_a_line_that_waits_is_shown_and_goes_on_where_it_stands():
    joiner = LineJoiner(prefix_always=True)
    joiner.add(0, 1, "loading")

    assert joiner.waits
    assert joiner.show_halves() == [(1, "[rank 0] loading")]
    assert not joiner.waits
    joiner.add(0, 1, " ...")
    assert joiner.show_halves() == [(1, " ...")]
    assert joiner.add(0, 1, " done\nnext\n") == [(1, " done\n"), (1, "[rank 0] next\n")]


def test_half_a_line_is_ended_when_another_rank_speaks_and_then_shown_whole():
    joiner = LineJoiner(prefix_always=True)
    joiner.add(0, 1, "loading")
    joiner.show_halves()

    assert text_of(joiner.add(1, 1, "hello\n")) == "\n[rank 1] hello\n"
    assert joiner.show_halves() == []  # it stands there already
    assert text_of(joiner.add(0, 1, " done\n")) == "[rank 0] loading done\n"


def test_a_progress_bar_is_drawn_in_place_and_covers_what_it_was():
    joiner = LineJoiner(prefix_always=True)
    shown = []
    for state in ("100 left", "99 left", "done"):
        joiner.add(0, 2, f"\r{state}")
        shown += joiner.show_halves()
    shown += joiner.add(0, 2, "\n")

    assert text_of(shown) == (
        "[rank 0] 100 left\r[rank 0] 99 left \r[rank 0] done   \r[rank 0] done\n"
    )


def test_the_bars_of_two_ranks_take_turns_on_one_line():
    joiner = LineJoiner(prefix_always=True)
    for percent in (10, 20):
        for rank in (0, 1):
            joiner.add(rank, 2, f"\r{percent}%")
        shown = text_of(joiner.show_halves())

    assert shown == "\r[rank 0] 20%\r[rank 1] 20%"
    assert text_of(joiner.rest()) == "\n"


def test_what_is_shown_already_is_not_written_again_at_the_end():
    joiner = LineJoiner(prefix_always=True)
    joiner.add(0, 1, "last words")
    joiner.show_halves()

    assert text_of(joiner.rest()) == "\n"


def test_a_line_without_end_keeps_a_bounded_part():
    joiner = LineJoiner(prefix_always=True)
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
        rank = data.draw(st.sampled_from(sorted(left)))
        size = data.draw(st.integers(1, 40))
        pieces += joiner.add(rank, 1, left[rank][:size])
        pieces += joiner.show_halves() if data.draw(st.booleans()) else []
        left[rank] = left[rank][size:]
        if not left[rank]:
            del left[rank]
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
