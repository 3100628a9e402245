"""What is told without loading a dialect: the login-node guard, and the jobs around a process."""

import pytest

from torchmuster.launcher.engines.schedulers import guard, own_jobs


def on_path(*names):
    return lambda name: f"/usr/bin/{name}" if name in names else None


def test_a_machine_without_a_scheduler_is_free():
    assert guard({}, on_path("ssh")) is None


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID"])
def test_inside_a_job_is_free(name):
    assert guard({name: "7"}, on_path("sbatch", "qsub")) is None


@pytest.mark.parametrize(
    ("commands", "offers"),
    [
        (("sbatch",), "--on slurm submits"),
        (("qsub",), "--on pbs submits"),
        (("sbatch", "qsub"), "--on slurm or --on pbs submits"),
    ],
)
def test_a_login_node_is_refused_with_the_engines_found(commands, offers):
    error = guard({}, on_path(*commands))
    assert error is not None
    assert error.exit_code == 2
    assert offers in error.fix
    assert "--here" in error.fix
    assert all(f"/usr/bin/{name}" in error.where for name in commands)


def test_own_sites_are_offered_first():
    error = guard({}, on_path("sbatch"), ("gpu", "slurm"))
    assert error.fix.startswith("--on gpu or --on slurm submits")


def test_an_empty_variable_is_no_job():
    assert guard({"SLURM_JOB_ID": ""}, on_path("sbatch")) is not None


@pytest.mark.parametrize(
    ("environment", "jobs"),
    [
        ({}, ()),
        ({"SLURM_JOB_ID": "12"}, ("SLURM_JOB_ID=12",)),
        ({"PBS_JOBID": "1053[2].server"}, ("PBS_JOBID=1053[2].server",)),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "0"}, ("LSB_JOBID=7",)),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "3"}, ("LSB_JOBID=7[3]",)),
        (
            {"SLURM_JOB_ID": "13", "SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "12"},
            ("SLURM_JOB_ID=12",),
        ),
        ({"SLURM_JOB_ID": "13", "SLURM_HET_SIZE": "2"}, ()),
        ({"SLURM_JOB_ID": ""}, ()),
    ],
)
def test_the_scheduler_s_variables_name_the_job(environment, jobs):
    assert own_jobs(environment) == jobs
