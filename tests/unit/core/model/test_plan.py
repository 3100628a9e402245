from kit.values import program, run_plan
from torchmuster.core.model.plan import ScriptKind


def plan(**given):
    return run_plan(**{"max_nodes": 3, "workers_per_node": (4, 2), "node_names": ("n1",), **given})


def test_a_place_beyond_the_end_takes_the_last_number_of_workers():
    assert [plan().num_workers(place) for place in range(4)] == [4, 2, 2, 2]


def test_a_place_without_a_name_is_called_by_its_number():
    assert [plan().node_name(place) for place in range(2)] == ["n1", "node 1"]


def test_a_plan_is_elastic_when_its_number_of_nodes_may_change():
    assert plan().is_elastic
    assert not plan(min_nodes=3).is_elastic


def test_a_module_is_displayed_with_its_flag():
    assert program("a.b", kind=ScriptKind.MODULE, args=("-x",)).display() == ("-m", "a.b", "-x")


def test_a_longer_wait_is_spelled_as_the_command_that_made_the_plan_takes_it():
    assert plan().longer_wait == "`--join-timeout 1200s`"
    assert plan(engine="torchrun").longer_wait == "`--rdzv-conf join_timeout=1200`"
