"""Which groups may run beside each other, on which GPUs and hosts, and what is said about those that wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.workflows import workflow_plan
from torchmuster.workflow.owner.capacity import (
    Capacity,
    HostCapacity,
    HostFacts,
    Machine,
    cpus_of,
    describe_crowding,
    describe_shortfalls,
    gpus_of,
    largest_min_hosts,
    this_machine,
)
from torchmuster.workflow.plan import GroupPlan, Resources, TaskPlan, TrainingPlan

GIB = 1 << 30


def group(name, *tasks):
    return GroupPlan(
        name=name,
        tasks=tuple(
            TaskPlan(name=f"{name}-{n}", lead=n == 0, resources=Resources(**task))
            for n, task in enumerate(tasks or ({},))
        ),
    )


def machine(cpus=4, gpus=0, memory_bytes=64 * GIB):
    return Machine(
        num_cpus=cpus,
        gpus=tuple(str(n) for n in range(gpus)),
        memory_bytes=memory_bytes,
        storage_bytes=100 * GIB,
    )


def test_groups_that_fit_run_beside_each_other_and_a_third_waits():
    capacity = Capacity(machine(cpus=4))
    assert capacity.try_take(group("a", {"cpu": 2})) is not None
    assert capacity.try_take(group("b", {"cpu": 2})) is not None
    assert capacity.try_take(group("c")) is None
    capacity.give_back("a")
    assert capacity.try_take(group("c")) is not None


def test_a_task_that_asks_for_nothing_takes_one_cpu():
    capacity = Capacity(machine(cpus=2))
    assert capacity.try_take(group("a", {}, {})) is not None
    assert capacity.try_take(group("b")) is None


def test_a_group_that_asks_for_more_than_there_is_runs_alone():
    capacity = Capacity(machine(cpus=2))
    assert capacity.try_take(group("small")) is not None
    assert capacity.try_take(group("large", {"cpu": 64})) is None
    capacity.give_back("small")
    assert capacity.try_take(group("large", {"cpu": 64})) is not None
    assert capacity.try_take(group("small")) is None


def test_tasks_get_gpus_of_their_own():
    capacity = Capacity(machine(cpus=16, gpus=4))
    taken = capacity.try_take(group("a", {"gpu": 2}, {}, {"gpu": 1}))
    assert taken == {"a-0": ["0", "1"], "a-1": [], "a-2": ["2"]}
    assert capacity.try_take(group("b", {"gpu": 2})) is None
    assert capacity.try_take(group("c", {"gpu": 1})) == {"c-0": ["3"]}
    capacity.give_back("a")
    assert capacity.try_take(group("b", {"gpu": 2})) == {"b-0": ["0", "1"]}


def test_tasks_share_all_gpus_when_the_group_asks_for_too_many():
    capacity = Capacity(machine(gpus=2))
    given_gpus = capacity.try_take(group("a", {"gpu": 4}, {}))
    assert given_gpus == {"a-0": ["0", "1"], "a-1": []}


def test_where_there_is_no_gpu_nothing_is_said_about_them():
    assert Capacity(machine()).try_take(group("a", {"gpu": 1})) == {}


def test_memory_is_not_given_twice():
    capacity = Capacity(machine(memory_bytes=64 * GIB))
    assert capacity.try_take(group("a", {"memory_bytes": 40 * GIB})) is not None
    assert capacity.try_take(group("b", {"memory_bytes": 40 * GIB})) is None
    assert capacity.try_take(group("c", {"memory_bytes": 24 * GIB})) is not None
    capacity.give_back("a")
    assert capacity.try_take(group("b", {"memory_bytes": 40 * GIB})) is not None


def test_a_group_that_waits_says_for_what_and_who_holds_it():
    capacity = Capacity(machine(cpus=2, gpus=1))
    capacity.try_take(group("a", {"gpu": 1}, {}))
    text = capacity.why_waiting(group("b", {"gpu": 1, "cpu": 2}))
    assert text == "waits for 2 CPUs and 1 GPU; 0 of 2 CPUs and 0 of 1 GPU are free, a runs"


def test_memory_is_named_when_it_is_what_a_group_waits_for():
    capacity = Capacity(machine(memory_bytes=64 * GIB))
    capacity.try_take(group("a", {"memory_bytes": 40 * GIB}))
    text = capacity.why_waiting(group("b", {"memory_bytes": 30 * GIB}))
    assert text == (
        "waits for 1 CPU and 30 GiB of memory; 3 of 4 CPUs and 24 GiB of 64 GiB are free, a runs"
    )


def test_a_training_task_asks_for_each_of_its_nodes():
    training = TrainingPlan(nodes="1:3", nproc_per_node=None, script="t.py")
    task = TaskPlan(name="t", training=training, resources=Resources(cpu=2, gpu=1))
    assert (cpus_of(task), gpus_of(task)) == (6, 3)


def test_what_a_group_asks_for_too_much_is_said_for_each_kind():
    plan = workflow_plan(
        group("a", {"gpu": 2, "cpu": 3}, {"cpu": 3}),
        group("b", {"memory_bytes": 128 * GIB, "storage_bytes": 50 * GIB}),
    )
    assert describe_shortfalls(plan, machine(cpus=4)) == [
        "gpu: 2 asked for, 0 here: tasks run without one",
        "cpu: 6 asked for, 4 here: tasks share what there is",
        "memory: 128 GiB asked for, 64 GiB here: tasks share what there is",
    ]


def test_what_fits_is_not_spoken_of():
    plan = workflow_plan(group("a", {"cpu": 4}), group("b", {"cpu": 4}))
    assert describe_shortfalls(plan, machine(cpus=4)) == []


def test_this_machine_has_what_the_process_may_use(tmp_path):
    found = this_machine(str(tmp_path), ["0"])
    assert found.num_cpus >= 1
    assert found.gpus == ("0",)
    assert found.memory_bytes > 0
    assert found.storage_bytes > 0


gib = st.integers(0, 100).map(lambda n: n * GIB)
some = st.integers(0, 6)
asks = st.fixed_dictionaries({"cpu": some, "gpu": some, "memory_bytes": gib})


@given(st.lists(st.lists(asks, min_size=1, max_size=3), min_size=1, max_size=8), st.data())
def test_no_gpu_is_held_twice_and_every_group_runs_in_the_end(groups, data):
    capacity = Capacity(machine(cpus=4, gpus=4))
    waiting = {f"g{n}": group(f"g{n}", *tasks) for n, tasks in enumerate(groups)}
    running = {}
    while waiting or running:
        for name in list(waiting):
            gpus = capacity.try_take(waiting[name])
            if gpus is not None:
                running[name] = {gpu for several in gpus.values() for gpu in several}
                del waiting[name]
            else:
                assert capacity.why_waiting(waiting[name])
        assert running, "somebody must run"
        held = [gpu for several in running.values() for gpu in several]
        assert len(held) == len(set(held))
        name = data.draw(st.sampled_from(sorted(running)))
        capacity.give_back(name)
        del running[name]


def test_a_size_of_a_terabyte_is_a_plain_number():
    plan = workflow_plan(group("a", {"memory_bytes": 1024 * GIB}))
    assert "memory: 1,024 GiB asked for, 64 GiB here" in describe_shortfalls(plan, machine())[0]


GIB = 1 << 30


def hosts(*names, gpus=0, cpus=8, slots=None):
    return [
        HostFacts(name=name, num_cpus=cpus, num_gpus=gpus, memory_bytes=GIB, slots=slots)
        for name in names
    ]


def task(name, nodes=None, **asked):
    training = None if nodes is None else TrainingPlan(nodes=nodes, nproc_per_node="1", script="s")
    return TaskPlan(name=name, resources=Resources(**asked), training=training)


def of_tasks(name, *tasks):
    return GroupPlan(name=name, tasks=tasks)


def placed(capacity, one):
    assert capacity.try_take(one) is not None
    tasks = capacity.nodes_of(one.name).tasks
    return {name: [node.name for node in nodes] for name, nodes in tasks.items()}


def test_tasks_of_a_group_go_to_the_hosts_in_turn():
    capacity = HostCapacity(hosts("a", "b"), "broker")
    found = placed(capacity, of_tasks("g", task("t0"), task("t1"), task("t2")))
    assert found == {"t0": ["a"], "t1": ["b"], "t2": ["a"]}


def test_groups_one_after_the_other_use_all_hosts():
    capacity = HostCapacity(hosts("a", "b"), "broker")
    assert placed(capacity, of_tasks("g", task("t")))["t"] == ["a"]
    capacity.give_back("g")
    assert placed(capacity, of_tasks("h", task("u")))["u"] == ["b"]


def test_a_training_task_gets_hosts_that_are_all_different():
    capacity = HostCapacity(hosts("a", "b", "c"), "broker")
    found = placed(capacity, of_tasks("g", task("t", "3"), task("u")))
    assert found["t"] == ["a", "b", "c"]
    assert len(found["u"]) == 1


def test_a_range_of_nodes_takes_the_hosts_that_there_are():
    capacity = HostCapacity(hosts("a", "b"), "broker")
    assert placed(capacity, of_tasks("g", task("t", "1:4")))["t"] == ["a", "b"]


def test_gpus_of_a_host_go_to_one_task_at_a_time():
    capacity = HostCapacity(hosts("a", gpus=4), "broker")
    assert capacity.try_take(of_tasks("g", task("t", gpu=3))) == {"t": ["0", "1", "2"]}
    assert capacity.try_take(of_tasks("h", task("u", gpu=1))) == {"u": ["3"]}
    assert capacity.try_take(of_tasks("i", task("v", gpu=1))) is None
    capacity.give_back("g")
    assert capacity.try_take(of_tasks("i", task("v", gpu=1))) == {"v": ["0"]}


def test_a_task_goes_where_its_gpus_are():
    mixed = [*hosts("plain"), *hosts("fast", gpus=2)]
    capacity = HostCapacity(mixed, "broker")
    assert placed(capacity, of_tasks("g", task("t", gpu=2)))["t"] == ["fast"]


def test_each_host_is_told_with_its_own_gpus():
    mixed = [*hosts("plain"), *hosts("fast", gpus=2)]
    capacity = HostCapacity(mixed, "broker")
    capacity.try_take(of_tasks("g", task("t", "2")))
    (nodes,) = capacity.nodes_of("g").tasks.values()
    assert {node.name: node.gpus for node in nodes} == {"plain": None, "fast": ()}


def test_a_task_without_gpus_sees_none_where_there_are_some():
    capacity = HostCapacity(hosts("a", gpus=2), "broker")
    assert capacity.try_take(of_tasks("g", task("t"))) == {"t": []}


@pytest.mark.parametrize("asked", [{"cpu": 9}, {"memory_bytes": 2 * GIB}, {"gpu": 1}])
def test_a_group_that_fits_nowhere_runs_alone(asked):
    capacity = HostCapacity(hosts("a", "b"), "broker")
    large, small = of_tasks("g", task("t", **asked)), of_tasks("h", task("u"))
    assert capacity.try_take(small) is not None
    assert capacity.try_take(large) is None
    assert "waits for room for 1 task on 2 hosts; h run there" in capacity.why_waiting(large)
    capacity.give_back("h")
    assert capacity.try_take(large) is not None


def test_slots_limit_the_tasks_of_a_host():
    capacity = HostCapacity(hosts("a", slots=1), "broker")
    assert capacity.try_take(of_tasks("g", task("t"))) is not None
    assert capacity.try_take(of_tasks("h", task("u"))) is None


def test_what_did_not_fit_leaves_nothing_taken():
    capacity = HostCapacity(hosts("a", cpus=2), "broker")
    assert capacity.try_take(of_tasks("g", task("t"))) is not None
    assert capacity.try_take(of_tasks("h", task("u"), task("v"))) is None
    assert capacity.try_take(of_tasks("i", task("w"))) is not None


def test_the_widest_training_task_says_how_many_hosts_are_needed():
    plan = workflow_plan(of_tasks("g", task("t", "2:5")), of_tasks("h", task("u", "3"), task("v")))
    assert largest_min_hosts(plan) == ("u", 3)


def test_more_tasks_than_hosts_are_said():
    plan = workflow_plan(of_tasks("g", task("t"), task("u")))
    assert describe_crowding(plan, 2) is None
    assert "group g has 2 tasks for 1 host" in describe_crowding(plan, 1)
