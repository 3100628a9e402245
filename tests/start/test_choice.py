"""Forked or fresh: which is chosen, what is said, and what is imported before the fork."""

import json
import sys

import pytest

from start.ways import AUTO, FORKED, FRESH, PYTHON, Outcome, Place, Workers, together
from torchmuster.core.node.spawner.messages import InterpreterRefused

FALLS_BACK = "workers are started as fresh interpreters, not forked: "
SAYS_HOW = """
import json, os, sys
started = {"forked": "spawner" in open("/proc/self/cmdline").read().split("\\0")}
started["torch"] = "torch" in sys.modules
started["numpy"] = "numpy" in sys.modules
"""
ONE = ("--nproc-per-node", "1")


def notices(place: Place) -> set[str]:
    """Return the sentences that the run had for its user."""
    return {event["text"] for event in place.events("notice")}


@pytest.fixture(autouse=True)
def _needs_torch():
    pytest.importorskip("torch", reason="the choice depends on what torch does")


def test_a_script_that_sets_what_torch_reads_is_started_fresh_and_one_line_says_so(place):
    place.write(
        "prog.py",
        "import os\n"
        'def limit(env): env["OMP_NUM_THREADS"] = "1"\n'
        "limit(os.environ)\n"
        f"{SAYS_HOW}"
        "import torch\n"
        'started["threads"] = torch.get_num_threads()\n'
        "print(json.dumps(started))\n",
    )
    done = place.muster("prog.py", options=ONE)
    assert done.facts() == {"forked": False, "torch": False, "numpy": False, "threads": 1}
    why = "the script changes OMP_NUM_THREADS, which is read while torch is imported"
    assert notices(place) == {FALLS_BACK + why}


def test_threads_that_are_asked_for_from_outside_leave_the_fork_and_reach_the_worker(place):
    place.write(
        "prog.py",
        f"{SAYS_HOW}"
        "import torch\n"
        'started["threads"] = torch.get_num_threads(), len(os.listdir("/proc/self/task"))\n'
        "print(json.dumps(started))\n",
    )
    place.env["OMP_NUM_THREADS"] = "2"
    plain, ours = together(
        lambda: place.plain("prog.py"), lambda: place.muster("prog.py", options=ONE)
    )
    assert ours.facts()["forked"] is True
    assert ours.facts()["threads"] == plain.facts()["threads"]
    assert notices(place) == set()


@pytest.mark.parametrize("way", [AUTO, FRESH])
@pytest.mark.parametrize("name", ["code", "queue", "platform", "cmd", "string", "dataclasses"])
def test_a_module_beside_the_script_hides_pythons_own_as_under_plain_python(place, name, way):
    place.write(f"{name}.py", "MINE = __file__\n")
    place.write("prog.py", f"import {name}\nprint({name}.MINE)\n")
    plain = place.plain("prog.py", python=PYTHON)
    with Workers(place, "prog.py", way=way) as workers:
        assert workers.run().stdout == plain.stdout == f"{place.cwd}/{name}.py\n"
    if way == AUTO:
        why = f"{name} in the script's folder hides Python's own module of this name"
        assert (workers.ready.forks, workers.ready.why) == (False, why)


def test_code_that_runs_at_the_start_and_reads_a_rank_has_one(place):
    path = place.write("site/sitecustomize.py", "import os\nRANK = os.environ.get('RANK')\n")
    place.write("prog.py", "import sitecustomize\nprint(sitecustomize.RANK)\n")
    place.env["PYTHONPATH"] = str(place.cwd / "site")
    with Workers(place, "prog.py", python=(sys.executable,), way=AUTO) as workers:
        assert workers.run(RANK="3").stdout == "3\n"
    why = f"{place.cwd}/{path} runs when Python starts, and reads what only a worker has"
    assert workers.ready.why == why


def test_a_write_that_can_t_be_read_makes_workers_fresh(place):
    place.write("prog.py", "import os, sys\n\nos.environ[sys.argv[0]] = '1'\n")
    with Workers(place, "prog.py", way=AUTO) as workers:
        assert workers.ready.why == (
            "the script changes an environment variable in line 3 whose name its source doesn't show,"
            " and torch reads some while it is imported"
        )


