"""When a job has to end, from what each scheduler says of it."""

import time

import pytest

from torchmuster.launcher.engines.base import clock_seconds
from torchmuster.launcher.engines.registry import load_dialect

NOW = 1_795_170_486.0
STARTED = time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(NOW - 60))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("39", 39),
        ("0:39", 39),
        ("01:02:03", 3723),
        ("1-00:00:00", 86400),
        ("2-03", 183600),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("-1:00", None),
        ("", None),
    ],
)
def test_clock_is_read(text, seconds):
    assert clock_seconds(text) == seconds


@pytest.mark.parametrize(
    ("stdout", "end"),
    [
        ("left|1:30\n", NOW + 90),
        ("left|1:30\nleft|0:30\n", NOW + 30),  # components of a heterogeneous job
        ("left|INVALID\n", None),
        ("JobId=7 JobName=x RunTime=00:01:00 TimeLimit=00:05:00 TimeMin=N/A", NOW + 240),
        ("JobId=7 RunTime=00:01:00 TimeLimit=UNLIMITED", None),
    ],
)
def test_slurm_tells_what_is_left(stdout, end):
    assert load_dialect("slurm").job_end(stdout, NOW) == end


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ('"Resource_List": {"walltime": "00:02:00"}', NOW + 120),
        (f'"Resource_List": {{"walltime": "00:02:00"}}, "stime": "{STARTED}"', NOW + 60),
        (
            '"Resource_List": {"walltime": "00:02:00"}, "resources_used": {"walltime": "00:00:50"}',
            NOW + 70,
        ),
        ('"Resource_List": {"ncpus": 2}', None),
    ],
)
def test_pbs_tells_walltime_and_start(fields, end):
    text = f'{{"Jobs": {{"1.ctl": {{{fields}}}}}}}'
    assert load_dialect("pbs").job_end(text, NOW) == end


def test_the_text_form_is_read_too():
    text = f"Job Id: 1.ctl\n    Resource_List.walltime = 00:02:00\n    stime = {STARTED}\n"
    assert load_dialect("pbs").job_end(text, NOW) == NOW + 60
