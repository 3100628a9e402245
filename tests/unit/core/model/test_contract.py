import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kit.values import attempt_facts, worker_ranks
from torchmuster.core.model import contract
from torchmuster.core.model.contract import worker_environment

PLACE = replace(worker_ranks(5, 1, (2, 2, 2), 2), role_rank=3, role_world_size=4)
FACTS = attempt_facts(
    attempt=4,
    restarts_spent=2,
    max_restarts=7,
    master_addr="10.0.0.1",
    master_port=1234,
    role="trainer",
)
OURS = {contract.ATTEMPT_VARIABLE}
# Set by the agent (`workers.NodeAttempt`, `node.Agent`) or inherited, not by `worker_environment`.
SET_ELSEWHERE = {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}


def test_the_variables_have_torchrun_s_values():
    assert worker_environment(PLACE, FACTS) == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_RANK": "3",
        "ROLE_NAME": "trainer",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RESTART_COUNT": "4",
        "TORCHELASTIC_MAX_RESTARTS": "7",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHMUSTER_ATTEMPT": "4",
    }


def test_the_names_are_those_that_torchrun_sets():
    found = importlib.util.find_spec("torch")
    if found is None:
        pytest.skip("torch is not installed: its source can't be read")
    agent = "distributed/elastic/agent/server/local_elastic_agent.py"
    source = Path(found.origin).parent.joinpath(agent).read_text()
    starts = source.partition("def _start_workers")[2].partition("self._setup_local_watchdog")[0]
    helper = source.partition("def _set_local_rank_env")[2].partition("def _shutdown")[0]
    in_table = re.findall(r'^\s+"([A-Z][A-Z_]+)":', starts, re.MULTILINE)
    set_later = re.findall(r'worker_env\["([A-Z_]+)"\] =', starts + helper)

    assert set(in_table) | set(set_later) == (
        (worker_environment(PLACE, FACTS).keys() - OURS) | SET_ELSEWHERE
    )


def test_without_a_store_of_the_agent_torch_makes_its_own():
    facts = attempt_facts(has_store=False)

    assert worker_environment(PLACE, facts)["TORCHELASTIC_USE_AGENT_STORE"] == "False"


AT_IMPORT = ["OMP_NUM_THREADS", "MKL_THREADING_LAYER", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_LOGS"]
LATER = ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "HOME", "TORCHMUSTER_X"]


@pytest.mark.parametrize("name", [*AT_IMPORT, *LATER])
def test_what_torch_reads_at_import_is_known_and_what_is_read_later_needs_no_fresh_start(name):
    assert contract.is_read_at_import(name) is (name in AT_IMPORT)


def test_signals_have_names_and_unknown_ones_numbers():
    assert contract.signal_name(11) == "SIGSEGV"
    assert contract.signal_name(200) == "signal 200"
