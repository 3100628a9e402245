"""What a spawner does for the processes that it starts: signals, output, state of the kernel."""

import os
import signal
import sys

import pytest

from kit.waiting import wait_until
from start.ways import FORKED, FRESH, Workers
from torchmuster.core import proc
from torchmuster.core.model.plan import ScriptKind
from torchmuster.core.node.spawner import start

PYTHON = (sys.executable, "-S")  # without torch, so that a spawner starts at once


@pytest.mark.parametrize("way", [FORKED, FRESH])
def test_a_signal_right_after_the_start_is_not_lost(place, way):
    place.write("prog.py", "import signal\nsignal.pause()\n")
    with Workers(place, "prog.py", way=way, python=PYTHON) as workers:
        for _ in range(10):
            outputs = workers.start()
            workers.signal(signal.SIGTERM)
            assert workers.finish(outputs).code == -signal.SIGTERM


def test_the_end_of_the_agent_ends_the_workers_before_its_lease_does(place, monkeypatch):
    monkeypatch.setattr(start, "LEASE_S", 3600.0)
    place.write("prog.py", "import signal\nprint('on', flush=True)\nsignal.pause()\n")
    with Workers(place, "prog.py", python=PYTHON) as workers:
        out, err = workers.start()
        assert os.read(out, 3) == b"on\n"
        (worker,) = proc.children_of(workers.pid)
        workers.close_channel()
        wait_until(lambda: not proc.is_running(worker), "the end of the worker")
        wait_until(lambda: not proc.is_running(workers.pid), "the end of the spawner")
    os.close(out)
    os.close(err)


def test_a_worker_writes_only_what_it_wrote_itself(place):
    place.write(
        "chatty.py",
        "import ctypes, sys\n"
        "print('from the import')\n"
        "sys.stdout.buffer.write(b'from the import')\n"
        "ctypes.CDLL(None).puts(b'from a library in C')\n"
        "sys.stderr.write('no newline')\n",
    )
    place.write("prog.py", "print('from the script')\n")
    with Workers(place, "prog.py", python=PYTHON, preload=["chatty"]) as workers:
        for _ in range(2):
            done = workers.run()
            assert (done.code, done.stdout, done.stderr) == (0, "from the script\n", "")


def test_one_worker_leaves_nothing_to_the_next(place):
    place.write(
        "prog.py",
        "import os, sys, threading\n"
        "print(sorted(n for n in os.environ if n.startswith('LEFT')), hasattr(sys, 'left'),\n"
        "      os.getcwd(), len(os.listdir('/proc/self/fd')), os.umask(0o22), sys.path[1:2])\n"
        "os.environ['LEFT'] = sys.left = '1'\n"
        "os.chdir('/')\n"
        "sys.path.insert(1, 'left')\n"
        "left = open('/dev/null')\n",
    )
    with Workers(place, "prog.py", python=PYTHON) as workers:
        first, second = workers.run(), workers.run()
    assert first.code == 0
    assert first == second


def test_a_command_gets_the_signals_that_a_shell_would_give_it(place):
    """Python ignores SIGPIPE; `yes | head` in a job's shell script must not inherit that."""
    words = ("-c", "grep SigIgn /proc/self/status")
    plain = place.plain(*words, python=("/bin/sh",))
    with Workers(place, "/bin/sh", *words, way=FRESH, kind=ScriptKind.COMMAND) as workers:
        ours = workers.run()
    assert ours == plain
