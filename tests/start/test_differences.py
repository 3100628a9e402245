"""The closed list of docs/workers.md: each entry is true, and there is no other."""

import os
import pty
import re
import sys
from pathlib import Path

import pytest

from start.ways import FORKED, FRESH, PLAIN, PYTHON, Workers, together
from torchmuster.core import proc

DOCS = Path(__file__).parents[2] / "docs" / "workers.md"
STACKS = 1 << (47 - 1)  # in masks of /proc/PID/status
both = pytest.mark.parametrize("way", [FORKED, FRESH])


def test_the_list_in_the_docs_has_exactly_the_tests_of_this_file():
    listed = re.findall(r"^ *<!-- (test_\w+) -->$", DOCS.read_text(), re.MULTILINE)
    entries = re.findall(r"^\d+\. \*\*", DOCS.read_text(), re.MULTILINE)
    here = [name for name in globals() if name.startswith("test_")]
    assert here[1:] == listed
    assert len(entries) == len(listed)


@both
def test_standard_output_is_line_buffered(facts, way):
    assert facts[PLAIN]["stdout: line_buffering"] is False
    assert facts[way]["stdout: line_buffering"] is True


def test_a_stream_is_a_terminal_only_where_it_is_shown_on_one(place):
    place.write(
        "prog.py",
        "import sys\nprint([s.isatty() for s in (sys.stdin, sys.stdout, sys.stderr)])\n",
    )
    keyboard, terminal = pty.openpty()
    try:
        options = ("--nproc-per-node", "1", "--python", " ".join(PYTHON))
        os.set_inheritable(terminal, True)
        done = place.muster("prog.py", options=options, stdin=os.dup(terminal), stdout=terminal)
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert done.code == 0, done.stderr
    assert place.log(0, 0) == "[False, True, False]\n"  # standard error went to a pipe


@both
def test_the_environment_has_the_listed_variables_more_and_no_other_change(facts, numbers, way):
    rows = re.findall(r"^ *\| ((?:`\w+` ?)+)\| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    always = {
        name
        for names, when in rows
        if when.startswith("always")
        for name in re.findall(r"`(\w+)`", names)
    }
    plain, ours = facts[PLAIN]["environment"], facts[way]["environment"]
    assert {name for name in ours if name not in plain} == always
    assert {name: ours[name] for name in plain} == plain
    assert {one["OMP_NUM_THREADS"] for one in numbers} == {"1"}


@both
def test_no_descriptor_above_2_is_passed_on(place, way):
    place.write("prog.py", "import os, sys\nos.fstat(int(sys.argv[1]))\n")
    read_fd, write_fd = os.pipe()
    start = {FORKED: "auto", FRESH: "fresh"}[way]
    options = ("--nproc-per-node", "1", "--start", start, "--python", " ".join(PYTHON))
    try:
        words = ("prog.py", str(write_fd))
        assert place.plain(*words, python=PYTHON, pass_fds=(write_fd,)).code == 0
        options = (*options, "--max-restarts", "0")
        assert place.muster(*words, options=options, pass_fds=(write_fd,)).code == 1
    finally:
        os.close(read_fd)
        os.close(write_fd)
    assert "Bad file descriptor" in place.log(0, 0)


@both
def test_a_worker_leads_a_session_without_a_terminal_and_dies_with_its_parent(facts, place, way):
    assert facts[PLAIN]["leads its session"] is False
    assert facts[way]["leads its session"] is True
    place.write(
        "prog.py",
        "import ctypes, os\n"
        "signum = ctypes.c_int()\n"
        "ctypes.CDLL(None).prctl(2, ctypes.byref(signum))  # PR_GET_PDEATHSIG\n"
        "try:\n    os.open('/dev/tty', os.O_RDWR)\n"
        "except OSError as error:\n    terminal = error.strerror\n"
        "print(signum.value, os.getppid(), terminal)\n",
    )
    with Workers(place, "prog.py", way=way) as workers:
        assert workers.run().stdout == f"9 {workers.pid} No such device or address\n"


