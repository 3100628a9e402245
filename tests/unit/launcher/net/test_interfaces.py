"""The interfaces of the machine that runs the test."""

import ipaddress
import os
import socket
import subprocess
import sys

import pytest

from torchmuster.core.net.address import own_addresses
from torchmuster.launcher.net import interfaces as owners
from torchmuster.launcher.net.interfaces import (
    PortOwner,
    is_own_address,
    link_names,
    own_interfaces,
    port_owner,
)


def test_every_address_that_others_may_reach_is_listed_without_loopback():
    ipv4 = [i.address for i in own_interfaces() if ":" not in i.address]

    assert sorted(ipv4) == sorted(own_addresses())
    assert "lo" not in {i.name for i in own_interfaces()}


def test_each_has_its_name_and_a_prefix_of_its_family():
    for interface in own_interfaces():
        assert interface.name in link_names()
        address = ipaddress.ip_address(interface.address)
        assert 0 < interface.prefix_bits <= address.max_prefixlen
        assert not address.is_loopback


def test_all_links_are_named_also_those_without_an_address():
    assert set(link_names()) == {name for _, name in socket.if_nameindex()}


def test_an_address_that_we_could_bind_is_ours():
    assert is_own_address("127.0.0.1")


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b", "x" * 64 + ".example"])
def test_an_address_that_we_can_t_bind_is_not_ours(host):
    assert not is_own_address(host)


# The process that listens on a port.

SERVE = "import socket,sys; s=socket.create_server(('127.0.0.1',0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"


def test_the_process_that_listens_is_named_with_its_number(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(SERVE)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, str(script)], stdin=pipe, stdout=pipe) as server:
        found = port_owner(int(server.stdout.readline()))
        server.stdin.close()

    assert (found.pid, found.uid) == (server.pid, os.getuid())
    assert str(found).endswith(f"server.py (pid {server.pid})")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_listening_socket_of_any_address_counts(host):
    with socket.create_server((host, 0)) as listening:
        assert port_owner(listening.getsockname()[1]).pid == os.getpid()


def test_a_port_on_which_nobody_listens_has_no_owner():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound is not listening
        assert port_owner(bound.getsockname()[1]) is None


def test_where_processes_can_t_be_looked_at_the_user_is_named(monkeypatch):
    monkeypatch.setattr(owners, "_process_with", lambda link: None)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        found = port_owner(listening.getsockname()[1])

    assert found == PortOwner(uid=os.getuid())
    assert str(PortOwner(uid=0)) == "a process of root"
    assert str(PortOwner(uid=(1 << 31) - 7)) == f"a process of uid {(1 << 31) - 7}"


def test_control_characters_of_a_name_are_not_shown(monkeypatch):
    monkeypatch.setattr(owners, "_read", lambda path: "/bin/\x1b[31mred\0-x\0evil\n.py\0")

    assert owners._name(1) == "?[31mred evil?.py"


CALL = """
import encodings.idna, os, socket, sys  # before it may read nothing of ours
os.setuid(int(sys.argv[2]))
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
sys.stdin.read()
"""


@pytest.mark.parametrize("other", [0, 1])
def test_a_connection_is_this_user_s_when_its_other_end_is(other):
    if other and os.getuid():
        pytest.skip("only root can be somebody else")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        words = [str(listening.getsockname()[1]), str(os.getuid() + other)]
        with subprocess.Popen(
            [sys.executable, "-c", CALL, *words], stdin=subprocess.PIPE
        ) as caller:
            stream, _ = listening.accept()
            with stream:
                assert owners.is_own_connection(stream) is not bool(other)
            caller.stdin.close()


def test_a_connection_whose_other_end_has_gone_is_nobody_s():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with socket.create_connection(listening.getsockname()):
            stream, _ = listening.accept()
        with stream:
            assert not owners.is_own_connection(stream)
