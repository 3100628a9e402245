"""How members are spread over arrays, where a scheduler limits their size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.multirun.sweep.arrays import split_members


@pytest.mark.parametrize(
    ("num", "slots", "limit", "sizes", "parallel"),
    [
        (5, 5, None, [5], [None]),
        (5, 2, None, [5], [2]),
        (5, 2, 1001, [5], [2]),
        (2500, 2500, 1001, [1001, 1001, 498], [None] * 3),
        (2500, 7, 1001, [1001, 1001, 498], [3, 2, 2]),
        (4, 1, 2, [2, 2], [1, 1]),
        (2, 2, 0, [1, 1], [None, None]),
    ],
)
def test_one_array_or_as_many_as_the_limit_makes(num, slots, limit, sizes, parallel):
    parts = split_members(range(num), slots, limit)
    assert [len(part.members) for part in parts] == sizes
    assert [part.parallel for part in parts] == parallel


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 100) | st.none())
def test_every_member_is_in_one_array_and_no_more_run_than_there_are_slots(num, slots, limit):
    parts = split_members(range(num), slots, limit)
    assert [n for part in parts for n in part.members] == list(range(num))
    at_once = [part for part in parts if not part.is_chained]
    if slots < num:
        assert sum(part.parallel for part in at_once) <= slots
        assert all(part.parallel <= slots for part in parts)
