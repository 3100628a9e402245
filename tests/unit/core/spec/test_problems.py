import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.model.text import did_you_mean, show_size
from torchmuster.core.spec import problems


@pytest.mark.parametrize(
    ("word", "near"),
    [("comand", "command"), ("exit_actions", "exitActions"), ("VOLUME-MOUNTS", "volumeMounts")],
)
def test_a_near_miss_is_found_in_spite_of_case_and_hyphens(word, near):
    known = ["name", "command", "exitActions", "volumeMounts"]

    assert did_you_mean(word, known) == f"did you mean `{near}`?"


def test_without_a_near_miss_the_other_hint_is_given():
    assert did_you_mean("zzz", ["name"], "one of: name") == "one of: name"
    assert did_you_mean("zzz", ["name"]) is None


def test_a_near_miss_among_many_names_is_found_at_once():
    names = [f"worker-{i}" for i in range(20_000)]
    began = time.process_time()

    assert did_you_mean("worker_19999", names) is not None
    assert did_you_mean("x" * 100_000, names) is None
    assert time.process_time() - began < 3  # it takes 5 ms; a comparison with each name, a minute


# Durations and sizes.


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("30", 30.0),
        ("30s", 30.0),
        (" 10 m ", 600.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
    ],
)
def test_a_duration_is_read_in_seconds(text, seconds):
    assert problems.parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1", "1h30m", "soon", "1e3", "inf", ".5", "²"])
def test_what_is_no_duration_is_none(text):
    assert problems.parse_seconds(text) is None


@given(st.text())
def test_any_text_is_a_duration_or_none(text):
    seconds = problems.parse_seconds(text)

    assert seconds is None or seconds >= 0.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("1.5h", 5400.0),
        ("2d", 172800.0),
        ("250us", 0.00025),
        ("1h30m", 5400.0),
        ("1d2h3m4s", 93784.0),
        (" 1m30s ", 90.0),
        ("PT1H30M", 5400.0),
        ("PT0.5S", 0.5),
        ("P1D", 86400.0),
        ("P1DT2H", 93600.0),
        ("PT90M", 5400.0),
        ("1:00:00", 3600.0),
        ("01:30:05", 5405.0),
        ("100:00:00", 360000.0),
        ("10:00", 600.0),
        ("90:30", 5430.0),
        ("1-12", 129600.0),
        ("2-00:30", 174600.0),
        ("7-23:59:59", 691199.0),
    ],
)
def test_a_time_limit_is_read_in_every_form_of_the_format(text, seconds):
    assert problems.parse_timeout(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "P",
        "PT",
        "P1W",
        "P1M",
        "PT1",
        "1h 30m",
        "1.5h30m",
        "-1",
        "1h30",
        "pt1h",
        "soon",
        "1:75:00",
        "1:5:0",
        "1:00:00:00",
        "1-24",
        "1:",
        ":30",
        "1:60",
    ],
)
def test_what_is_no_time_limit_is_none(text):
    assert problems.parse_timeout(text) is None


@given(st.integers(0, 99), st.integers(0, 59), st.integers(0, 59))
def test_both_long_forms_of_a_time_limit_mean_the_same(hours, minutes, seconds):
    total_s = hours * 3600 + minutes * 60 + seconds

    assert problems.parse_timeout(f"{hours}h{minutes}m{seconds}s") == total_s
    assert problems.parse_timeout(f"PT{hours}H{minutes}M{seconds}S") == total_s


@given(st.text(alphabet="PTDHMSdhmsu0123456789. "))
def test_any_text_is_a_time_limit_or_none(text):
    seconds = problems.parse_timeout(text)

    assert seconds is None or seconds >= 0.0


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("1024", 1024),
        ("7B", 7),
        ("1K", 1024),
        ("2Ki", 2048),
        ("3KiB", 3072),
        ("500Mi", 500 << 20),
        (" 64 Gi ", 64 << 30),
        ("64G", 64 << 30),
        ("2T", 2 << 40),
    ],
)
def test_a_size_is_read_in_bytes(text, size_bytes):
    assert problems.parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "Gi", "-1", "1.5Gi", "1Pi", "1gi", "1GB", "1e3", "much"])
def test_what_is_no_size_is_none(text):
    assert problems.parse_size(text) is None


@given(st.integers(0, 1023), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]))
def test_a_whole_size_that_is_shown_is_read_back(number, unit):
    size_bytes = problems.parse_size(f"{number}{unit}")

    assert size_bytes is not None
    assert problems.parse_size(show_size(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("2hours", "2h"),
        ("1 hr 30 min", "1h30m"),
        ("1h30", "1h30m"),
        ("1:5:0", "1:05:00"),
        ("3 days", "3d"),
        ("soon", None),
        ("1:75:00", None),
    ],
)
def test_a_duration_that_is_nearly_right_is_understood(text, meant):
    assert problems.near_duration(text) == meant
