"""Which rank a command belongs to, and what it gets of its variables."""

import os
import subprocess

from torchmuster.launcher.net import part_messages
from torchmuster.launcher.node import inquiries


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
