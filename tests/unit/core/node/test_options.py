import os

import pytest

from torchmuster.core.node.options import leave_environment, share_threads, take_environment
from torchmuster.errors import RunDirectoryError


@pytest.fixture
def carry(tmp_path, monkeypatch):
    """Return a function that leaves some variables on one node and says what another node then has."""

    def carry(left, own=(), of_schedulers=("SLURM_", "PBS_")):
        path = str(tmp_path / "environment.json")
        with monkeypatch.context() as here:
            here.setattr(os, "environ", dict(left))
            leave_environment(path, of_schedulers)
        assert os.stat(path).st_mode & 0o777 == 0o600
        monkeypatch.setattr(os, "environ", dict(own))
        take_environment(path)
        return os.environ

    return carry


@pytest.mark.parametrize(
    "name", ["TMPDIR", "HOSTNAME", "PBS_JOBID", "SLURM_NODEID", "PMI_RANK", "PALS_RANKID"]
)
def test_variables_of_a_node_stay_there(carry, name):
    assert carry({name: "head's"}) == {}
    assert carry({name: "head's"}, {name: "own"}) == {name: "own"}


def test_variables_of_a_job_of_another_package_s_scheduler_stay_on_their_node(carry):
    left = {"TOY_JOBID": "1", "TOYS": "all"}
    assert carry(left, of_schedulers=("PBS_", "TOY_")) == {"TOYS": "all"}


@pytest.mark.parametrize("name", ["PATH", "LD_LIBRARY_PATH", "NCCL_DEBUG", "LOADEDMODULES"])
def test_what_a_module_sets_goes_to_every_node(carry, name):
    assert carry({name: "loaded"}, {name: "own"}) == {name: "loaded"}


@pytest.mark.parametrize("text", [None, "{", "\x00"])
def test_a_file_that_can_t_be_read_is_said(tmp_path, text):
    path = tmp_path / "environment.json"
    if text is not None:
        path.write_text(text)

    with pytest.raises(RunDirectoryError) as raised:
        take_environment(str(path))

    assert raised.value.where == str(path)


PBS = {"PBS_JOBID": "7.server", "NCPUS": "8", "OMP_NUM_THREADS": "8"}


@pytest.mark.parametrize(
    ("environment", "num_workers", "threads"),
    [
        ({}, 1, None),
        ({}, 2, "1"),
        ({"OMP_NUM_THREADS": "8"}, 2, "8"),
        (PBS, 1, "8"),
        (PBS, 2, "4"),
        (PBS, 3, "2"),
        (PBS, 16, "1"),
        (PBS | {"OMP_NUM_THREADS": "5"}, 2, "5"),
        ({"NCPUS": "8", "OMP_NUM_THREADS": "8"}, 2, "8"),
        (PBS | {"NCPUS": "1", "OMP_NUM_THREADS": "1"}, 2, "1"),
    ],
)
def test_workers_share_the_threads_that_pbs_has_set_and_a_users_own_are_obeyed(
    environment, num_workers, threads
):
    environment = dict(environment)
    sentence = share_threads(environment, num_workers)

    assert environment.get("OMP_NUM_THREADS") == threads
    assert (sentence is not None) == (threads in ("4", "2") or num_workers == 16)


def test_threads_that_pbs_has_set_are_those_of_their_node(carry):
    own = {"NCPUS": "4", "OMP_NUM_THREADS": "4"}
    assert carry(PBS, own) == own
    assert carry(PBS | {"OMP_NUM_THREADS": "3"}, own) == own | {"OMP_NUM_THREADS": "3"}
