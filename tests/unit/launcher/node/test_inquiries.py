"""What an agent answers for its node once it knows it: facts, networks, and which rank a command belongs to."""

import os
import subprocess
from dataclasses import replace

import pytest

from kit.values import program
from kit.waiting import wait_until_async
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model.plan import ScriptKind
from torchmuster.core.net import messages
from torchmuster.core.node.workers import network_variables
from torchmuster.launcher.net import part_messages
from torchmuster.launcher.node import inquiries
from torchmuster.launcher.node.inquiries import FactsServer, network_facts, script_path

PROGRAM = program("train.py", cwd="/home/u")
LIMIT_S = 90.0


@pytest.mark.parametrize("torch_first", [True, False])
async def test_facts_are_sent_once_with_the_torch_of_the_spawner(tmp_path, torch_first):
    sent = []
    desk = FactsServer(sent.append)
    if torch_first:
        desk.take_torch({"torch": "2.13.0", "is_known": True})
    desk.take(part_messages.AskFacts(), PROGRAM, {}, RunDir(str(tmp_path)))
    if not torch_first:
        await wait_until_async(lambda: desk._facts is not None)
        assert sent == []
        desk.take_torch({"torch": "2.13.0", "is_known": True})
    await wait_until_async(lambda: sent)
    desk.take_torch({})  # a later word does not count
    (said,) = sent
    assert said.facts["torch"]["torch"] == "2.13.0"
    assert said.facts["system"]["num_cpus"] >= 1
    assert said.asked_at <= said.sent_at
    assert messages.decode(messages.encode(said)) == said


async def test_an_agent_that_is_asked_again_answers_again(tmp_path):
    sent = []
    desk = FactsServer(sent.append)
    desk.take_torch({})
    for number in (1, 2):
        desk.take(part_messages.AskFacts(), PROGRAM, {}, RunDir(str(tmp_path)))
        await wait_until_async(lambda number=number: len(sent) == number)


def test_the_script_is_looked_for_where_the_program_runs():
    assert script_path(PROGRAM, None) == "/home/u/train.py"
    assert script_path(PROGRAM, "other.py") == "/home/u/other.py"
    assert script_path(replace(PROGRAM, kind=ScriptKind.MODULE), None) is None


def test_each_library_is_told_the_name_in_its_own_grammar(tmp_path):
    assert network_variables("hsn0", {"HOME": str(tmp_path)}) == {
        "GLOO_SOCKET_IFNAME": "hsn0",
        "NCCL_SOCKET_IFNAME": "=hsn0",
        "TP_SOCKET_IFNAME": "hsn0",
    }


def test_what_the_user_has_set_is_kept(tmp_path):
    environment = {"HOME": str(tmp_path), "NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": ""}

    assert network_variables("hsn0", environment) == {"TP_SOCKET_IFNAME": "hsn0"}


def test_what_a_file_of_nccl_sets_is_kept(tmp_path):
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=ib0\n")

    assert "NCCL_SOCKET_IFNAME" not in network_variables("hsn0", {"HOME": str(tmp_path)})


def test_the_variables_that_the_user_has_set_are_told_with_a_bounded_length():
    environment = {"GLOO_SOCKET_IFNAME": "x" * 1000, "TP_SOCKET_IFNAME": "", "OTHER": "1"}

    facts = network_facts(3, (1, 2), environment, None)

    assert facts.variables == {"GLOO_SOCKET_IFNAME": "x" * 200}
    assert (facts.survey, facts.ports) == (3, (1, 2))


def start(word):
    return part_messages.ExecStart(exec_id="e", task=word)


def test_a_word_names_a_rank_of_the_node_or_its_first():
    assert inquiries.wanted_rank(start("rank 5"), 4, 2) == 5
    assert inquiries.wanted_rank(start("node n2"), 4, 2) == 4
    assert inquiries.wanted_rank(start("rank 9"), 4, 2) == 4


def test_a_command_of_a_node_has_no_rank():
    environment = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
    assert inquiries.node_environment(environment, rank=True) == environment
    assert inquiries.node_environment(environment, rank=False) == {"WORLD_SIZE": "8"}


def test_a_process_that_has_ended_is_no_target():
    child = subprocess.Popen(["true"])
    child.wait()
    assert inquiries.rank_target(child.pid, {}) is None
    target = inquiries.rank_target(os.getpid(), {"A": "b"})
    assert target.poll() is None
    assert target.worker_ticks > 0


def test_a_head_that_has_not_proved_who_it_is_gets_no_command_run():
    refused = inquiries.refuse_unproved(start("rank 0"))
    assert refused.exec_id == "e"
    assert "no common key" in refused.what
    assert "secret_file" in refused.fix
