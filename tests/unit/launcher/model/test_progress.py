"""A heartbeat file is read completely or not at all; a sample of many ranks travels in parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.model import progress as heartbeat
from torchmuster.core.model.progress import RankPhase
from torchmuster.launcher.model import progress as progress_launcher
from torchmuster.launcher.model.progress import RankSample, join, split

SECONDS = [float(n) for n in range(len(RankPhase))]


def page(durations=(), serial=7, steps=3):
    text = bytearray(heartbeat.PAGE_BYTES)
    record = heartbeat.pack(serial, steps, 40, RankPhase.DATA, 5.0, 4.5, SECONDS)
    text[: len(record)] = record
    for number, duration_s in enumerate(durations):
        data, at = heartbeat.pack_duration(number, duration_s)
        text[at : at + len(data)] = data
    return bytes(text)


def test_what_was_packed_is_read():
    beat = heartbeat.unpack(page([0.25, 0.5]))
    assert (beat.steps_here, beat.step, beat.phase) == (3, 40, RankPhase.DATA)
    assert (beat.at, beat.step_at, list(beat.seconds)) == (5.0, 4.5, SECONDS)
    assert beat.durations == (0.25, 0.5)


def test_an_empty_file_says_nothing():
    assert heartbeat.unpack(bytes(heartbeat.PAGE_BYTES)) is None
    assert heartbeat.unpack(b"") is None


def test_a_half_written_record_is_not_believed():
    old, new = page(serial=7), page(serial=8, steps=4)
    assert heartbeat.unpack(new[:20] + old[20:]) is None


def test_only_the_newest_durations_are_kept():
    number = heartbeat.NUM_DURATIONS + 10
    beat = heartbeat.unpack(page([float(n + 1) for n in range(number)], steps=number + 1))
    assert len(beat.durations) == heartbeat.NUM_DURATIONS
    assert max(beat.durations) == number


@given(st.binary(max_size=2 * heartbeat.PAGE_BYTES))
def test_no_bytes_are_too_odd(data):
    heartbeat.unpack(data)


def test_a_quantile_of_nothing_is_zero():
    assert progress_launcher.quantile((), 0.99) == 0.0
    assert progress_launcher.quantile((1.0, 2.0, 3.0), 0.5) == 2.0
    assert progress_launcher.quantile((1.0, 2.0, 3.0), 0.99) == 3.0


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