@both
def test_script_and_arguments_end_the_command_line(facts, way):
    plain, ours = facts[PLAIN]["command line"], facts[way]["command line"]
    assert ours[-4:] == plain[-4:] == ["sub/probe.py", "--lr", "0.1", "-m"]
    assert ours[0] == plain[0]
    assert ours[1:-5] == [ours[1], "spawner", ours[3]] if way == FORKED else [ours[1], "worker"]
    assert facts[way]["environment in /proc"] is (way == FRESH)


@both
def test_three_frames_lie_below_the_script(facts, place, way):
    assert facts[way]["depth of the stack"] - facts[PLAIN]["depth of the stack"] == 3
    place.write(
        "prog.py",
        "import inspect, warnings\n"
        "deepest = 0\n"
        "def dive(depth):\n"
        "    global deepest\n"
        "    deepest = depth\n"
        "    dive(depth + 1)\n"
        "try:\n    dive(0)\nexcept RecursionError:\n    pass\n"
        "print(deepest, inspect.stack()[-1].filename.rpartition('/')[2])\n"
        "warnings.warn('above', stacklevel=2)\n",
    )
    plain = place.plain("prog.py", python=PYTHON)
    with Workers(place, "prog.py", way=way) as workers:
        ours = workers.run()
    depths = [int(outcome.stdout.split()[0]) for outcome in (plain, ours)]
    assert depths[0] - depths[1] in (3, 4)  # up to Python 3.11 the call of exec counts too
    assert [outcome.stdout.split()[1] for outcome in (plain, ours)] == ["prog.py", "entry.py"]
    assert "mainmodule.py" in ours.stderr
    assert "mainmodule.py" not in plain.stderr


@both
def test_the_debugger_is_imported_and_wrapped(facts, place, way):
    assert "pdb" in facts[way]["modules at start"]
    place.write(
        "prog.py",
        "import pdb, sys\n"
        "print([n for n, f in vars(pdb.Pdb).items() if hasattr(f, '__wrapped__')])\n"
        "print(sys.breakpointhook is sys.__breakpointhook__)\n",
    )
    with Workers(place, "prog.py", way=way) as workers:
        assert workers.run().stdout == "['interaction', 'stop_here']\nTrue\n"


@both
def test_modules_are_there_before_the_script_imports_them(facts, way):
    more = set(facts[way]["modules at start"]) - set(facts[PLAIN]["modules at start"])
    if way == FORKED:
        assert {"torch", "torch.distributed", "torch.utils.data", "numpy"} <= more
        assert more <= set(facts[PLAIN]["modules after import torch"]) | of_the_standard_library(
            more
        )
        assert facts[way]["Threads at start"] == facts[PLAIN]["Threads after import torch"]
        caught = int(facts[PLAIN]["SigCgt after import torch"], 16)
        assert int(facts[way]["SigCgt at start"], 16) == caught | STACKS
        assert facts[way]["resident kB"] > facts[PLAIN]["resident kB"] + 50_000
    else:
        assert more == of_the_standard_library(more)


def of_the_standard_library(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] in sys.stdlib_module_names}


def test_what_torch_reads_at_its_import_was_read_before_the_script(facts, place):
    place.write("late.py", "import os\nos.environ['OMP_NUM_THREADS'] = '1'\n")
    place.write("prog.py", "import late, os, torch\nprint(torch.get_num_threads())\n")
    plain, ours = together(
        lambda: place.plain("prog.py"), lambda: place.muster("prog.py", options=("--start", "auto"))
    )
    assert (plain.code, plain.stdout) == (0, "1\n")
    assert ours.code == 0, ours.stderr
    assert place.log(0, 0) == f"{facts[PLAIN]['torch threads'][0]}\n"


def test_the_ranks_of_a_node_share_their_hashes(numbers):
    assert len({one["Python's hashes"] for one in numbers}) == 1
    assert len({one["an address"] for one in numbers}) == 1


def test_what_was_imported_before_the_fork_is_frozen(facts):
    assert facts[FORKED]["frozen objects"] > 100_000
    assert facts[FRESH]["frozen objects"] == facts[PLAIN]["frozen objects"] == 0


def test_a_preloaded_module_has_seen_no_rank(place):
    place.write("early.py", "import os\nRANK = os.environ.get('RANK')\n")
    place.write("prog.py", "import early, os\nprint(early.RANK, os.environ['RANK'])\n")
    with Workers(place, "prog.py", preload=["early"]) as workers:
        assert workers.run(RANK="3").stdout == "None 3\n"


