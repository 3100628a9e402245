import json
import os

import pytest

from torchmuster.agent.environment import is_of_one_node, take_environment
from torchmuster.errors import RunDirectoryError


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
