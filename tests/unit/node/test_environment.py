import json
import os

import pytest

from torchmuster.errors import RunDirectoryError
from torchmuster.node.environment import is_of_one_node, share_threads, take_environment


@pytest.mark.parametrize(
    "name", ["TMPDIR", "HOSTNAME", "PBS_JOBID", "SLURM_NODEID", "PMI_RANK", "PALS_RANKID"]
)
def test_variables_of_a_node_stay_there(name):
    assert is_of_one_node(name)


@pytest.mark.parametrize("name", ["PATH", "LD_LIBRARY_PATH", "NCCL_DEBUG", "LOADEDMODULES"])
def test_what_a_module_sets_goes_to_every_node(name):
    assert not is_of_one_node(name)


def test_the_heads_variables_are_taken_over_but_for_those_of_its_node(tmp_path, monkeypatch):
    for name in ("MODULE", "TMPDIR"):
        monkeypatch.setenv(name, "own")
    path = tmp_path / "environment.json"
    path.write_text(json.dumps({"MODULE": "loaded", "TMPDIR": "/head"}))

    take_environment(str(path))

    assert os.environ["MODULE"] == "loaded"
    assert os.environ["TMPDIR"] == "own"


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


def test_threads_that_pbs_has_set_are_those_of_their_node(tmp_path, monkeypatch):
    monkeypatch.setenv("NCPUS", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    path = tmp_path / "environment.json"
    path.write_text(json.dumps(PBS))
    take_environment(str(path))
    assert (os.environ["NCPUS"], os.environ["OMP_NUM_THREADS"]) == ("4", "4")

    path.write_text(json.dumps(PBS | {"OMP_NUM_THREADS": "3"}))
    take_environment(str(path))
    assert os.environ["OMP_NUM_THREADS"] == "3"
