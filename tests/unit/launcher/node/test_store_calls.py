"""Which store a process calls: by its connections, torch's words in the log, and the script's lines."""

import os
import socket
import sys
import time

import pytest

from torchmuster.launcher.node.stacks import look, read_end


@pytest.fixture
def server():
    """Return a listener of this process with room for one call that nobody has accepted."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        yield listener


def ours(log="", text=""):
    return look(os.getpid(), text, str(log), time.monotonic())


def test_open_connections_and_calls_without_an_answer_are_told_apart(server):
    address = server.getsockname()
    end = f"127.0.0.1:{address[1]}"
    with socket.create_connection(address), socket.socket() as second, socket.socket() as third:
        for one in (second, third):
            one.setblocking(False)
            one.connect_ex(address)
        found = ours()
        assert end in found.connected
        assert end in found.calling
        assert found.named == ""


def test_connections_of_other_processes_are_not_told(server):
    address = server.getsockname()
    with socket.create_connection(address):
        assert (
            f"127.0.0.1:{address[1]}" not in look(os.getppid(), "", "", time.monotonic()).connected
        )


@pytest.mark.parametrize(
    ("word", "end"),
    [
        ("0100007F:733D", "127.0.0.1:29501"),
        ("0000000000000000FFFF00000100000A:0050", "10.0.0.1:80"),
        ("00000000000000000000000001000000:0001", "::1:1"),
    ],
)
@pytest.mark.skipif(sys.byteorder != "little", reason="the words are a little-endian machine's")
def test_addresses_of_the_kernels_table_are_read(word, end):
    assert read_end(word) == end


@pytest.mark.parametrize(
    "line",
    [
        "[W TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host n1.example:29501 - retrying (try=0",
        "[W socket.cpp:601] [c10d] The client socket has failed to connect to [n1.example]:29501 (errno: 111 - x).",
    ],
)
def test_the_address_is_read_from_torchs_own_words(tmp_path, line):
    log = tmp_path / "rank-0.log"
    log.write_text(f"{'x' * 200_000}\n{line}\n")
    assert ours(log).named == "n1.example:29501"
    log.write_text("nothing of the kind\n")
    assert ours(log).named == ""
    assert ours(tmp_path / "absent").named == ""


def test_lines_of_the_script_that_set_an_address_are_told(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        'import os\n# os.environ["MASTER_PORT"] = "1"\nprint(os.environ["MASTER_PORT"] == "1")\n'
        'os.environ["MASTER_PORT"] = "29501"\ninit(init_method="tcp://10.9.9.9:1")\n'
    )
    text = (
        "Current thread 0x01 (most recent call first):\n"
        f'  File "/e/lib/python3.11/site-packages/torch/x.py", line 2 in f\n  File "{script}", line 5 in g\n'
    )
    assert ours(text=text).lines == (
        'train.py:4: os.environ["MASTER_PORT"] = "29501"',
        'train.py:5: init(init_method="tcp://10.9.9.9:1")',
    )


def test_a_process_that_has_gone_has_no_connections():
    assert look(2**22 + 1, "", "", time.monotonic()).connected == ()
