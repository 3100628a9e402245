import pytest

from torchmuster.errors import UsageError
from torchmuster.launcher.engines import base


def test_site_lines_come_last_and_replace_ours_by_option():
    ours = ["-l select=1", "-l place=scatter", "-q a", "--mem=1M"]
    site = ["#PBS -l place=excl", "-q b", "-l software=x", "--mem 2M"]
    assert base.assemble("PBS", ours, site) == [
        "#PBS -l select=1",
        "#PBS -l place=excl",
        "#PBS -q b",
        "#PBS -l software=x",
        "#PBS --mem 2M",
    ]


@pytest.mark.parametrize(
    ("seconds", "minutes"), [(0, 1), (1, 1), (60, 1), (60.5, 2), (3600, 60), (3601, 61)]
)
def test_minutes_are_rounded_up(seconds, minutes):
    assert base.minutes_up(seconds) == minutes


@pytest.mark.parametrize(("size", "mebibytes"), [(1, 1), (1 << 20, 1), ((1 << 20) + 1, 2)])
def test_mebibytes_are_rounded_up(size, mebibytes):
    assert base.mebibytes_up(size) == mebibytes


@pytest.mark.parametrize(
    ("name", "clean"),
    [("train", "train"), ("a b/c", "a_b_c"), ("7up", "m7up"), ("", "muster"), ("ü", "m_")],
)
def test_name_is_one_that_every_scheduler_takes(name, clean):
    assert base.clean_name(name, 20) == clean


def test_name_is_cut():
    assert base.clean_name("9" * 30, 15) == "m" + "9" * 14


def test_line_of_the_site_that_is_no_option_says_how_to_write_it():
    with pytest.raises(UsageError) as caught:
        base.assemble("SBATCH", [], ["mem=3"])
    assert "#SBATCH" in caught.value.fix


@pytest.mark.parametrize("text", ["", "soon", "1e9", "-5", "9" * 13])
def test_end_that_is_no_time_is_no_end(text):
    assert base.ends_at({base.ENDS_AT: text}) is None
