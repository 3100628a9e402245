import pytest

from kit.values import worker_ranks
from torchmuster.launcher.node.launcher_ranks import (
    are_one_step,
    is_one_of_many,
    make_true,
    num_tasks,
    task_here,
)

# What a batch script of 2 nodes has, and a task that is started beside it on the second node.
BATCH = {
    "ENVIRONMENT": "BATCH",
    "SLURM_CPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "8",
    "SLURM_GTIDS": "0",
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_TASK_PID": "4711",
}
STEP = BATCH | {
    "SLURM_NNODES": "1",
    "SLURM_NPROCS": "1",
    "SLURM_NTASKS": "1",
    "SLURM_SRUN_COMM_HOST": "10.88.0.1",
    "SLURM_SRUN_COMM_PORT": "40001",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_LAUNCHER_PORT": "40001",
    "SLURM_STEP_NODELIST": "n2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_TASKS_PER_NODE": "1",
}


def worker(environment, rank, local_rank, node_rank, counts=(2, 2), text="2(x2)"):
    change = make_true(environment, worker_ranks(rank, local_rank, counts, node_rank), text)
    kept = {name: value for name, value in environment.items() if name not in change.removed}
    return kept | change.values


def test_a_worker_of_a_slurm_job_has_what_srun_would_have_given_it():
    here = worker(BATCH, 1, 1, 0)
    there = worker(STEP, 2, 0, 1)

    own = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS")
    assert [here[name] for name in own] == ["1", "1", "0", "0,1"]
    assert [there[name] for name in own] == ["2", "0", "1", "2,3"]
    alike = {
        "SLURM_NTASKS": "4",
        "SLURM_NPROCS": "4",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_CPUS_PER_TASK": "4",
    }
    for environment in (here, there):
        assert environment == environment | alike
    assert there["SLURM_STEP_NODELIST"] == "n[1-2]"


def test_what_is_the_jobs_stays():
    kept = ("ENVIRONMENT", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES")
    for environment in (BATCH, STEP):
        assert {n: worker(environment, 0, 0, 0)[n] for n in kept} == {n: BATCH[n] for n in kept}


def test_what_is_of_one_process_or_its_server_is_taken_away():
    server = {"SLURM_SRUN_COMM_HOST", "SLURM_SRUN_COMM_PORT", "SLURM_STEP_LAUNCHER_PORT"}
    assert {*STEP} - {*worker(STEP, 2, 0, 1)} == {"SLURM_TASK_PID", *server}


def test_unequal_nodes_have_no_number_of_tasks_per_node():
    environment = worker(BATCH, 2, 0, 1, counts=(2, 1), text="2,1")

    assert environment["SLURM_TASKS_PER_NODE"] == "2,1"
    assert "SLURM_NTASKS_PER_NODE" not in environment


def test_a_world_on_a_part_of_the_job_names_no_nodes_of_its_step():
    assert "SLURM_STEP_NODELIST" not in worker(STEP, 0, 0, 0, counts=(2,), text="2")


@pytest.mark.parametrize(
    ("asked", "on_node", "expected"),
    [("8", "8", "4"), ("2", "8", "2"), ("1", "1", "1"), ("3", "", "3")],
)
def test_the_cpus_of_a_task_are_a_workers_share_of_the_node(asked, on_node, expected):
    environment = BATCH | {"SLURM_CPUS_PER_TASK": asked, "SLURM_CPUS_ON_NODE": on_node}
    assert worker(environment, 0, 0, 0)["SLURM_CPUS_PER_TASK"] == expected


MPI = {
    "MPI_LOCALNRANKS": "1",
    "MPI_LOCALRANKID": "0",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PALS_LOCAL_RANKID": "0",
    "PALS_NODEID": "0",
    "PALS_RANKID": "1",
    "PMIX_RANK": "1",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
SERVERS = {
    "PALS_APINFO": "/var/run/palsd/apinfo",
    "PMIX_NAMESPACE": "prterun-1",
    "PMIX_SERVER_URI41": "prterun-1.0;tcp4://127.0.0.1:4000",
    "PMI_FD": "7",
    "PMI_PORT": "n1:4000",
}


def test_the_ranks_of_mpi_are_made_true_where_they_stand_and_its_servers_are_forgotten():
    environment = worker(MPI | SERVERS | {"PALS_APID": "a"}, 3, 1, 1)

    assert environment == {
        "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_NODE_RANK": "1",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "PALS_APID": "a",
        "PALS_LOCAL_RANKID": "1",
        "PALS_NODEID": "1",
        "PALS_RANKID": "3",
        "PMIX_RANK": "3",
        "PMI_RANK": "3",
        "PMI_SIZE": "4",
    }


def test_one_worker_for_each_task_of_the_launcher_leaves_all_as_it_was():
    environment = MPI | SERVERS
    assert worker(environment, 0, 0, 0, counts=(1, 1), text="1(x2)") == environment


def test_a_place_without_a_launcher_gets_none_of_its_variables():
    assert worker({"PATH": "/bin"}, 1, 1, 0) == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        ({}, False),
        # sbatch's script: SLURM_NTASKS is that of the job.
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, False),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PTY_PORT": "3333"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"PMI_SIZE": "1"}, False),
        ({"PMI_SIZE": "2"}, True),
        ({"PALS_RANKID": "0"}, True),
        ({"PBS_JOBID": "1.ctl", "PBS_TASKNUM": "1"}, False),
        ({"PBS_JOBID": "1.ctl", "PBS_TASKNUM": "2"}, True),
        ({"PBS_JOBID": "1.ctl", "PBS_TASKNUM": "0000000A"}, True),
        ({"PBS_JOBID": "1.ctl", "PBS_TASKNUM": "A0000001"}, True),
        ({"PBS_JOBID": "1.ctl"}, False),
        ({"SLURM_STEP_NUM_TASKS": "2(x2)"}, False),
    ],
)
def test_process_of_a_launcher_is_one_of_many(environment, want):
    assert is_one_of_many(environment) is want


def test_which_task_of_its_launcher_a_process_is():
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    first, second = ({**step, "SLURM_LOCALID": local} for local in "01")
    assert (num_tasks(second), task_here(second), task_here(first)) == (4, 1, 0)
    assert num_tasks({}) == task_here({}) == 0
    assert are_one_step(first, second)
    assert not are_one_step(first, second | {"SLURM_STEP_ID": "1"})
    assert task_here({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}) == 3
