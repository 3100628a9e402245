import pytest

from torchmuster.diagnose.plan.scaling import BETWEEN, INSIDE, NetworkLink, next_faster, parse_link


@pytest.mark.parametrize(
    ("text", "bytes_per_s", "latency_s"),
    [
        ("25Gbit/s,50us", 25e9 / 8, 50e-6),
        ("3GB/s, 20us", 3e9, 20e-6),
        ("100 Mbps,1ms", 100e6 / 8, 1e-3),
        ("1.5TB/s,900ns", 1.5e12, 900e-9),
    ],
)
def test_a_rate_and_a_latency_are_a_link(text, bytes_per_s, latency_s):
    link = parse_link(text)
    assert (link.bytes_per_s, link.latency_s) == pytest.approx((bytes_per_s, latency_s))


@pytest.mark.parametrize(
    "text", ["", "25Gbit/s", ",50us", "25GB,50us", "0GB/s,1us", "x,y", "-1GB/s,1us"]
)
def test_anything_else_is_none(text):
    assert parse_link(text) is None


def test_bits_and_bytes_differ_by_eight():
    assert parse_link("8Gbit/s,1us").bytes_per_s == parse_link("1GB/s,1us").bytes_per_s


def test_no_known_network_is_faster_than_its_name_says():
    for name, known in BETWEEN.items():
        line = float("".join(c for c in name.split("-")[0] if c.isdigit())) * 1e9 / 8
        assert 0.2 * line < known.link.bytes_per_s < line


def test_the_next_faster_network_has_twice_the_bandwidth():
    name, link = next_faster(BETWEEN["10GbE"].link)
    assert name == "25GbE"
    assert link.bytes_per_s >= 2 * BETWEEN["10GbE"].link.bytes_per_s
    assert next_faster(BETWEEN["slingshot200-tcp"].link)[0] == "slingshot200 or HDR200"
    assert next_faster(NetworkLink(latency_s=0.0, bytes_per_s=1e12)) is None


def test_links_inside_are_faster_than_the_slowest_between():
    assert all(k.link.bytes_per_s > BETWEEN["1GbE"].link.bytes_per_s for k in INSIDE.values())
