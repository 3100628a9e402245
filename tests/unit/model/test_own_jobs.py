import pytest

from torchmuster.model.own_jobs import other_job, own_jobs


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


@pytest.mark.parametrize(
    ("jobs", "others", "found"),
    [
        ((), (), None),
        (("PBS_JOBID=1",), (), None),
        ((), ("PBS_JOBID=1",), None),
        (("PBS_JOBID=1",), ("PBS_JOBID=1",), None),
        (("PBS_JOBID=1[2]",), ("PBS_JOBID=1[1]",), ("1[2]", "1[1]")),
        (("PBS_JOBID=1",), ("SLURM_JOB_ID=2",), None),
    ],
    ids=["none", "ssh to the head", "the head by ssh", "one job", "an array", "nothing in common"],
)
def test_only_two_ids_of_one_scheduler_contradict_each_other(jobs, others, found):
    assert other_job(jobs, others) == found
