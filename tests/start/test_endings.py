"""A program ends under muster as it ends under plain Python: same code, same words, no frame of ours."""

import json
import re
import sys

import pytest

from start.ways import FORKED, FRESH, Place, Workers, hear_report, listening, make_place
from torchmuster.core.model.failure import ErrorParts
from torchmuster.core.model.plan import ScriptKind
from torchmuster.core.net.ipc import WorkerEndedWell

PYTHON = (sys.executable, "-S", "-B")  # without torch, so that a spawner starts at once

NOISY = """
class Noisy:
    def __init__(self, name):
        self.name = name
    def __del__(self):
        print("deleted", self.name)
"""

ENDINGS = {
    "the end of the file": "print('done')",
    "exit with 0": "import sys; sys.exit(0)",
    "exit with 3": "import sys; sys.exit(3)",
    "exit with None": "import sys; sys.exit(None)",
    "exit with a text": "import sys; print('x'); sys.exit('text')",
    "exit with a list": "import sys; sys.exit([1])",
    "exit with -1": "import sys; sys.exit(-1)",
    "exit with 259": "import sys; sys.exit(259)",
    "exit() of site is absent": "exit(4)",
    "os._exit": "import os; print('x', flush=True); os._exit(3)",
    "abort": "import os; os.abort()",
    "SIGTERM": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "SIGINT": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "an exception": "def f():\n    raise ValueError('x')\nf()",
    "a chain of exceptions": "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError(1) from e",
    "an exception during another": "try:\n    1 / 0\nexcept Exception:\n    raise KeyError(1)",
    "a group of exceptions": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])",
    "an exception of the library": "import json\njson.loads('{')",
    "an exception in asyncio": "import asyncio\nasync def f(): 1 / 0\nasyncio.run(f())",
    "an exception that can't be shown": (
        "class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E"
    ),
    "a long exception": "raise ValueError('x' * 100_000)",
    "KeyboardInterrupt": (
        f"{NOISY}import atexit\natexit.register(print, 'atexit')\na = Noisy('a')\n"
        "raise KeyboardInterrupt('k')"
    ),
    "a child of KeyboardInterrupt": "class K(KeyboardInterrupt): pass\nraise K",
    "GeneratorExit": "raise GeneratorExit",
    "a SyntaxError": "print('never')\ndef (:\n",
    "an IndentationError": "def f():\npass",
    "a TabError": "if 1:\n        x = 1\n\ty = 2",
    "a hook of the user": (
        "import sys\n"
        "def hook(kind, error, trace):\n"
        "    print(kind, error, trace.tb_lineno, trace.tb_next, sys.exc_info(), file=sys.stderr)\n"
        "    print(sys.last_value is error, sys.last_traceback is trace, sys.excepthook is hook)\n"
        "sys.excepthook = hook\n"
        "1 / 0"
    ),
    "a hook that fails": (
        "import sys\ndef hook(*_): 1 / 0\nsys.excepthook = hook\nraise KeyError('first')"
    ),
    "a hook that exits": (
        "import sys\ndef hook(*_): sys.exit(7)\nsys.excepthook = hook\nraise KeyError('first')"
    ),
    "no hook": "import sys\ndel sys.excepthook\nraise KeyError('first')",
    "a hook that is None": "import sys\nsys.excepthook = None\nraise KeyError('first')",
    "what atexit sees of an exception": (
        "import atexit, sys\n"
        "atexit.register(lambda: print(sys.last_value, sys.last_traceback.tb_next, sys.excepthook))\n"
        "1 / 0"
    ),
    "atexit in order, with failures": (
        "import atexit, sys\n"
        "for i in range(3): atexit.register(print, i)\n"
        "def bad(): raise RuntimeError('in atexit')\n"
        "atexit.register(bad)\n"
        "atexit.register(sys.exit, 5)"
    ),
    "threads are awaited": (
        "import atexit, threading\n"
        "gate = threading.Event()\n"
        "def late():\n"
        "    gate.wait(); print('thread')\n"
        "threading.Thread(target=late).start()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "atexit.register(print, 'atexit')\n"
        "threading.Timer(0.05, gate.set).start()\n"
        "print('main')"
    ),
    "an exception in a thread": (
        "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='T')\nt.start(); t.join()"
    ),
    "the teardown of the module": (
        f"{NOISY}import atexit, sys\n"
        "a = Noisy('a'); b = Noisy('b'); _c = Noisy('_c'); sys.x = Noisy('sys')\n"
        "many = [Noisy('in a list')]\n"
        "class Cycle: pass\n"
        "c = Cycle(); c.c = c; c.noisy = Noisy('in a cycle')\n"
        "atexit.register(print, 'atexit')"
    ),
    "the teardown after an exception": f"{NOISY}a = Noisy('a')\ndef f():\n    x = Noisy('x'); 1 / 0\nf()",
    "the teardown after an exit": (
        f"{NOISY}import sys\na = Noisy('a')\ndef f():\n    x = Noisy('x'); sys.exit(4)\nf()"
    ),
    "an exception in __del__": "class D:\n    def __del__(self): 1 / 0\nd = D()\ndel d",
    "a warning": "import warnings\ndef f(): warnings.warn('w', stacklevel=2)\nf()",
    "stdout closed": "import sys\nsys.stdout.close()",
    "stdout replaced": "import io, sys\nsys.stdout = io.StringIO()\nprint('x')\n1 / 0",
    "stderr replaced": "import sys\nsys.stderr = sys.stdout\n1 / 0",
    "a forked child that fails": (
        "import os\nif os.fork() == 0:\n    1 / 0\nprint(os.waitstatus_to_exitcode(os.wait()[1]))"
    ),
    "a byte order mark": "\ufeffprint('bom')",
    "carriage returns": "print(1)\r\nprint('''a\r\nb''')\r\n",
}
OWN_ERROR = """\
class UsageError(Exception):
    where, why, fix = "World.loader", "rank 0: 1\\nrank 1: 2", "mend it"
    def explain_to_user(self):
        return "all of it"
raise UsageError("x")
"""
MODULE_ENDINGS = (
    "exit with 3",
    "an exception",
    "a SyntaxError",
    "KeyboardInterrupt",
    "a hook of the user",
)


