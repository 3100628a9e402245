"""Torque's own: its resource lines, its XML, its pbsdsh."""

import pytest
from tests.unit.engines.jobs import JOBS, request

from torchmuster.engines.base import EngineError, NodeStart
from torchmuster.engines.torque import DIALECT
from torchmuster.model.job import NodeChunk, NodeLauncher
from torchmuster.model.states import JobState

XML = (
    "<Data><Job><Job_Id>{id}</Job_Id><job_state>{state}</job_state>{more}"
    "<exec_host>n1/0+n1/1+n2/0</exec_host></Job></Data>"
)


def view(state, more=""):
    return DIALECT.views(XML.format(id="1.srv", state=state, more=more))["1.srv"]


@pytest.mark.parametrize("name", ["plain", "unequal_nodes", "range_of_nodes"])
def test_whole_script(name, golden):
    golden("scripts/torque.txt", name, DIALECT.script(JOBS[name]))


def test_property_of_nodes_has_no_value():
    script = DIALECT.script(request(chunks=(NodeChunk(cpus=2, extra=(("bigmem", ""),)),)))
    assert "#PBS -l nodes=1:ppn=2:bigmem\n" in script


@pytest.mark.parametrize(
    ("state", "status", "want", "code"),
    [
        ("C", "0", JobState.SUCCEEDED, 0),
        ("C", "7", JobState.FAILED, 7),
        ("C", "271", JobState.CANCELLED, 143),
        ("C", "-11", JobState.TIMED_OUT, None),
        ("C", "-10", JobState.OUT_OF_MEMORY, None),
        ("C", "", JobState.CANCELLED, None),
        ("C", "splendid", JobState.CANCELLED, None),
        ("R", "", JobState.RUNNING, None),
        ("H", "", JobState.HELD, None),
    ],
)
def test_state_and_exit_code(state, status, want, code):
    more = f"<exit_status>{status}</exit_status>" if status else ""
    found = view(state, more)
    assert (found.state, found.exit_code, found.nodes) == (want, code, ("n1", "n2"))


@pytest.mark.parametrize("stdout", ["<Data>", "qstat: Unknown Job Id", "<!DOCTYPE x><Data/>"])
def test_answer_that_is_no_list_of_jobs_is_an_error(stdout):
    with pytest.raises(EngineError, match="can't be read"):
        DIALECT.views(stdout)


def test_agent_is_started_by_name():
    start = NodeStart(node="n2", slot=4, command=("/bin/x",))
    assert DIALECT.node_argv(start) == ["pbsdsh", "-h", "n2", "/bin/x"]


def test_other_ways_are_those_of_pbs():
    start = NodeStart(node="n2", command=("/bin/x",), launcher=NodeLauncher.TMRSH)
    assert DIALECT.node_argv(start) == ["pbs_tmrsh", "n2", "/bin/x"]


def test_status_asks_for_xml_and_then_for_text():
    want = [["qstat", "-f", "-x", "1", "2"], ["qstat", "-f", "1", "2"]]
    assert DIALECT.status_argv(["1", "2"]) == want


def test_what_torque_counts_otherwise_is_said():
    keys = [sentence.partition(":")[0] for sentence in DIALECT.unmapped(JOBS["plain"])]
    assert keys == ["memory", "nodes"]
