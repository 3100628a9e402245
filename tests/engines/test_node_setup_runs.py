"""`muster run --stage --before` and wrapper commands on two simulated nodes of this machine."""

import json
import os
import signal
import subprocess
import sys

import pytest

from kit.command import MUSTER, muster_env, run_muster
from kit.waiting import wait_until
from torchmuster.core import proc

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, sys, pathlib
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
scratch = os.environ["MUSTER_SCRATCH"]
seen = {"scratch": scratch, "there": sorted(os.listdir(scratch)), "flags": sys.orig_argv[1],
        "place": os.environ["MUSTER_PLACE"], "parent": os.getppid(), "pid": os.getpid()}
pathlib.Path(f"seen-{rank}-{attempt}.tmp").write_text(json.dumps(seen))
os.rename(f"seen-{rank}-{attempt}.tmp", f"seen-{rank}-{attempt}.json")
if "fail-once" in sys.argv and rank == "0" and attempt == "0":
    raise ValueError("once")
if "hold-once" in sys.argv and attempt == "0":
    import signal
    signal.pause()
"""
# As `conda run` does: nothing is inherited, and the wrapper waits for its Python.
FORKS = """#!{python}
import os, sys
os.closerange(3, 4096)
pid = os.fork()
if pid == 0:
    os.execv({python!r}, [{python!r}, *sys.argv[2:]])
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
sys.exit(status if status >= 0 else 128 - status)
"""
# As `uv run` does.
EXECUTES = """#!{python}
import os, sys
os.closerange(3, 4096)
os.execv({python!r}, [{python!r}, *sys.argv[2:]])
"""


@pytest.fixture
def stage(tmp_path):
    """Return a folder with a script and a temporary folder of its own."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "tmp").mkdir()
    for name, text in (("forks", FORKS), ("executes", EXECUTES)):
        (tmp_path / name).write_text(text.format(python=sys.executable))
        (tmp_path / name).chmod(0o755)
    return tmp_path


def environment(folder):
    return muster_env(folder / "home", TMPDIR=str(folder / "tmp"))


def muster(folder, *words):
    return run_muster("run", "--run-id", "r", *words, env=environment(folder), cwd=folder)


def seen(folder, rank, attempt=0):
    path = folder / f"seen-{rank}-{attempt}.json"
    return json.loads(path.read_text()) if path.exists() else None


def test_data_is_staged_on_every_node_and_removed_at_the_end(stage):
    (stage / "data").mkdir()
    (stage / "data" / "a").write_text("1")
    before = "echo $MUSTER_PLACE >> order; test -e $MUSTER_SCRATCH/in/data/a"
    words = ("--nodes", "2", "--stage", "data:in/data", "--before", before)
    done = muster(stage, *words, "train.py")

    assert done.returncode == 0, done.stderr
    assert sorted((stage / "order").read_text().split()) == ["0", "1"]
    places = [seen(stage, rank) for rank in (0, 1)]
    assert places[0]["scratch"] != places[1]["scratch"]
    assert all("in" in place["there"] for place in places)
    assert list((stage / "tmp").iterdir()) == [], "nothing is left"


def test_every_run_has_an_empty_scratch_folder(stage):
    done = muster(stage, "train.py")

    assert done.returncode == 0, done.stderr
    assert seen(stage, 0)["there"] == []
    assert list((stage / "tmp").iterdir()) == []


def test_a_restart_does_not_set_the_node_up_again(stage):
    done = muster(stage, "--before", "echo x >> times", "train.py", "fail-once")

    assert done.returncode == 0, done.stderr
    assert (stage / "times").read_text() == "x\n"
    assert seen(stage, 0, 1)["scratch"] == seen(stage, 0, 0)["scratch"]


def test_a_failing_command_ends_the_run_with_its_reason_and_leaves_nothing(stage):
    done = muster(stage, "--nodes", "2", "--before", "echo bad luck >&2; exit 3", "train.py")

    assert done.returncode == 1
    assert "error: a command of --before failed on n" in done.stderr
    assert "because: bad luck\n    exit code 3" in done.stderr
    assert seen(stage, 0) is None
    assert list((stage / "tmp").iterdir()) == []


def test_wrong_stages_are_refused_together_before_anything_starts(stage):
    done = muster(stage, "--stage", "a:../b", "--stage", "c:/d", "train.py")

    assert done.returncode == 2
    assert "is outside the scratch folder" in done.stderr
    assert "absolute" in done.stderr
    assert not (stage / "home" / "runs").exists()


@pytest.mark.parametrize("wrapper", ["forks", "executes"])
@pytest.mark.parametrize("start", ["fork", "fresh"])
def test_a_wrapper_that_closes_what_it_inherits_runs_the_workers(stage, wrapper, start):
    words = ("--python", f"{stage}/{wrapper} python -B", "--start", start, "--nodes", "2")
    done = muster(stage, *words, "train.py", "fail-once")

    assert done.returncode == 0, done.stderr
    assert "ValueError: once in rank 0" in done.stderr
    assert seen(stage, 1, 1)["flags"] == "-B"


def test_a_wrapper_that_ends_at_once_gives_its_own_words(stage):
    (stage / "conda").write_text(
        "#!/bin/sh\necho EnvironmentLocationNotFound: lightning >&2\nexit 4\n"
    )
    (stage / "conda").chmod(0o755)
    done = muster(stage, "--python", f"{stage}/conda run -n lightning python", "train.py")

    assert done.returncode == 1
    assert "conda run -n lightning python` ended before its Python had started" in done.stderr
    assert "because: EnvironmentLocationNotFound: lightning" in done.stderr
    assert "exit code 4" in done.stderr


@pytest.fixture
def held(stage):
    """Return a run whose first attempt waits behind a forking wrapper."""
    words = ["run", "--run-id", "r", "--python", f"{stage}/forks python", "train.py", "hold-once"]
    with open(stage / "stderr", "wb") as log:
        process = subprocess.Popen(
            [*MUSTER, *words],
            cwd=stage,
            env=environment(stage),
            stdin=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until(lambda: seen(stage, 0), "the worker")
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_a_killed_spawner_behind_a_wrapper_is_replaced(stage, held):
    spawner = seen(stage, 0)["parent"]
    wrapper = proc.read_process(spawner).parent_pid
    os.kill(spawner, signal.SIGKILL)

    assert held.wait(60) == 0, (stage / "stderr").read_text()
    assert "its spawner ended" in (stage / "stderr").read_text()
    assert seen(stage, 0, 1) is not None
    wait_until(lambda: not proc.is_running(wrapper), "the wrapper's end")


def test_a_killed_wrapper_costs_no_worker_and_nothing_is_left(stage, held):
    spawner = seen(stage, 0)["parent"]
    worker = seen(stage, 0)["pid"]
    os.kill(proc.read_process(spawner).parent_pid, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)  # the spawner still serves: it starts the next attempt

    assert held.wait(60) == 0, (stage / "stderr").read_text()
    assert seen(stage, 0, 1)["parent"] == spawner
    wait_until(lambda: not proc.is_running(spawner), "the spawner's end")
