"""Stacks of real processes: those that answer, and those that can't."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.programs import shell_program
from kit.stacks import TORCH, stack
from kit.waiting import wait_until
from torchmuster.core import proc
from torchmuster.core.model import contract
from torchmuster.launcher.facts.stacks import RankActivity, judge
from torchmuster.launcher.node import stacks
from torchmuster.launcher.node.stacks import look, read_end

SCRIPT = """
import os, sys, threading
sys.path.insert(0, {source!r})
os.environ.update(RANK="{rank}", TORCHMUSTER_ATTEMPT="0")
from torchmuster.core.node.spawner.last_words import write_stacks_on_signal
write_stacks_on_signal({socket!r})
def read():
    print("up", flush=True)
    {body}

read()
"""
SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(stacks.__file__)))


@pytest.fixture
def worker(tmp_path):
    """Return a function that starts a process like a worker and returns its (rank, pid)."""
    started = []

    def start(body="threading.Event().wait(60)", rank=0, sleeps=True):
        path = tmp_path / f"train{rank}.py"
        socket = str(tmp_path / "agent.sock")
        path.write_text(SCRIPT.format(source=SOURCE, rank=rank, socket=socket, body=body))
        child = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE)
        started.append(child)
        assert child.stdout.readline() == b"up\n"
        if sleeps:  # until then it may be on the way there
            wait_until(lambda: proc.read_process(child.pid).state == "S")
        return rank, child.pid

    yield start
    for child in started:
        child.send_signal(signal.SIGCONT)
        child.kill()
        child.wait()
        child.stdout.close()


def take(tmp_path, *workers):
    return stacks.take_stacks(str(tmp_path), 0, workers, limit_s=60.0)


def test_a_process_that_waits_shows_its_stack_and_goes_on(worker, tmp_path):
    one = worker()
    for _ in range(2):
        (found,) = take(tmp_path, one)
        standing = judge(found.text, state=found.state)
        assert (standing.what, standing.place) == ("read()", "train0.py:9")
        assert found.source == "threading.Event().wait(60)"
    assert proc.is_running(one[1])


def test_a_process_that_waits_for_a_signal_is_not_woken_by_ours(worker, tmp_path):
    one = worker(body="import signal; signal.pause(); print('woken', flush=True)")
    wait_until(lambda: stacks.waits_for_signal(one[1]))
    (found,) = take(tmp_path, one)
    assert found.text == ""
    assert found.why_not.startswith("it waits for a signal")
    assert proc.read_process(one[1]).state == "S"
    assert stacks.waits_for_signal(one[1])


def test_a_process_whose_c_code_holds_the_lock_answers(worker, tmp_path):
    one = worker(body="(1 << 40_000_000) // 3 ** 9_000_000", rank=1, sleeps=False)
    (found,) = take(tmp_path, one)
    assert "in read" in found.text


def test_a_stopped_process_is_said_to_be_stopped_and_is_not_woken(worker, tmp_path):
    one = worker()
    os.kill(one[1], signal.SIGSTOP)
    os.waitid(os.P_PID, one[1], os.WSTOPPED | os.WNOWAIT)
    (found,) = take(tmp_path, one)
    assert (found.state, found.text) == ("T", "")
    assert judge(found.text, state=found.state).doing is RankActivity.STOPPED
    assert found.why_not.startswith("it is stopped")


@pytest.mark.parametrize(
    "body",
    [
        "import signal; signal.signal(47, signal.SIG_DFL); threading.Event().wait(60)",
        "os.close(700); threading.Event().wait(60)",
        "os.closerange(3, 1024); os.open('/dev/null', 0); threading.Event().wait(60)",
        "os.execv('/bin/sleep', ['sleep', '60'])",
    ],
)
def test_a_process_that_does_not_listen_is_never_sent_the_signal(worker, tmp_path, body):
    one = worker(body=body)
    path = contract.stacks_path(str(tmp_path), 0, 0)
    wait_until(lambda: not stacks._answers(one[1], path))
    (found,) = take(tmp_path, one)
    assert found.text == ""
    assert found.why_not
    assert proc.is_running(one[1])


def test_all_ranks_are_asked_before_any_answer_is_awaited(worker, tmp_path, monkeypatch):
    workers = [worker(rank=rank) for rank in range(3)]
    wait, awaited = stacks._wait_until_written, []

    def note(asked, deadline):
        awaited.append([one.pid for one in asked])
        wait(asked, deadline)

    monkeypatch.setattr(stacks, "_wait_until_written", note)
    found = take(tmp_path, *workers)
    assert awaited == [[pid for _, pid in workers]]
    assert [one.rank for one in found] == [0, 1, 2]
    assert all("in read" in one.text for one in found)


SPY = """
echo 'Process '$4': python train.py'
echo 'Thread '$4' (idle): "MainThread"'
echo '    read (train.py:9)'
echo '    <module> (train.py:12)'
"""


@pytest.fixture
def deaf():
    """Return a function that starts a process that writes no stacks, with variables of its own."""
    started = []

    def start(program="/bin/sleep", **environment):
        started.append(subprocess.Popen([program, "60"], env=environment))
        pid = started[-1].pid
        # Before its program runs the kernel shows no command line.
        wait_until(lambda: Path(f"/proc/{pid}/cmdline").read_bytes())
        return pid

    yield start
    for child in started:
        child.kill()
        child.wait()


def make_spy(folder, text=SPY):
    return str(shell_program(folder / "py-spy", text))


def not_ours(name, path=None):
    """Find programs, but none on the PATH of whoever runs the tests."""
    return shutil.which(name, path=path) if path is not None else None


def test_py_spy_is_found_on_the_path_of_the_job(deaf, tmp_path):
    pid = deaf(PATH=str(tmp_path))
    assert stacks.find_spy(pid, not_ours) is None
    program = make_spy(tmp_path)
    assert stacks.find_spy(pid, not_ours) == program
    assert stacks.find_spy(pid, lambda name, path=None: f"{path or 'ours'}") == "ours"


def test_py_spy_is_found_beside_the_interpreter_of_the_job(deaf, tmp_path):
    python = tmp_path / "python"
    python.symlink_to("/bin/sleep")
    program = make_spy(tmp_path)
    assert stacks.find_spy(deaf(str(python)), not_ours) == program


def test_what_is_missing_for_a_stack_is_said(deaf, tmp_path):
    text, why_not = stacks._spy(deaf(), lambda pid: None)
    assert text == ""
    assert "it writes no stacks" in why_not
    assert "pip install py-spy" in why_not
    program = make_spy(tmp_path, "echo 'Permission Denied' >&2; exit 1")
    _, why_not = stacks._spy(deaf(), lambda pid: program)
    assert why_not.endswith("py-spy: Permission Denied")


WAITS_FOR_ALL = """
: > FOLDER/spy-of-$4
six() { [ $# = 6 ]; }
until six FOLDER/spy-of-*; do /bin/sleep 0.01; done
"""


def test_all_ranks_that_write_no_stacks_are_looked_at_side_by_side(deaf, tmp_path, monkeypatch):
    waits = WAITS_FOR_ALL.replace("FOLDER", str(tmp_path))
    make_spy(tmp_path, waits + SPY)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(stacks, "_SPY_LIMIT_S", 60.0)
    workers = [(rank, deaf(PATH=str(tmp_path))) for rank in range(6)]
    found = take(tmp_path, *workers)
    assert [one.why_not for one in found] == [""] * 6
    assert all("read (train.py:9)" in one.text for one in found)


def test_a_process_that_has_ended_is_no_error(tmp_path):
    child = subprocess.Popen(["true"])
    child.wait()
    (found,) = take(tmp_path, (0, child.pid))
    assert found.state == ""
    assert found.why_not == "the process has ended"


def test_pieces_fit_a_message():
    parts = stacks.pieces(tuple(range(30)))
    assert [len(part) for part, _ in parts] == [12, 12, 6]
    assert [last for _, last in parts] == [False, False, True]
    assert stacks.pieces(()) == [((), True)]


# Which store a process calls: by its connections, torch's words in the log, and the script's lines.


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
        found = look(os.getppid(), "", "", time.monotonic())
        assert f"127.0.0.1:{address[1]}" not in found.connected


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
    text = stack((f"{TORCH}/x.py", 2, "f"), (script, 5, "g"))
    assert ours(text=text).lines == (
        'train.py:4: os.environ["MASTER_PORT"] = "29501"',
        'train.py:5: init(init_method="tcp://10.9.9.9:1")',
    )


def test_a_process_that_has_gone_has_no_connections():
    assert look(2**22 + 1, "", "", time.monotonic()).connected == ()
