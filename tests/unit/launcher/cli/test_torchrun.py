"""The head of `muster torchrun`: its port, what it says, and the completion of its options."""

import os
import socket
import sys
import threading
from types import SimpleNamespace

import pytest
from click.shell_completion import ShellComplete

from kit.values import run_plan, run_result
from torchmuster.core.cli.main import muster
from torchmuster.core.files.atomic import write_json
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.net.channel import MAGIC
from torchmuster.errors import JoinTimeoutError, UsageError
from torchmuster.launcher.cli import torchrun

RUN_ID = "20260101-000000-train-ab12"


def test_the_head_names_the_runs_folder_and_its_end_on_standard_error(home, capsys):
    plan = run_plan(run_id=RUN_ID)
    folder = str(home / "runs" / RUN_ID)

    told = torchrun._create_run_dir(RunDir(folder), plan)
    assert told == f"run train-ab12; its files are in {folder}"

    result = run_result(run_id=RUN_ID, elapsed_s=2.0)
    write_json(RunDir(folder).result, codec.to_plain(result))
    torchrun._say_end(SimpleNamespace(head=SimpleNamespace(run_dir=RunDir(folder))))
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "muster: succeeded after 2.0 s (1 attempt)\n")

    torchrun._say_end(SimpleNamespace(head=None))  # an agent that is not the head
    assert capsys.readouterr().err == ""
    assert os.path.isdir(folder)


def test_an_option_of_the_launcher_behind_the_script_is_told(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("import argparse\n")
    program = SimpleNamespace(target=str(script), args=("--lr", "1", "--nproc_per_node=2"))
    torchrun._warn_of_late_option(SimpleNamespace(program=program))

    said = capsys.readouterr().err
    assert said.startswith(f"muster: `--nproc-per-node` comes after {script}")
    assert said.count("\n") == 1


def completed(words, incomplete):
    shell = ShellComplete(muster, {}, "muster", "_MUSTER_COMPLETE")
    return [(item.value, item.type) for item in shell.get_completions(words, incomplete)]


@pytest.mark.parametrize("words", [["torchrun"], ["torchrun", "--nnodes", "2"]])
def test_options_of_torchrun_and_ours_are_completed_without_torch(words):
    was_there = "torch" in sys.modules
    names = [name for name, _ in completed(words, "--n")]
    assert {"--nproc-per-node", "--nnodes", "--no-spread"} <= set(names)
    assert was_there or "torch" not in sys.modules


def test_a_script_of_torchrun_is_completed_by_the_shell():
    assert completed(["torchrun", "--nnodes", "2"], "tr") == [("tr", "file")]


HERE = "127.0.0.1"


@pytest.fixture
def taken():
    """Yield a socket of somebody else that listens and never answers."""
    with socket.create_server((HERE, 0)) as listening:
        yield listening


def port_of(listening):
    return listening.getsockname()[1]


def test_a_free_port_is_taken_at_once():
    with torchrun.claim(HERE, 0, HERE) as listening:
        assert port_of(listening)


def test_a_taken_port_names_its_owner_at_once_where_nobody_else_can_be_the_head(taken):
    with pytest.raises(UsageError) as caught:
        torchrun.claim(HERE, port_of(taken), HERE)

    assert caught.value.what == f"the head can't listen on port {port_of(taken)}"
    assert "listens there" in caught.value.why
    assert "(pid " in caught.value.why


def test_a_port_that_is_in_use_without_a_listener_accuses_no_listener():
    with socket.socket() as bound:
        bound.bind((HERE, 0))
        with pytest.raises(UsageError) as caught:
            torchrun.claim(HERE, port_of(bound), HERE)

    assert caught.value.why.startswith("the port is in use, though nothing listens there")


def test_a_port_that_becomes_free_in_the_wait_is_taken(taken, monkeypatch):
    monkeypatch.setattr(torchrun, "_FIRST_SAY_S", 0.0)
    monkeypatch.setattr(torchrun, "_ANSWERS_WITHIN_S", 0.05)
    port, said = port_of(taken), []

    def say(text):
        said.append(text)
        taken.close()  # its owner ends

    with torchrun.claim_or_find_head(HERE, port, HERE, 30.0, say) as listening:
        assert port_of(listening) == port
    assert f"waiting for port {port} of this machine" in said[0]
    assert "(pid " in said[0]


def test_a_port_that_stays_taken_is_an_error_with_its_owner(taken, monkeypatch):
    monkeypatch.setattr(torchrun, "_ANSWERS_WITHIN_S", 0.05)

    with pytest.raises(JoinTimeoutError, match="was not free within 0 s") as caught:
        torchrun.claim_or_find_head(HERE, port_of(taken), HERE, 0.0, print)

    assert "listens there" in caught.value.why


@pytest.mark.parametrize(("words", "muster"), [(MAGIC + b"\0" * 36, True), (b"SSH-2.0-x", False)])
def test_a_head_is_told_by_its_first_words(taken, words, muster):
    def answer():
        connection, _ = taken.accept()
        with connection:
            connection.recv(64)
            connection.sendall(words)

    thread = threading.Thread(target=answer)
    thread.start()
    assert torchrun.is_muster(HERE, port_of(taken)) is muster
    thread.join()


def test_another_agent_that_is_the_head_already_is_joined(taken, monkeypatch):
    monkeypatch.setattr(torchrun, "is_muster", lambda host, port: True)

    assert torchrun.claim_or_find_head(HERE, port_of(taken), HERE, 30.0, print) is None