def normal(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def told(outcome) -> tuple[int, str, str]:
    return outcome.code, normal(outcome.stdout), normal(outcome.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("endings"))


@pytest.fixture(scope="module")
def plain_endings() -> dict[str, tuple[int, str, str]]:
    return {}


@pytest.fixture(scope="module", params=[FORKED, FRESH])
def scripts(request, folder):
    folder.write("prog.py", "")
    with Workers(folder, "prog.py", "arg", way=request.param, python=PYTHON) as workers:
        yield workers


@pytest.fixture(scope="module")
def modules(folder):
    folder.write("prog.py", "")
    with Workers(folder, "prog", way=FORKED, kind=ScriptKind.MODULE, python=PYTHON) as workers:
        yield workers


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_as_under_plain_python(folder, scripts, plain_endings, ending):
    (folder.cwd / "prog.py").write_bytes(ENDINGS[ending].encode())
    if ending not in plain_endings:  # once for both ways
        plain_endings[ending] = told(folder.plain("prog.py", "arg", python=PYTHON))
    assert told(scripts.run()) == plain_endings[ending]


@pytest.mark.parametrize("ending", MODULE_ENDINGS)
def test_a_module_ends_as_under_plain_python(folder, modules, ending):
    folder.write("prog.py", ENDINGS[ending])
    plain = folder.plain("-m", "prog", python=PYTHON)
    assert told(modules.run()) == told(plain)


def test_a_script_that_vanished_is_told_in_pythons_words(folder, scripts):
    (folder.cwd / "prog.py").unlink()
    assert told(scripts.run()) == told(folder.plain("prog.py", python=PYTHON))


def test_a_module_that_is_not_there_is_told_in_pythons_words(folder, modules):
    (folder.cwd / "prog.py").unlink()
    assert told(modules.run()) == told(folder.plain("-m", "prog", python=PYTHON))


def test_an_exception_is_reported_by_the_worker_and_not_by_what_it_has_forked(place):
    place.home.mkdir()
    place.write("prog.py", ENDINGS["a forked child that fails"])
    with Workers(place, "prog.py", python=PYTHON) as workers, listening(workers) as agent:
        outputs = workers.start()
        report = hear_report(agent)
        assert isinstance(report, WorkerEndedWell)
        assert report.largest_group is None
        assert [file.path for file in report.code.files] == ["prog.py"]
        assert workers.finish(outputs).stdout == "1\n"
        agent.setblocking(False)
        with pytest.raises(BlockingIOError):
            agent.accept()
        place.write("prog.py", ENDINGS["an exception"])
        outputs = workers.start()
        agent.setblocking(True)
        error = hear_report(agent).error
        assert workers.finish(outputs).code == 1
        place.write("prog.py", OWN_ERROR)
        outputs = workers.start()
        own = hear_report(agent).error.own
        assert workers.finish(outputs).code == 1
    assert (error.type_name, error.message) == ("ValueError", "x")
    assert error.where == f"{place.cwd}/prog.py:2"
    assert own == ErrorParts(at="World.loader", because=("rank 0: 1", "rank 1: 2"), hint="mend it")


def test_the_hook_of_torch_distributed_shows_no_frame_of_ours(folder):
    pytest.importorskip("torch", reason="it is torch's hook")
    folder.write(
        "dist.py",
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "def f(): raise ValueError('bad batch')\n"
        "f()\n",
    )
    plain = folder.plain("dist.py")
    with Workers(folder, "dist.py", python=(sys.executable,)) as workers:
        ours = workers.run()
    assert "[rank0]: ValueError: bad batch" in plain.stderr
    assert told(ours) == told(plain)


def test_muster_run_ends_with_the_scripts_code_and_shows_its_traceback(place):
    place.write("prog.py", ENDINGS["an exception"])
    pytest.importorskip("torch", reason="the worker needs its store")
    plain = place.plain("prog.py")
    ours = place.muster("prog.py", options=("--nproc-per-node", "1", "--max-restarts", "0"))
    assert ours.code == plain.code == 1
    assert plain.stderr in ours.stderr
    assert place.log(0, 0) == plain.stderr


@pytest.mark.short
def test_a_failure_of_all_ranks_in_two_attempts_shows_its_traceback_in_the_first_only(place):
    place.write("prog.py", "def main():\n    raise ValueError('boom')\n\n\nmain()\n")
    options = ("--nproc-per-node", "2", "--tee", "all", "--max-restarts", "1")
    done = place.muster("prog.py", options=(*options, "--python", f"{sys.executable} -S"))

    assert done.code == 1, done.stderr
    first, _, second = (done.stdout + done.stderr).partition("muster: attempt 1: ")
    # Both ranks may write it at the same time: then neither repeats the other.
    assert first.count("Traceback (most recent call last):") in (1, 2)
    assert "Traceback (most recent call last):" not in second
    assert "the traceback above, which ends:" in done.stderr


# What follows the good end of a script: a death on the way out, and a world that never met.

DIES_LEAVING = """
import atexit, os
if os.environ["RANK"] == "1":
    atexit.register(os.abort)
"""
ALONE = "import torch\nmodel = torch.nn.Linear(2, 1)\nmodel(torch.ones(1, 2)).sum().backward()\n"
TOGETHER = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""
STARTS = {FORKED: "auto", FRESH: "fresh"}
NEVER_MET = "2 workers never formed a process group: if this was training, each trained alone"


def run_two(place: Place, script: str, *options: str):
    place.write("prog.py", script)
    options = ("--nproc-per-node", "2", *options)
    done = place.muster("prog.py", options=(*options, "--run-id", "r"))
    return done, json.loads((place.home / "runs" / "r" / "result.json").read_text())


@pytest.mark.parametrize("way", [FORKED, FRESH])
def test_a_rank_that_dies_leaving_after_its_script_ended_well_is_not_started_again(place, way):
    done, result = run_two(place, DIES_LEAVING, "--start", STARTS[way])

    assert done.code == 0, done.stderr
    assert result["attempts"] == 1
    (note,) = result["notes"]
    assert note.startswith("rank 1 on n1 died of SIGABRT while its interpreter was exiting")
    assert f"muster: {note}\n" in done.stderr


def test_an_exit_code_of_the_scripts_own_exit_handler_is_the_scripts_word(place):
    script = "import atexit, os\natexit.register(os._exit, 3)\n"
    done, result = run_two(place, script, "--max-restarts", "0")
    assert (done.code, result["exit_code"]) == (3, 3)


@pytest.mark.short
def test_workers_that_never_met_are_told_of_and_the_run_has_succeeded(place):
    done, result = run_two(place, ALONE)

    assert (done.code, result["state"]) == (0, "succeeded")
    assert result["notes"] == [NEVER_MET]
    assert f"muster: {NEVER_MET}\n" in done.stderr
    assert NEVER_MET in place.muster_command("status", "r").stdout


def test_workers_that_met_are_not_told_of_even_when_they_have_parted(place):
    done, result = run_two(place, TOGETHER)
    assert (done.code, result["notes"]) == (0, []), done.stderr


@pytest.mark.parametrize(
    ("script", "options"),
    [("print('no torch')", ()), (ALONE, ("--start", "fresh"))],
    ids=["a script without torch", "a fresh interpreter"],
)
def test_workers_that_nobody_can_judge_are_not_accused(place, script, options):
    done, result = run_two(place, script, *options)
    assert (done.code, result["notes"]) == (0, []), done.stderr
