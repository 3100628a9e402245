"""Which task goes to which hosts: in turn, by what it asks for, all of a group or none."""

import pytest

from kit.workflows import workflow_plan
from torchmuster.workflow.owner.capacity import (
    HostCapacity,
    HostFacts,
    describe_crowding,
    largest_min_hosts,
)
from torchmuster.workflow.plan import GroupPlan, Resources, TaskPlan, TrainingPlan

GIB = 1 << 30


def hosts(*names, gpus=0, cpus=8, slots=None):
    return [
        HostFacts(name=name, num_cpus=cpus, num_gpus=gpus, memory_bytes=GIB, slots=slots)
        for name in names
    ]


def task(name, nodes=None, **asked):
    training = None if nodes is None else TrainingPlan(nodes=nodes, nproc_per_node="1", script="s")
    return TaskPlan(name=name, resources=Resources(**asked), training=training)


def group(name, *tasks):
    return GroupPlan(name=name, tasks=tasks)


def placed(capacity, one):
    assert capacity.try_take(one) is not None
    tasks = capacity.nodes_of(one.name).tasks
    return {name: [node.name for node in nodes] for name, nodes in tasks.items()}


def test_tasks_of_a_group_go_to_the_hosts_in_turn():
    capacity = HostCapacity(hosts("a", "b"), "broker")
    found = placed(capacity, group("g", task("t0"), task("t1"), task("t2")))
    assert found == {"t0": ["a"], "t1": ["b"], "t2": ["a"]}


def test_groups_one_after_the_other_use_all_hosts():
    capacity = HostCapacity(hosts("a", "b"), "broker")
    assert placed(capacity, group("g", task("t")))["t"] == ["a"]
    capacity.give_back("g")
    assert placed(capacity, group("h", task("u")))["u"] == ["b"]


def test_a_training_task_gets_hosts_that_are_all_different():
    capacity = HostCapacity(hosts("a", "b", "c"), "broker")
    found = placed(capacity, group("g", task("t", "3"), task("u")))
    assert found["t"] == ["a", "b", "c"]
    assert len(found["u"]) == 1


def test_a_range_of_nodes_takes_the_hosts_that_there_are():
    capacity = HostCapacity(hosts("a", "b"), "broker")
    assert placed(capacity, group("g", task("t", "1:4")))["t"] == ["a", "b"]


def test_gpus_of_a_host_go_to_one_task_at_a_time():
    capacity = HostCapacity(hosts("a", gpus=4), "broker")
    assert capacity.try_take(group("g", task("t", gpu=3))) == {"t": ["0", "1", "2"]}
    assert capacity.try_take(group("h", task("u", gpu=1))) == {"u": ["3"]}
    assert capacity.try_take(group("i", task("v", gpu=1))) is None
    capacity.give_back("g")
    assert capacity.try_take(group("i", task("v", gpu=1))) == {"v": ["0"]}


def test_a_task_goes_where_its_gpus_are():
    mixed = [*hosts("plain"), *hosts("fast", gpus=2)]
    capacity = HostCapacity(mixed, "broker")
    assert placed(capacity, group("g", task("t", gpu=2)))["t"] == ["fast"]


def test_each_host_is_told_with_its_own_gpus():
    mixed = [*hosts("plain"), *hosts("fast", gpus=2)]
    capacity = HostCapacity(mixed, "broker")
    capacity.try_take(group("g", task("t", "2")))
    (nodes,) = capacity.nodes_of("g").tasks.values()
    assert {node.name: node.gpus for node in nodes} == {"plain": None, "fast": ()}


def test_a_task_without_gpus_sees_none_where_there_are_some():
    capacity = HostCapacity(hosts("a", gpus=2), "broker")
    assert capacity.try_take(group("g", task("t"))) == {"t": []}


@pytest.mark.parametrize("asked", [{"cpu": 9}, {"memory_bytes": 2 * GIB}, {"gpu": 1}])
def test_a_group_that_fits_nowhere_runs_alone(asked):
    capacity = HostCapacity(hosts("a", "b"), "broker")
    large, small = group("g", task("t", **asked)), group("h", task("u"))
    assert capacity.try_take(small) is not None
    assert capacity.try_take(large) is None
    assert "waits for room for 1 task on 2 hosts; h run there" in capacity.why_waiting(large)
    capacity.give_back("h")
    assert capacity.try_take(large) is not None


def test_slots_limit_the_tasks_of_a_host():
    capacity = HostCapacity(hosts("a", slots=1), "broker")
    assert capacity.try_take(group("g", task("t"))) is not None
    assert capacity.try_take(group("h", task("u"))) is None


def test_what_did_not_fit_leaves_nothing_taken():
    capacity = HostCapacity(hosts("a", cpus=2), "broker")
    assert capacity.try_take(group("g", task("t"))) is not None
    assert capacity.try_take(group("h", task("u"), task("v"))) is None
    assert capacity.try_take(group("i", task("w"))) is not None


def test_the_widest_training_task_says_how_many_hosts_are_needed():
    plan = workflow_plan(group("g", task("t", "2:5")), group("h", task("u", "3"), task("v")))
    assert largest_min_hosts(plan) == ("u", 3)


def test_more_tasks_than_hosts_are_said():
    plan = workflow_plan(group("g", task("t"), task("u")))
    assert describe_crowding(plan, 2) is None
    assert "group g has 2 tasks for 1 host" in describe_crowding(plan, 1)
