from torchmuster.launcher.model.run import thinned


def test_a_short_series_stays_as_it_is():
    points = [(n, float(n)) for n in range(8)]

    assert thinned(points, 8) == points


def test_a_long_series_keeps_each_spike_its_ends_and_its_gaps():
    points = [(n, 1.0) for n in range(100_000)]
    points[12_345] = (12_345, 99.0)
    points[54_321] = (54_321, -99.0)
    points[77_777] = (77_777, None)

    few = thinned(points, 1000)

    assert len(few) <= 1001
    assert {points[0], points[12_345], points[54_321], points[77_777], points[-1]} <= set(few)
    assert [step for step, _ in few] == sorted(step for step, _ in few)
