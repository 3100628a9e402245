"""A command that srun, mpiexec or pbsdsh starts several times is refused, once in words."""

import pytest

from torchmuster.errors import UsageError
from torchmuster.launcher.cli.places import check_alone

OF_SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize("more", [{"SLURM_PROCID": "0"}, {}])
def test_the_first_task_says_why(more):
    with pytest.raises(UsageError, match="started several times") as refused:
        check_alone(OF_SRUN | more)
    assert "leave srun" in refused.value.fix


def test_the_other_tasks_end_without_a_word(capfd):
    with pytest.raises(SystemExit) as ended:
        check_alone(OF_SRUN | {"SLURM_PROCID": "3"})
    assert ended.value.code == 2
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        OF_SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
        OF_SRUN | {"TORCHMUSTER_ATTEMPT": "0"},  # a worker's
        OF_SRUN | {"TORCHMUSTER_TASK": "eval"},
    ],
)
def test_one_alone_may_start(environment):
    check_alone(environment)
