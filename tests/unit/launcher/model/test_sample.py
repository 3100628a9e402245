"""A sample of many ranks travels in parts."""

import pytest

from torchmuster.launcher.model.progress import RankSample, join, split

SAMPLE = RankSample(
    time="2026-01-01T00:00:00.000+00:00",
    attempt=2,
    over_s=10.0,
    nodes=("n1", "n1", "n2"),
    states=("R", "S", ""),
    steps=(4, None, 5),
)


@pytest.mark.parametrize(("most", "num_parts"), [(1, 3), (2, 2), (3, 1), (100, 1)])
def test_parts_make_the_whole_again(most, num_parts):
    parts = split(SAMPLE, most)

    assert len(parts) == num_parts
    assert max(len(part.nodes) for part in parts) <= most
    assert join(parts) == SAMPLE


def test_a_sample_of_nobody_is_one_part():
    nobody = RankSample(time="", attempt=0, over_s=0.0, nodes=(), states=())
    assert join(split(nobody, 8)) == nobody