ZERO = pytest.mark.skipif(
    sys.version_info < (3, 11, 4), reason="this Python reads a script up to its first zero byte"
)


@both
@pytest.mark.parametrize(
    "text",
    [b"x = '\xff'\n", pytest.param(b"x = 1\0\n", marks=ZERO), b"# coding: nothing\n"],
)
def test_a_source_that_is_no_text_is_a_syntax_error_in_other_words(place, text, way):
    place.write("prog.py", "")
    (place.cwd / "prog.py").write_bytes(text)
    plain = place.plain("prog.py", python=PYTHON)
    with Workers(place, "prog.py", way=way) as workers:
        ours = workers.run()
    assert (ours.code, ours.stdout) == (plain.code, plain.stdout) == (1, "")
    assert "SyntaxError: " in ours.stderr
    assert "SyntaxError: " in plain.stderr
    assert ours.stderr != plain.stderr


@both
def test_one_signal_and_one_descriptor_are_for_stacks(facts, way):
    plain, ours = facts[PLAIN], facts[way]
    for name in ("SigCgt after import torch",):
        assert int(ours[name], 16) == int(plain[name], 16) | STACKS
    assert ours["open descriptors"] == [*plain["open descriptors"], "700"]
    assert ours["signal handlers"] == plain["signal handlers"]


def test_one_private_function_of_torch_is_wrapped(place):
    pytest.importorskip("torch", reason="it is torch's function")
    place.write(
        "prog.py",
        "import torch.distributed.distributed_c10d as c10d\n"
        "names = [n for n, f in vars(c10d).items() if hasattr(f, '__wrapped__')]\n"
        "print('_update_default_pg' in names, len(names))\n",
    )
    plain = place.plain("prog.py").stdout.splitlines()[-1].split()
    assert place.muster("prog.py").code == 0
    ours = place.log(0, 0).splitlines()[-1].split()
    assert (plain[0], ours[0]) == ("False", "True")
    assert int(ours[1]) == int(plain[1]) + 1


@pytest.mark.parametrize("code", [0, 3])
def test_what_a_worker_has_started_ends_with_the_run_unless_it_has_a_session(place, code):
    place.write(
        "prog.py",
        "import subprocess, sys\n"
        "none = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.DEVNULL)\n"
        "for own in (False, True):\n"
        "    print(subprocess.Popen(['sleep', '600'], start_new_session=own, **none).pid)\n"
        "sys.exit(int(sys.argv[1]))\n",
    )
    options = ("--nproc-per-node", "1", "--max-restarts", "0", "--python", " ".join(PYTHON))
    done = place.muster("prog.py", str(code), options=options)
    same, own = map(int, place.log(0, 0).split())
    lives = {pid: proc.is_running(pid) for pid in (same, own)}
    proc.kill_quietly(own)
    assert done.code == code, done.stderr
    assert lives == {same: False, own: code == 0}
    told = f"in sessions of their own: sleep (pid {own})"
    assert (told in done.stderr) is (code == 0)


EXITS = """
import atexit
atexit.register(print, "the script's")
import multiprocessing.util
multiprocessing.util.Finalize(None, print, args=("the module's",), exitpriority=1)
"""


def test_what_was_imported_before_the_script_cleans_up_after_it(place):
    place.write("prog.py", EXITS)
    plain, ours = together(lambda: place.plain("prog.py"), lambda: place.muster("prog.py"))
    assert plain.stdout == "the module's\nthe script's\n"
    assert ours.code == 0, ours.stderr
    assert place.log(0, 0) == "the script's\nthe module's\n"


def test_what_a_script_imports_first_was_imported_once_per_node(place):
    text = "import os, sys\nPID, ARGV = os.getpid(), sys.argv\nCOLOUR = os.environ.get('COLOUR')\n"
    place.write("site-packages/accelerate/__init__.py", text)
    place.write(
        "prog.py",
        "import accelerate as early, sys\nprint(early.PID, early.ARGV == sys.argv, early.COLOUR)\n",
    )
    place.env["PYTHONPATH"] = str(place.cwd / "site-packages")
    with Workers(place, "prog.py", "--lr", "1") as workers:
        assert workers.run().stdout == f"{workers.pid} True None\n"
