"""Functions and scripts, launched from Python on simulated nodes of this machine."""

import asyncio
import hashlib
import importlib
import json
import os
import sys
import threading
from pathlib import Path

import pytest

import torchmuster
from kit.command import run_muster
from kit.waiting import wait_until
from torchmuster.errors import NotFoundError

LIMIT_S = 120.0
JOB = """\
import os
def train(x, *, y=1):
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
    return x * y + int(os.environ["RANK"])
"""


def job(project, text=JOB, name="job"):
    (project / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def local(**more):
    return {"nproc_per_node": 1, "max_restarts": 0, "no_preflight": True, **more}


def test_a_function_of_a_module_runs_on_two_nodes_and_returns_a_value_for_each_rank(project):
    run = torchmuster.launch(job(project).train, 3, y=5, nodes=2, nproc_per_node=2)

    assert run.results(LIMIT_S) == [15, 16, 17, 18]
    assert run.logs(3) == "rank 3 of 4\n"
    assert run.status().state == "succeeded"
    assert run.status().exit_code == 0
    assert run.run_id.partition("-train-")[1]
    assert json.loads(Path(run.path, "plan.json").read_text())["program"]["target"] == "job:train"
    assert [oct(Path(run.path, name).stat().st_mode & 0o777) for name in ("call", "secret")] == [
        "0o600"
    ] * 2


def test_another_process_finds_the_run_and_its_values(project):
    run = torchmuster.launch(job(project).train, 3, **local())
    run.wait(LIMIT_S)

    assert torchmuster.runs() == [run]
    assert torchmuster.find_run("last").results() == [3]
    assert "succeeded" in run_muster("status", "last", env=dict(os.environ)).stdout


def test_a_closure_travels_by_value_with_its_variables_and_classes(project):
    factor = 7

    class Answer:
        def __init__(self, value):
            self.value = value

    def square(x):
        return Answer({"x": factor * x})

    (answer,) = torchmuster.launch(square, 6, **local()).results(LIMIT_S)

    assert answer.value == {"x": 42}


def test_a_script_gets_its_words_and_has_no_values(project):
    (project / "train.py").write_text("import sys; print(sys.argv[1:])\n")

    run = torchmuster.launch("train.py", "--lr", 0.1, **local(env={"A": "1"})).wait(LIMIT_S)

    assert run.logs() == "['--lr', '0.1']\n"
    with pytest.raises(NotFoundError, match="rank 0 of the run has returned no value") as told:
        run.results()
    assert "only functions return values" in told.value.why


def test_a_failure_says_rank_node_traceback_and_hint(project):
    def fail():
        if os.environ["RANK"] == "1":
            raise ValueError("no such thing")

    run = torchmuster.launch(fail, nodes=2, nproc_per_node=1, max_restarts=0)

    with pytest.raises(torchmuster.RunFailed) as told:
        run.results(LIMIT_S)
    failed = told.value
    assert (failed.rank, failed.node, failed.state) == (1, "n2", "failed")
    assert "ValueError: no such thing" in failed.traceback
    assert 'raise ValueError("no such thing")' in failed.traceback
    assert "torchmuster" not in failed.traceback  # the frames of the function alone
    assert "rank 1 raised ValueError: no such thing" in failed.cause
    assert failed.hint is None  # an exception of the script: its cure is not known
    assert "\n  log: " in str(failed)
    with pytest.raises(torchmuster.RunFailed):
        run.follow()


def test_a_failed_attempt_is_called_again_and_the_values_of_the_last_count(project):
    def flaky():
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if attempt == 0 and os.environ["RANK"] == "1":
            raise OSError("the network is gone")
        return attempt

    run = torchmuster.launch(flaky, nproc_per_node=2, max_restarts=2, restart_policy="count")

    assert run.results(LIMIT_S) == [1, 1]
    assert run.status().num_attempts == 2


def test_a_run_is_cancelled_and_says_so(project):
    def wait():
        import signal

        print("here", flush=True)
        signal.pause()

    run = torchmuster.launch(wait, **local(grace="1s"))
    wait_until(lambda: run.status().state == "running" and _logs(run), "the function", LIMIT_S)
    with pytest.raises(TimeoutError):
        run.wait(0.01)

    run.cancel()

    assert run.status().state == "cancelled"
    with pytest.raises(torchmuster.RunFailed) as told:
        run.wait()
    assert told.value.state == "cancelled"
    run.cancel()  # nothing more to do


def _logs(run):
    try:
        return run.logs()
    except NotFoundError:
        return ""


def test_an_event_loop_waits_for_several_runs_and_may_cancel_one(project):
    def work(x):
        return x

    async def both():
        runs = [torchmuster.launch(work, number, **local()) for number in range(2)]
        values = await asyncio.gather(*(run.results_async(LIMIT_S) for run in runs))
        runs[0].cancel()  # within a running loop
        return values

    assert asyncio.run(both()) == [[0], [1]]


def test_following_shows_rank_0_and_an_interrupt_cancels(project, capsys, monkeypatch):
    def talk():
        import signal

        print("hello", flush=True)
        signal.pause()

    from torchmuster.launcher.api import follow

    run = torchmuster.launch(talk, **local(grace="1s", nproc_per_node=2))
    shown = []

    def interrupt(_, text):
        shown.append(text)
        raise KeyboardInterrupt

    monkeypatch.setattr(follow.StatusDisplay, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.follow()

    assert shown == ["hello\n"]
    assert run.status().state == "cancelled"


def test_the_process_of_the_client_is_never_forked(project):
    forks = []
    os.register_at_fork(before=lambda: forks.append(1))

    torchmuster.launch(job(project).train, 1, **local()).results(LIMIT_S)

    assert forks == []


def test_a_run_outlives_the_thread_that_has_launched_it(project):
    found = []
    function = job(project).train
    thread = threading.Thread(
        target=lambda: found.append(torchmuster.launch(function, 2, **local()))
    )
    thread.start()
    thread.join()

    assert found[0].results(LIMIT_S) == [2]


def test_mistakes_of_the_command_come_with_all_their_parts(project):
    with pytest.raises(torchmuster.NotLaunchedError) as told:
        torchmuster.launch("trian.py", nodes="x", join_timeout="soon")

    assert "`x` is not a valid number of nodes" in told.value.what
    assert [error.where for error in told.value.others] == ["trian.py", "--join-timeout"]
    assert "hint: --nodes 2 or --nodes 1:3" in str(told.value)
    assert torchmuster.runs() == []


def test_a_value_that_cannot_travel_fails_once_with_its_name(project):
    def locked():
        return {"state": [1, threading.Lock()]}

    run = torchmuster.launch(locked, nproc_per_node=1)

    with pytest.raises(torchmuster.RunFailed, match="is a lock") as told:
        run.results(LIMIT_S)
    assert "value['state'][1]" in str(told.value)
    assert run.status().num_attempts == 1


def test_a_large_value_comes_whole(project):
    def large():
        return {"weights": os.urandom(40 << 20)}

    run = torchmuster.launch(large, nproc_per_node=2)

    sizes = [len(value["weights"]) for value in run.results(LIMIT_S)]
    assert sizes == [40 << 20] * 2
    assert run.status().num_attempts == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "link", "python"])
