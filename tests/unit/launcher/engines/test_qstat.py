"""Every form in which `qstat -f` answers, and JSON that is none."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.launcher.engines.pbs import DIALECT as PBS
from torchmuster.launcher.engines.pbs import read_jobs

FIELDS = {
    "Job_Name": "okjob",
    "job_state": "F",
    "exec_host": "n1/0*2+n2/0*2",
    "Exit_status": 7,
    "comment": "Job run at Fri Nov 20 at 10:28 on (n1:ncpus=2:ngpus=1)+(n2:ncpus=2:ngpus=1) and failed",
}
# The manual's form: a value is wrapped behind a comma or a plus, the rest begins with a tab.
TEXT = """
Job Id: 1.ctl
    Job_Name = okjob
    Job_Owner = lab@ctl
    job_state = F
    exec_host = n1/0*2+
\tn2/0*2
    Resource_List.ncpus = 4
    Variable_List = PBS_O_HOME=/home/lab,PBS_O_LANG=en_US.UTF-8,
\tPBS_O_LOGNAME=lab,job_state = R
    comment = Job run at Fri Nov 20 at 10:28 on (n1:ncpus=2:ngpus=1)+(n2:ncpus
\t=2:ngpus=1) and failed
    Exit_status = 7

Job Id: 2.ctl
    job_state = Q
    estimated.start_time = Sat Nov 21 14:00:00 2026
"""


def jobs_of(text):
    return '{"timestamp": 1795170486, "Jobs": ' + text + "}"


def test_wrapped_text_says_what_json_says():
    from_json = PBS.views(json.dumps({"Jobs": {"1.ctl": FIELDS}}))["1.ctl"]
    from_text = PBS.views(TEXT)
    assert from_text["1.ctl"] == from_json
    assert from_text["1.ctl"].exit_code == 7
    assert from_text["1.ctl"].nodes == ("n1", "n2")
    assert from_text["2.ctl"].start_estimate == "Sat Nov 21 14:00:00 2026"


def test_lines_that_a_site_prints_before_are_left_out():
    assert PBS.views(f"Welcome to the cluster\n{TEXT}").keys() == {"1.ctl", "2.ctl"}
    assert (
        PBS.views("Welcome\n" + jobs_of('{"1": {"job_state": "R"}}'))["1"].state.value == "running"
    )


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ('{"1": {"Account_Name": 007, "job_state": "R"}}', {"Account_Name": "007"}),
        ('{"1": {"Job_Name": 1., "job_state": "R"}}', {"Job_Name": "1."}),
        ('{"1": {"Path": "C:\\Users\\x", "job_state": "R"}}', {}),
        ('{"1": {"Path": "a\\qb", "job_state": "R"}}', {"Path": "a\\qb"}),
        ('{"1": {"comment": "a\tb\nc", "job_state": "R"}}', {"comment": "a\tb\nc"}),
        (
            '{"1": {"comment": "x = 007, 1.", "n": 08, "job_state": "R"}}',
            {"comment": "x = 007, 1."},
        ),
    ],
)
def test_json_that_is_none_is_mended(text, fields):
    found = read_jobs(jobs_of(text))
    assert found["1"]["job_state"] == "R"
    assert {key: found["1"][key] for key in fields} == fields


def test_table_that_begins_anew_for_each_job_is_one():
    text = '{"Jobs": {"1": {"job_state": "R"}}, "Jobs": {"2": {"job_state": "Q"}}}'
    assert set(read_jobs(text)) == {"1", "2"}


def test_key_that_comes_twice_has_its_last_value():
    assert (
        read_jobs(jobs_of('{"1": {"job_state": "Q", "job_state": "R"}}'))["1"]["job_state"] == "R"
    )


def test_text_behind_the_end_is_left_out():
    assert set(read_jobs(jobs_of('{"1": {}}') + "\nqstat: done\n")) == {"1"}


@pytest.mark.parametrize(
    "text", ["nothing at all", "{", '{"Jobs": ' + "[" * 9999, "<Data>", "<!DOCTYPE x><Data/>"]
)
def test_what_is_no_answer_is_an_error(text):
    with pytest.raises(ValueError, match=r"."):
        read_jobs(text)


@given(
    st.dictionaries(
        st.sampled_from(["comment", "Job_Name", "project", "n"]),
        st.one_of(st.text(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)),
    )
)
def test_good_json_is_read_as_it_is(fields):
    assert read_jobs(jobs_of(json.dumps({"1": fields}))) == {"1": fields}


@given(st.text(st.sampled_from('{}[]":,\\ \n\tJobs<>01.aId=')))
def test_garbage_ends_in_an_answer_or_a_value_error(text):
    with contextlib.suppress(ValueError):
        read_jobs(text)
