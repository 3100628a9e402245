"""Which host is which place of a run."""

from torchmuster.engines.ssh_command import HostProblem, SshHost
from torchmuster.engines.ssh_places import Places, bad_hosts, workers_of
from torchmuster.model.plan import Program, RunPlan, ScriptKind

A, B, C = (SshHost(name=name) for name in "abc")


def test_hosts_beyond_the_nodes_are_spare():
    places = Places([A, B, C], 2)
    assert places.names == ("a", "b")
    assert places.candidates(1) == [B, C]


def test_hosts_that_answer_come_first():
    places = Places([A, B, C], 3)
    places.settle([C, B])
    assert places.names == ("c", "b", "a")


def test_spare_host_that_takes_a_place_is_spare_no_more():
    places = Places([A, B, C], 2)
    assert places.take(1, C)
    assert not places.take(1, C)
    assert places.names == ("a", "c")
    assert places.candidates(0) == [A, B]


def test_slots_win_over_gpus_and_gpus_over_the_plan():
    program = Program(kind=ScriptKind.FILE, target="t", args=(), python=("p",), cwd="/")
    plan = RunPlan(run_id="r", program=program, min_nodes=1, max_nodes=3, workers_per_node=(5,))
    hosts = [SshHost(name="a", slots=2), B, C]
    assert workers_of(hosts, {"a": 8, "b": 4}, plan) == (2, 4, 5)


def test_all_bad_hosts_are_in_one_error_with_each_fix_once():
    problems = [HostProblem(host=name, words="no", fix=f"fix {name != 'c'}") for name in "abc"]
    error = bad_hosts(problems, 3, "--on ssh")
    assert error.what == "3 hosts can't be used: a, b, c; the run needs 3"
    assert error.why == "a: no\nb: no\nc: no"
    assert error.fix == "fix True; fix False"
    assert error.exit_code == 5
