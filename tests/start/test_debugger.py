"""`breakpoint()`, `pdb`, standard input, and muster on a terminal: what a shown rank sees of it, and the user of the rank."""

import os
import sys

import pytest

from kit.screen import TerminalOf
from kit.waiting import wait_until
from start.ways import (
    FORKED,
    FRESH,
    LIMIT_S,
    MUSTER,
    PYTHON,
    Workers,
    hear_report,
    job_env,
    listening,
)
from torchmuster.core.net.ipc import DebuggerHeld

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
    with Workers(place, "prog.py", way=way) as workers:
        ours = workers.run(stdin=piped(typed))
    assert ours == plain


def test_the_variable_of_python_turns_breakpoints_off(place):
    place.write("prog.py", "import os\nos.environ['PYTHONBREAKPOINT'] = '0'\nbreakpoint()\n")
    with Workers(place, "prog.py") as workers:
        assert workers.run().code == 0


def test_the_agent_hears_of_a_session_and_of_its_end(place):
    place.home.mkdir()
    place.write("prog.py", "import pdb; pdb.set_trace()\nx = 1\n")
    with Workers(place, "prog.py") as workers, listening(workers) as agent:
        outputs = workers.start(stdin=piped("c\n"))
        assert hear_report(agent) == DebuggerHeld(active=True)
        assert hear_report(agent) == DebuggerHeld(active=False)
        assert workers.finish(outputs).code == 0


def on_terminal(place, *words, **size):
    """Start `muster WORDS` with the program on a terminal."""
    command = [sys.executable, "-c", MUSTER, *words, str(place.cwd / "prog.py")]
    return TerminalOf(command, job_env(MUSTER_HOME=str(place.home), TERM="xterm"), **size)


def test_muster_run_on_a_terminal_gives_the_keyboard_to_the_debugger(place):
    pytest.importorskip("torch", reason="the worker needs its store")
    place.write("prog.py", "x = 40\nbreakpoint()\nprint('went on with', x)\n")
    with on_terminal(place, "run", "--nproc-per-node", "1", columns=120) as screen:
        screen.wait_for("(Pdb)", limit_s=LIMIT_S)
        screen.press("p 1+1\n")
        screen.wait_for("p 1+1\n2\n(Pdb)", limit_s=LIMIT_S)
        screen.press("x += 2\n")
        screen.wait_for("x += 2\n(Pdb)", limit_s=LIMIT_S)
        screen.press("c\n")
        screen.wait_for("muster: succeeded", limit_s=LIMIT_S)
        assert screen.wait_for_end(limit_s=LIMIT_S) == 0
    assert place.log(0, 0).endswith("went on with 42\n")


PROGRAM = """
import os, sys
for i in range(3):
    print("out", i)
    print("err", i, file=sys.stderr)
print([s.isatty() for s in (sys.stdin, sys.stdout, sys.stderr)], os.get_terminal_size(1)[:])
try:
    os.open("/dev/tty", os.O_RDWR)
except OSError as error:
    print(error.strerror)
breakpoint()
print("\\x1b[31mred", os.get_terminal_size(2)[:])
"""
EXPECTED = """out 0
err 0
out 1
err 1
out 2
err 2
[False, True, True] (111, 33)
No such device or address
"""


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--nproc-per-node", "1", "--python", f"{sys.executable} -S"),
        ("torchrun", "--standalone", "--nproc-per-node", "1"),
    ],
    ids=["run", "torchrun"],
)
def test_the_shown_rank_has_order_colours_and_size_and_the_debugger_works(place, words):
    place.write("prog.py", PROGRAM)
    with on_terminal(place, *words, columns=111, rows=33) as screen:
        screen.wait_for("(Pdb)", limit_s=LIMIT_S)
        screen.resize(140, 40)
        screen.press("while os.get_terminal_size(1)[0] != 140: pass\n")
        screen.press("p 1000 + 2\n")
        screen.wait_for("1002\n(Pdb)", limit_s=LIMIT_S)
        screen.press("c\n")
        assert screen.wait_for_end(limit_s=LIMIT_S) == 0
    seen = screen.sent.decode()
    assert EXPECTED.replace("\n", "\r\n") in seen
    assert "\x1b[31mred (140, 40)\r\n" in seen
    assert place.log(0, 0).startswith(EXPECTED)


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
