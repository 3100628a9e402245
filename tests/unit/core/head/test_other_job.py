import pytest

from torchmuster.core.head.membership import other_job


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
