import socket
import threading

import pytest

from torchmuster.core.net.channel import MAGIC
from torchmuster.errors import JoinTimeoutError, UsageError
from torchmuster.launcher.cli import torchrun
from torchmuster.launcher.cli.torchrun import claim, claim_or_find_head, is_muster

HERE = "127.0.0.1"


@pytest.fixture
def taken():
    """Yield a socket of somebody else that listens and never answers."""
    with socket.create_server((HERE, 0)) as listening:
        yield listening


def port_of(listening):
    return listening.getsockname()[1]


def test_a_free_port_is_taken_at_once():
    with claim(HERE, 0, HERE) as listening:
        assert port_of(listening)


def test_a_taken_port_names_its_owner_at_once_where_nobody_else_can_be_the_head(taken):
    with pytest.raises(UsageError) as caught:
        claim(HERE, port_of(taken), HERE)

    assert caught.value.what == f"the head can't listen on port {port_of(taken)}"
    assert "listens there" in caught.value.why
    assert "(pid " in caught.value.why


def test_a_port_that_is_in_use_without_a_listener_accuses_no_listener():
    with socket.socket() as bound:
        bound.bind((HERE, 0))
        with pytest.raises(UsageError) as caught:
            claim(HERE, port_of(bound), HERE)

    assert caught.value.why.startswith("the port is in use, though nothing listens there")


def test_a_port_that_becomes_free_in_the_wait_is_taken(taken, monkeypatch):
    monkeypatch.setattr(torchrun, "_FIRST_SAY_S", 0.0)
    monkeypatch.setattr(torchrun, "_ANSWERS_WITHIN_S", 0.05)
    port, said = port_of(taken), []

    def say(text):
        said.append(text)
        taken.close()  # its owner ends

    with claim_or_find_head(HERE, port, HERE, 30.0, say) as listening:
        assert port_of(listening) == port
    assert f"waiting for port {port} of this machine" in said[0]
    assert "(pid " in said[0]


def test_a_port_that_stays_taken_is_an_error_with_its_owner(taken, monkeypatch):
    monkeypatch.setattr(torchrun, "_ANSWERS_WITHIN_S", 0.05)

    with pytest.raises(JoinTimeoutError, match="was not free within 0 s") as caught:
        claim_or_find_head(HERE, port_of(taken), HERE, 0.0, print)

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
    assert is_muster(HERE, port_of(taken)) is muster
    thread.join()


def test_another_agent_that_is_the_head_already_is_joined(taken, monkeypatch):
    monkeypatch.setattr(torchrun, "is_muster", lambda host, port: True)

    assert claim_or_find_head(HERE, port_of(taken), HERE, 30.0, print) is None
