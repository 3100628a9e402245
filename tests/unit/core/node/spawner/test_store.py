"""The store of an attempt begins on a socket that listens already, with every torch that muster promises."""

import datetime as dt
import signal
import socket

import pytest
import torch
from torch.torch_version import TorchVersion

from torchmuster.core.node.spawner import serve

TCPStore = torch.distributed.TCPStore


def store_before_2_8(*args, use_libuv=True, master_listen_fd=None, **options):
    """Refuse what the constructor of torch 2.6.0 and 2.7.1 refuses: asked of both, as `scripts/test-versions` does."""
    if use_libuv and master_listen_fd is not None:
        raise NotImplementedError("The libuv TCPStore backend does not support [...] an listen fd")
    return TCPStore(*args, use_libuv=use_libuv, master_listen_fd=master_listen_fd, **options)


@pytest.mark.parametrize(
    ("version", "constructor"),
    [
        ("2.6.0+cu124", store_before_2_8),
        ("2.7.1", store_before_2_8),
        ("2.8.0a0+5228986c39.nv25.05", store_before_2_8),
        ("2.8.0", TCPStore),
        ("2.13.0+cpu", TCPStore),
    ],
)
def test_the_store_answers_on_the_socket_that_it_is_given(monkeypatch, version, constructor):
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]

    def ask():
        client = TCPStore("127.0.0.1", port, is_master=False, timeout=dt.timedelta(seconds=30))
        client.set("key", "value")
        assert client.get("key") == b"value"
        raise InterruptedError

    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.distributed, "TCPStore", constructor)
    monkeypatch.setattr(signal, "pause", ask)
    with pytest.raises(InterruptedError):
        serve.serve_store(listening.detach(), "127.0.0.1", port)
