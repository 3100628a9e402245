"""`breakpoint()`, `pdb` and standard input."""

import os
import pty
import select
import signal
import socket
import sys
import time

import pytest

from kit.waiting import wait_until
from start.ways import FORKED, FRESH, LIMIT_S, MUSTER, Workers, hear_report, job_env
from torchmuster.core.net.ipc import DebuggerHeld

PYTHON = (sys.executable, "-S")  # without torch, so that a spawner starts at once
SESSIONS = {
    "breakpoint()": ("breakpoint()", ["p 1+1", "n", "p x", "c"]),
    "pdb.set_trace()": ("import pdb; pdb.set_trace(header='look')", ["l", "args", "c"]),
    "stepping off the end": ("breakpoint()", ["n", "n", "n", "n", "n", "n"]),
    "quitting": ("breakpoint()", ["q"]),
    "the end of the input": ("breakpoint()", []),
    "another hook": ("import sys; sys.breakpointhook = print; breakpoint(1, 2)", []),
    "post mortem": (
        "import pdb\n    try: 1 / 0\n    except ZeroDivisionError as e: pdb.post_mortem(e.__traceback__)",
        ["p e", "q"],
    ),
}


def piped(text: str) -> int:
    """Return the read end of a pipe that holds the text and then ends."""
    read_fd, write_fd = os.pipe()
    os.write(write_fd, text.encode())
    os.close(write_fd)
    return read_fd


@pytest.mark.parametrize("way", [FORKED, FRESH])
@pytest.mark.parametrize("session", SESSIONS)
def test_a_session_reads_as_under_plain_python(place, session, way):
    line, commands = SESSIONS[session]
    # threading is always there in a worker, and stepping meets its end too.
    place.write(
        "prog.py",
        f"import threading\ndef f(x):\n    {line}\n    x += 1\n    return x\nf(1)\nprint('end')\n",
    )
    typed = "".join(f"{command}\n" for command in commands)
    plain = place.plain("prog.py", python=PYTHON, stdin=piped(typed))
    with Workers(place, "prog.py", way=way, python=PYTHON) as workers:
        ours = workers.run(stdin=piped(typed))
    assert ours == plain


def test_the_variable_of_python_turns_breakpoints_off(place):
    place.write("prog.py", "import os\nos.environ['PYTHONBREAKPOINT'] = '0'\nbreakpoint()\n")
    with Workers(place, "prog.py", python=PYTHON) as workers:
        assert workers.run().code == 0


def test_the_agent_hears_of_a_session_and_of_its_end(place):
    place.home.mkdir()
    place.write("prog.py", "import pdb; pdb.set_trace()\nx = 1\n")
    with (
        socket.socket(socket.AF_UNIX) as agent,
        Workers(place, "prog.py", python=PYTHON) as workers,
    ):
        agent.bind(workers.socket_path)
        agent.listen()
        agent.settimeout(LIMIT_S)
        outputs = workers.start(stdin=piped("c\n"))
        assert hear_report(agent) == DebuggerHeld(active=True)
        assert hear_report(agent) == DebuggerHeld(active=False)
        assert workers.finish(outputs).code == 0


def test_muster_run_on_a_terminal_gives_the_keyboard_to_the_debugger(place):
    pytest.importorskip("torch", reason="the worker needs its store")
    place.write("prog.py", "x = 40\nbreakpoint()\nprint('went on with', x)\n")
    argv = [sys.executable, "-c", MUSTER, "run", "--nproc-per-node", "1", "prog.py"]
    pid, terminal = pty.fork()
    if pid == 0:  # the child leads a session on the new terminal
        os.chdir(place.cwd)
        os.execve(argv[0], argv, job_env(MUSTER_HOME=str(place.home)))
    try:
        screen = read_until(terminal, "(Pdb) ", "")
        os.write(terminal, b"p 1+1\n")
        screen = read_until(terminal, "\r\n2\r\n(Pdb) ", screen)
        os.write(terminal, b"x += 2\n")
        screen = read_until(terminal, "x += 2\r\n(Pdb) ", screen)
        os.write(terminal, b"c\n")
        read_until(terminal, "muster: succeeded", screen)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    assert place.log(0, 0).endswith("went on with 42\n")


def read_until(terminal: int, words: str, screen: str) -> str:
    deadline = time.monotonic() + LIMIT_S
    while words not in screen:
        ready, _, _ = select.select([terminal], [], [], deadline - time.monotonic())
        assert ready, f"not on the screen: {words!r}\n{screen}"
        screen += os.read(terminal, 1 << 16).decode()
    return screen


def test_the_rank_that_is_named_gets_standard_input_and_no_other(place):
    place.write(
        "prog.py",
        "import os, sys\n"
        "os.mkdir('ready-' + os.environ['RANK'])\n"
        "print([sys.stdin.isatty(), sys.stdin.seekable(), sys.stdin.read()])\n",
    )
    options = ("--nproc-per-node", "2", "--stdin", "1", "--python", " ".join(PYTHON))
    with place.open_muster("prog.py", options=options) as client:
        wait_until((place.cwd / "ready-1").exists, "the worker", LIMIT_S)
        _, stderr = client.communicate(b"hello\nworld\n", timeout=LIMIT_S)
    assert client.returncode == 0, stderr
    assert place.log(0, 0) == "[False, True, '']\n"
    assert place.log(0, 1) == "[False, False, 'hello\\nworld\\n']\n"


def test_standard_input_is_empty_unless_it_is_asked_for(place):
    place.write(
        "prog.py", "import os, sys\nprint(os.readlink('/proc/self/fd/0'), sys.stdin.read())\n"
    )
    options = ("--nproc-per-node", "1", "--python", " ".join(PYTHON))
    done = place.muster("prog.py", options=options, stdin=piped("hello\n"))
    assert done.code == 0, done.stderr
    assert place.log(0, 0) == f"{os.devnull} \n"