def test_an_import_that_starts_a_thread_makes_workers_fresh_and_one_line_says_so(place):
    place.write(
        "busy.py",
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    )
    place.write("prog.py", f"{SAYS_HOW}print(json.dumps(started))\n")
    options = (*ONE, "--preload", "busy", "--python", " ".join(PYTHON))
    assert place.muster("prog.py", options=options).code == 0
    started = {"forked": False, "torch": False, "numpy": False}
    assert json.loads(place.log(0, 0)) == started
    why = "the imports started a second thread in the spawner"
    assert notices(place) == {FALLS_BACK + why}


def test_fork_and_fresh_are_obeyed_without_a_word(place):
    place.write(
        "prog.py",
        f"{SAYS_HOW}os.environ['OMP_NUM_THREADS'] = '3'\nprint(json.dumps(started))\n",
    )
    ways = ("fork", "fresh")
    together(
        *(
            lambda way=way: place.muster("prog.py", options=(*ONE, "--start", way, "--run-id", way))
            for way in ways
        )
    )
    started = {way: json.loads(place.log(0, 0, run=way)) for way in ways}
    assert started == {
        "fork": {"forked": True, "torch": True, "numpy": True},
        "fresh": {"forked": False, "torch": False, "numpy": False},
    }
    assert notices(place) == set()


def test_preloaded_modules_are_imported_once_before_the_fork(place):
    place.write("beside/mine.py", "import os\nPID = os.getpid()\nprint('mine is imported')\n")
    place.write("beside/prog.py", f"{SAYS_HOW}import mine\nprint(mine.PID == os.getppid())\n")
    options = ("--nproc-per-node", "2", "--tee", "all", "--preload", "mine", "--preload", "numpy")
    done = place.muster("beside/prog.py", options=options)
    assert done.code == 0, done.stderr
    ranks = sorted(line for line in done.stdout.splitlines() if line.startswith("[rank "))
    assert ranks == ["[rank 0] True", "[rank 1] True"]
    assert done.stdout.count("mine is imported") == 1
    assert "mine" not in place.log(0, 0)


# Each says who has imported it.
LIBRARY = "import os\nPID = os.getpid()\n"
USES = "import torchmuster.train as tm\nprint(tm.__file__.split('/')[-3], tm.PID == os.getppid())\n"


@pytest.mark.parametrize(
    ("train", "way", "text", "printed"),
    [
        (LIBRARY, FORKED, "", "work True\n"),
        (LIBRARY, FRESH, "", "work False\n"),
        (LIBRARY, FORKED, "sys.path.insert(0, os.path.abspath('other'))\n", "other False\n"),
        (f"{LIBRARY}import absent", FORKED, "sys.path.insert(0, 'other')\n", "other False\n"),
    ],
    ids=["forked", "fresh", "another one", "one that fails"],
)
def test_the_script_s_own_library_is_imported_once_before_the_fork(
    place, train, way, text, printed
):
    for folder, library in (("torchmuster", train), ("other/torchmuster", LIBRARY)):
        place.write(f"{folder}/__init__.py", "")
        place.write(f"{folder}/train.py", library)
    place.write("prog.py", f"import os, sys\nassert 'torchmuster' not in sys.modules\n{text}{USES}")
    with Workers(place, "prog.py", way=way) as workers:
        assert workers.run() == Outcome(0, printed, "")


def test_a_job_without_torch_is_forked_too(place):
    place.write("prog.py", f"{SAYS_HOW}print(json.dumps(started))\n")
    with Workers(place, "prog.py", preload=["json"]) as workers:
        assert (workers.ready.forks, workers.ready.torch) == (True, None)
        assert workers.run().facts() == {"forked": True, "torch": False, "numpy": False}


@pytest.mark.parametrize(
    ("name", "text", "preload", "why"),
    [
        (
            "torch.py",
            "raise RuntimeError('broken')",
            [],
            "`import torch` failed: {file} has the name of a module that it needs: RuntimeError: broken",
        ),
        (
            "torch.py",
            "",
            [],
            "`import torch` failed: {file} has the name of a module that it needs: No module",
        ),
        ("mine.py", "1 / 0", ["mine"], "--preload mine: ZeroDivisionError: division by zero"),
        ("mine.py", "", ["mime"], "--preload mime: ModuleNotFoundError: No module named 'mime'"),
    ],
)
def test_an_import_that_fails_before_the_fork_is_told(place, name, text, preload, why):
    place.write("prog.py", "")
    place.write(name, text)
    file = place.cwd / name
    with Workers(place, "prog.py", way=FORKED, preload=preload) as workers:
        assert isinstance(workers.ready, InterpreterRefused)
        assert workers.ready.why.startswith(why.format(file=file))
        assert workers.ready.hint == (None if preload else f"rename {file}")
