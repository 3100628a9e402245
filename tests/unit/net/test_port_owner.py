import os
import socket
import subprocess
import sys

import pytest

from torchmuster.net import port_owner as owners
from torchmuster.net.port_owner import PortOwner, port_owner

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
