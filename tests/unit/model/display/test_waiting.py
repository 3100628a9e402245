import pytest

from torchmuster.model.display.waiting import name_missing, say_missing


@pytest.mark.parametrize(
    ("names", "num_missing", "text"),
    [
        (["b"], 1, "b"),
        (["b", "c"], 2, "b, c"),
        (["b", "c", "d"], 2, "2 of b, c, d"),
        (["b"], 4, "b and 3 more"),
        ([], 5, "5 more"),
        ([f"t{i}" for i in range(8)], 100, "t0, t1, t2, t3, t4, t5, t6, t7 and 92 more"),
        ([f"t{i}" for i in range(10)], 1, "1 of t0, t1, t2, t3, t4, t5, t6, t7 and 2 more"),
    ],
)
def test_who_is_missing_is_told_in_few_words(names, num_missing, text):
    assert name_missing(names, num_missing) == text


def test_a_progress_line_counts_and_names():
    assert say_missing(1, 3, "b, c") == "1 of 3 is here, missing: b, c"
    assert say_missing(2, 3, "c") == "2 of 3 are here, missing: c"
