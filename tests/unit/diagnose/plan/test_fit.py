import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.diagnose.plan.fit import Timing, bus_bandwidth, fit_ring, read_timings

SIZES = [4 * 4**power for power in range(13)]


def timings(alpha, beta, n, sizes=SIZES):
    times = [2 * (n - 1) * alpha + 2 * (n - 1) / n * size * beta for size in sizes]
    return [Timing(size_bytes=s, seconds=t) for s, t in zip(sizes, times, strict=True)]


@given(st.floats(1e-6, 1e-2), st.floats(1e7, 1e11), st.sampled_from([2, 3, 8, 64, 512]))
def test_the_fit_finds_the_latency_and_bandwidth_that_made_the_times(alpha, rate, n):
    found = fit_ring(timings(alpha, 1 / rate, n), n)
    assert found.bytes_per_s == pytest.approx(rate, rel=0.02)
    assert found.latency_s == pytest.approx(alpha, rel=0.01)
    assert found.r_squared == pytest.approx(1.0)
    assert not found.sags


def test_noise_lowers_r_squared_and_shows_the_worst_deviation():
    clean = timings(1e-4, 1e-9, 4)
    noisy = [
        Timing(size_bytes=one.size_bytes, seconds=one.seconds * (1.5 if number % 2 else 1))
        for number, one in enumerate(clean)
    ]
    found = fit_ring(noisy, 4)
    assert 0.8 < found.r_squared < 0.999
    assert found.worst > 0.1


def test_a_largest_size_that_is_slower_than_the_next_smaller_one_sags():
    times = timings(1e-5, 1e-9, 2)
    slow = Timing(size_bytes=SIZES[-1], seconds=times[-1].seconds * 1.2)
    assert fit_ring([*times[:-1], slow], 2).sags


def test_times_that_do_not_grow_have_a_latency_and_no_bound_on_the_bandwidth():
    found = fit_ring([Timing(size_bytes=size, seconds=0.01) for size in SIZES[:6]], 2)
    assert found.latency_s == pytest.approx(0.005, rel=0.01)
    assert found.bytes_per_s > 1e6


def test_times_below_any_latency_fit_without_one():
    short, long = Timing(size_bytes=10, seconds=1e-9), Timing(size_bytes=10**6, seconds=1.0)
    found = fit_ring([short, long], 2)
    assert found.latency_s == 0
    assert found.bytes_per_s == pytest.approx(1.1e6, rel=0.01)  # both sizes count


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert bus_bandwidth(Timing(size_bytes=800, seconds=2.0), 4) == 800 / 2 * 2 * 3 / 4


@pytest.mark.parametrize(("n", "sizes"), [(1, SIZES), (4, [1024]), (4, [])])
def test_a_fit_needs_two_ranks_and_two_sizes(n, sizes):
    with pytest.raises(ValueError, match="two ranks and two sizes"):
        fit_ring([Timing(size_bytes=size, seconds=1.0) for size in sizes], n)


def test_the_tiny_jobs_own_words_are_read():
    (one,) = read_timings([{"bytes": 4, "seconds": 0.1, "cpu_seconds": 0.05, "right": True}])
    assert one == Timing(size_bytes=4, seconds=0.1, cpu_s=0.05)
