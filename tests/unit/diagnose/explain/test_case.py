"""What follows from all lines together: sizes, hosts, what launchers were told."""

import textwrap

import pytest

from torchmuster.diagnose.explain.case import Case, short
from torchmuster.diagnose.logs import read_logs


@pytest.fixture
def case(tmp_path):
    def make(**files):
        for name, text in files.items():
            (tmp_path / f"{name}.log").write_text(textwrap.dedent(text).lstrip("\n"))
        return Case(read_logs([str(tmp_path)], year=2026))

    return make


def test_number_of_nodes_is_read_in_every_spelling(case):
    assert case(a="SLURM_NNODES=3\n").num_nodes == 3
    assert case(a="+ torchrun --nnodes=4 train.py\n").num_nodes == 4
    assert case(a="+ torchrun --nnodes 2:5 train.py\n").num_nodes == 2
    assert case(a="  min_nodes               : 6\n").num_nodes == 6
    assert case(a="Number of Nodes Requested: 7\n").num_nodes == 7


def test_hosts_of_the_allocation_are_told_from_those_that_spoke(case):
    found = case(job="SLURM_JOB_NODELIST=n[1-3]\n", n1="step 1\n", n3="step 1\n")
    assert list(found.allocated) == ["n1", "n2", "n3"]
    assert found.silent == ["n2"]


def test_options_of_a_traced_command_count_like_the_launcher_s_own_words(case):
    found = case(a="n1: + torchrun --nnodes=2 --rdzv_id=7 --rdzv-endpoint n1:29500 train.py\n")
    assert [e.get("value") for e in found.config("run_id")] == ["7"]
    assert [e.get("value") for e in found.config("rdzv_endpoint")] == ["n1:29500"]


def test_option_that_a_shell_had_not_expanded_is_no_value(case):
    found = case(a="torchrun --nnodes=2 --rdzv_id=$RANDOM --rdzv-endpoint=$HEAD:29500 train.py\n")
    assert found.config("run_id") == []


def test_world_size_is_the_largest_that_is_said_or_seen(case):
    assert case(a="world size: 8\n[rank3]: Connection reset by peer\n").world_size == 8
    assert case(a="[rank11]: Connection reset by peer\n").world_size == 12


def test_short_name_leaves_addresses_alone():
    assert short("N1.cluster.org") == "n1"
    assert short("10.1.2.3") == "10.1.2.3"
    assert short("fe80::1") == "fe80::1"