def test_a_call_file_that_is_not_the_run_s_is_not_unpickled(project, damage, tmp_path):
    """The plan names the hash; the worker of a run that waits for its node reads the file only then."""
    gate = tmp_path / "go"

    mark = tmp_path / "unpickled"

    class Trap:
        def __reduce__(self):
            return (open, (str(mark), "w"))

    def trapped(trap):
        return 1

    before = f"while [ ! -e {gate} ]; do sleep 0.05; done"
    run = torchmuster.launch(trapped, Trap(), **local(before=[before]))
    call = Path(run.path, "call")
    data = call.read_bytes()
    if damage == "flip":
        call.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    elif damage == "cut":
        call.write_bytes(data[:-1])
    elif damage == "link":
        call.rename(tmp_path / "elsewhere")
        call.symlink_to(tmp_path / "elsewhere")
    else:
        own = f"{sys.version_info.major}.{sys.version_info.minor}".encode()
        call.write_bytes(data.replace(b'"python":"' + own, b'"python":"3.2', 1))
    gate.touch()

    with pytest.raises(torchmuster.RunFailed, match="call file"):
        run.results(LIMIT_S)
    assert not mark.exists()


def test_a_call_of_another_python_is_refused_before_it_is_unpickled(project, monkeypatch):
    """The hash is right: such a file comes of a client with another Python."""
    from torchmuster.launcher.model.carried import CallHead, CarryError, pack_call
    from torchmuster.launcher.node.spawner import function

    data = pack_call(CallHead(name="train", python="3.2"), b"not even a pickle")
    Path("call").write_bytes(data)
    monkeypatch.setenv("TORCHMUSTER_RUN_DIR", str(Path.cwd()))

    with pytest.raises(CarryError, match=r"Python 3\.2"):
        function.call(hashlib.sha256(data).hexdigest(), "")


def test_a_worker_leaves_behind_nothing_unfinished(project, tmp_path):
    """It ends without taking Python apart, but not before its threads, its exit handlers and its files."""

    def work():
        import atexit
        import builtins
        import threading

        rank = os.environ["RANK"]
        builtins.kept = open(tmp_path / f"open-{rank}", "w")  # noqa: SIM115 - nobody closes it
        builtins.kept.write("written")
        atexit.register((tmp_path / f"exit-{rank}").touch)
        gate = threading.Event()
        threading.Timer(0.2, gate.set).start()
        threading.Thread(
            target=lambda: gate.wait() and (tmp_path / f"thread-{rank}").touch()
        ).start()
        print("last words", end="")

    run = torchmuster.launch(work, nproc_per_node=2, max_restarts=0)

    assert run.results(LIMIT_S) == [None, None]
    assert run.logs(1) == "last words"
    assert sorted(path.name for path in tmp_path.glob("*-*")) == sorted(
        f"{kind}-{rank}" for kind in ("open", "exit", "thread") for rank in range(2)
    )
    assert (tmp_path / "open-1").read_text() == "written"
