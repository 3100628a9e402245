"""What each launcher's variables mean, and the words for those that contradict each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.values import attempt_facts, worker_ranks
from torchmuster.core.model.contract import worker_environment
from torchmuster.errors import UsageError
from torchmuster.train.launch import (
    Launcher,
    derive_port,
    first_host,
    read_launch,
    torchrun_variables,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "3",
}
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_STEP_NODELIST": "n[03-04]",
    "SLURM_NNODES": "9",
}
# As sbatch starts its script, once, on the first node.
BATCH = {
    "ENVIRONMENT": "BATCH",
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
PMI = {"PMI_RANK": "6", "PMI_SIZE": "8"}


def refusal(environ, node_file=()):
    with pytest.raises(UsageError) as caught:
        read_launch(environ, node_file)
    return caught.value


def refused(environ):
    """Return what is wrong, and where."""
    error = refusal(environ)
    return error.what, error.where


def ranks(launch):
    """Return who started this process, and its ranks with the sizes of their worlds."""
    world = launch.launcher, launch.rank, launch.world_size
    return *world, launch.local_rank, launch.local_world_size


# torchrun and muster


def test_torchrun_is_read():
    launch = read_launch(TORCHRUN)
    assert ranks(launch) == (Launcher.TORCHRUN, 5, 8, 1, 4)
    assert (launch.node_rank, launch.num_nodes) == (1, 2)
    assert (launch.master_addr, launch.master_port) == ("n1", 29500)
    assert launch.run_id == "job"


def test_muster_is_torchrun_with_a_variable_of_ours():
    place = worker_ranks(5, 1, (4, 4), 1)
    facts = attempt_facts(attempt=3, restarts_spent=1, max_restarts=4)
    environ = worker_environment(place, facts)
    launch = read_launch(environ)
    assert ranks(launch) == (Launcher.MUSTER, 5, 8, 1, 4)
    assert torchrun_variables(launch) == {
        name: environ[name] for name in torchrun_variables(launch)
    }
    assert len(torchrun_variables(launch)) == 7


def test_rank_and_world_size_alone_leave_the_rest_open():
    launch = read_launch({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"})
    assert (launch.local_rank, launch.local_world_size, launch.num_nodes) == (None, None, None)
    assert torchrun_variables(launch) == {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"}


def test_rank_set_under_srun_takes_its_local_rank_from_slurm():
    launch = read_launch({**STEP, "RANK": "3", "WORLD_SIZE": "5", "MASTER_ADDR": "n03"})
    assert launch.launcher is Launcher.TORCHRUN
    assert launch.local_rank == 0


def test_muster_inside_a_slurm_step_is_muster():
    launch = read_launch({**STEP, **TORCHRUN, "TORCHMUSTER_ATTEMPT": "0"})
    assert ranks(launch) == (Launcher.MUSTER, 5, 8, 1, 4)


def test_no_launcher_is_a_world_of_one():
    launch = read_launch({"PATH": "/bin", "WORLD_SIZE": "1"})
    assert ranks(launch) == (Launcher.NONE, 0, 1, 0, 1)
    assert launch.master_addr is None


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        ({"WORLD_SIZE": "4"}, "RANK"),
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "", "WORLD_SIZE": "4"}, "RANK"),
        ({"RANK": "1", "WORLD_SIZE": ""}, "WORLD_SIZE"),
    ],
)
def test_half_of_torchruns_contract_is_no_world_of_one(environ, missing):
    error = refusal({**environ, "MASTER_ADDR": "n1"})
    assert error.what == f"`{missing}` is not set, but other variables of its launcher are"
    assert error.fix == (
        "start all workers with one launcher, or unset the variables of another launcher"
    )


def test_a_number_that_is_none_is_named():
    said = "`RANK` is not a whole number", "RANK=first"
    assert refused({**TORCHRUN, "RANK": "first"}) == said


@pytest.mark.parametrize(
    ("launcher", "environ", "problem"),
    [
        ("torchrun", {**TORCHRUN, "RANK": "8"}, "rank 8 does not exist in a world of 8"),
        ("torchrun", {**TORCHRUN, "RANK": "-1"}, "rank -1 does not exist in a world of 8"),
        (
            "torchrun",
            {**TORCHRUN, "LOCAL_RANK": "4"},
            "local rank 4 does not exist in a world of 4",
        ),
        ("srun", {**STEP, "SLURM_PROCID": "5"}, "rank 5 does not exist in a world of 5"),
        ("mpiexec", {**PMI, "PMI_RANK": "8"}, "rank 8 does not exist in a world of 8"),
    ],
)
def test_a_rank_outside_of_its_world_is_refused(launcher, environ, problem):
    error = refusal({"MASTER_ADDR": "n1", **environ})
    assert error.what == problem
    assert error.where == f"the environment that {launcher} gave this process"
    assert error.fix == "unset the variables that another launcher left in the environment"


def test_workers_that_cannot_find_each_other_are_refused():
    error = refusal({"RANK": "1", "WORLD_SIZE": "2"})
    assert error.what == "2 workers can't find each other: nothing names rank 0's host"
    assert error.where == "torchrun"
    assert error.why == "MASTER_ADDR is not set and the launcher has no list of hosts"
    assert "unset RANK WORLD_SIZE; else export MASTER_ADDR=<host of rank 0>" in error.fix


# Slurm


def test_a_task_of_srun_is_read_from_the_step_not_from_the_job():
    launch = read_launch(STEP)
    assert ranks(launch) == (Launcher.SLURM, 3, 5, 0, 2)
    assert (launch.node_rank, launch.num_nodes) == (1, 2)
    assert launch.master_addr == "n03"
    assert launch.run_id == "slurm-4711.0"


def test_the_batch_script_of_a_job_is_no_task():
    assert read_launch(BATCH).launcher is Launcher.NONE


def test_a_task_that_inherits_the_batch_scripts_environment_is_a_task():
    assert ranks(read_launch({**BATCH, **STEP})) == (Launcher.SLURM, 3, 5, 0, 2)


def test_a_shell_of_salloc_without_a_task_is_a_world_of_one():
    environ = {k: v for k, v in BATCH.items() if k not in ("SLURM_PROCID", "ENVIRONMENT")}
    assert read_launch(environ).launcher is Launcher.NONE


def test_all_tasks_of_a_step_agree_on_the_endpoint_and_other_steps_have_another():
    tasks = [read_launch({**STEP, "SLURM_PROCID": str(rank)}) for rank in range(5)]
    assert len({(t.master_addr, t.master_port, t.run_id) for t in tasks}) == 1
    other = read_launch({**STEP, "SLURM_STEP_ID": "1"})
    assert other.master_port != tasks[0].master_port
    assert other.run_id != tasks[0].run_id


def test_master_variables_win_over_what_slurm_says():
    launch = read_launch({**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert (launch.master_addr, launch.master_port) == ("10.0.0.1", 1234)


def test_a_step_on_one_node_uses_the_loopback():
    environ = {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    assert read_launch(environ).master_addr == "127.0.0.1"


@pytest.mark.parametrize(
    ("tasks", "node", "local_world_size"),
    [
        ("3,2", 0, 3),
        ("3,2", 1, 2),
        ("2(x2),1", 1, 2),
        ("2(x2),1", 2, 1),
        ("1(x5)", 4, 1),
        ("5", 0, 5),
        ("2(x2)", 1, None),  # of another step: it has 4 tasks, not 5
        ("3,2", 2, None),  # no such node
        ("many", 0, None),
        ("", 0, None),
    ],
)
def test_tasks_per_node_give_the_local_world_size(tasks, node, local_world_size):
    environ = {**STEP, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}
    assert read_launch(environ).local_world_size == local_world_size


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4))
def test_slurms_notation_of_tasks_is_read_whole(parts):
    counts = [count for count, times in parts for _ in range(times)]
    words = [str(count) if times == 1 else f"{count}(x{times})" for count, times in parts]
    environ = {**STEP, "SLURM_STEP_NUM_TASKS": str(sum(counts)), "SLURM_PROCID": "0"}
    environ["SLURM_STEP_TASKS_PER_NODE"] = ",".join(words)
    found = [
        read_launch({**environ, "SLURM_NODEID": str(node)}).local_world_size
        for node in range(len(counts))
    ]
    assert found == counts


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n[03-05,9],m1", "n03"),
        ("n[3,5-9]", "n3"),
        ("n1,n2", "n1"),
        ("gpu-01.cluster", "gpu-01.cluster"),
        ("gpu-a[12-13]", "gpu-a12"),
        ("rack[1-2]n[3-4]", "rack1n3"),
        ("n[001-100]-ib", "n001-ib"),
        ("", None),
    ],
)
def test_the_first_host_of_slurms_notation(nodelist, host):
    assert first_host(nodelist) == host


def test_a_step_without_hosts_on_many_nodes_is_refused():
    said = "5 workers can't find each other: nothing names rank 0's host", "srun"
    assert refused({**STEP, "SLURM_STEP_NODELIST": ""}) == said


# mpiexec


def test_open_mpi_is_read():
    launch = read_launch({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-7"}, ["n1", "n2"])
    assert ranks(launch) == (Launcher.MPI, 6, 8, 2, 4)
    assert (launch.master_addr, launch.num_nodes) == ("n1", 2)
    assert launch.run_id == "mpi-prterun-7"
    assert launch.master_port == derive_port("prterun-7")


@pytest.mark.parametrize(
    "local",
    [
        {"PMI_LOCAL_RANK": "2", "PMI_LOCAL_SIZE": "4"},
        {"MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"},
    ],
)
def test_pmi_is_read_with_either_names_of_local_ranks(local):
    launch = read_launch({**PMI, **local, "MASTER_ADDR": "n1"})
    assert ranks(launch) == (Launcher.MPI, 6, 8, 2, 4)


def test_pmi_without_local_ranks_leaves_them_open():
    launch = read_launch({**PMI, "MASTER_ADDR": "n1", "MASTER_PORT": "77"})
    assert (launch.local_rank, launch.local_world_size, launch.master_port) == (None, None, 77)


def test_pals_takes_from_pmi_what_it_does_not_say_itself():
    environ = {**PMI, "PALS_RANKID": "6", "PALS_LOCAL_RANKID": "2", "PMI_LOCAL_SIZE": "4"}
    launch = read_launch({**environ, "PALS_APID": "a7"}, ["n1", "n2"])
    assert ranks(launch) == (Launcher.MPI, 6, 8, 2, 4)
    assert launch.run_id == "mpi-a7"


def test_the_pbs_node_file_names_the_first_host_and_counts_nodes():
    lines = ["n7\n", "n7\n", "n8\n", "\n"]
    launch = read_launch({**PMI, "PBS_JOBID": "9.ctl"}, lines)
    assert (launch.master_addr, launch.num_nodes) == ("n7", 2)
    assert launch.run_id == "mpi-9.ctl"


def test_mpi_on_one_node_uses_the_loopback():
    assert read_launch(PMI, ["n7", "n7"]).master_addr == "127.0.0.1"
    all_local = {**PMI, "PMI_LOCAL_RANK": "6", "PMI_LOCAL_SIZE": "8"}
    assert read_launch(all_local).master_addr == "127.0.0.1"


def test_mpi_without_a_list_of_hosts_is_refused():
    said = "8 workers can't find each other: nothing names rank 0's host", "mpiexec"
    assert refused(OPEN_MPI) == said


def test_mpi_without_a_size_is_refused():
    error = refusal({"OMPI_COMM_WORLD_RANK": "0"})
    assert error.what == (
        "`OMPI_COMM_WORLD_SIZE` is not set, but other variables of its launcher are"
    )


# One launcher inside another


def test_mpiexec_in_a_batch_script_of_slurm_is_mpi():
    assert read_launch({**BATCH, **PMI, "MASTER_ADDR": "n1"}).launcher is Launcher.MPI


@pytest.mark.parametrize("rank", range(2))
def test_mpiexec_in_a_shell_of_srun_is_no_world_of_one(rank):
    shell = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    inside = {"PMI_RANK": str(rank), "PMI_SIZE": "2", "PMI_LOCAL_SIZE": "2"}
    launch = read_launch({**shell, "SLURM_STEP_NUM_NODES": "1", **inside})
    assert launch.launcher is Launcher.MPI
    assert (launch.rank, launch.world_size) == (rank, 2)


def test_srun_with_pmi_is_srun():
    launch = read_launch({**STEP, "PMI_RANK": "3", "PMI_SIZE": "5"})
    assert launch.launcher is Launcher.SLURM
    assert (launch.local_world_size, launch.master_addr) == (2, "n03")


@given(st.text(max_size=30))
def test_a_derived_port_is_below_the_ephemeral_ones(job):
    assert 20000 <= derive_port(job) < 30000
    assert derive_port(job) == derive_port(job)
