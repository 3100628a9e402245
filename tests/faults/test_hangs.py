"""A rank that stands while the others wait is found, named and ended; slow ones are not."""

import os
import re
import shutil
from pathlib import Path

import pytest

from kit import missing
from kit.command import muster_env, run_muster
from kit.waiting import wait_until

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")
WATCHED = str(Path(__file__).with_name("watched.py"))
BLIND = str(Path(__file__).with_name("watched_blind.py"))
LIMIT_S = 120.0
COMPILE_LIMIT_S = 300.0  # a compiler on a busy machine


@pytest.fixture
def train(job):
    """Return a function that starts a watched training."""

    def start(mode, *, nodes=1, workers=2, limit="8s", restarts=0, script=WATCHED, **env):
        options = ("--nodes", str(nodes), "--nproc-per-node", str(workers), "--tee", "none")
        more = ("--max-restarts", str(restarts), "--hang-timeout", limit)
        return job(*options, *more, script=(script, mode), env=env).start()

    return start


def ask(run, *words):
    """Run a command of ours that speaks to the run."""
    return run_muster(*words, env=muster_env(run.home), limit_s=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "headline", "place"),
    [
        ("data", r"rank 1 stood still for \d+ s while 2 ranks waited in backward", "read"),
        ("stop", r"rank 1 was stopped \(SIGSTOP\) for \d+ s while 2 ranks waited in", None),
        pytest.param(
            "branch",
            r"rank 1 waited in barrier for \d+ s while 2 ranks waited in backward",
            "odd",
            marks=pytest.mark.lab,
        ),
    ],
)
def test_the_rank_that_stands_is_named_as_the_cause(train, mode, headline, place):
    run = train(mode, workers=3)
    assert run.wait(LIMIT_S) == 1
    report = run.result()["report"]
    assert re.match(headline, report["error"])
    assert "rank 1 of 3 on n1" in report["at"]
    if place is not None:
        assert re.search(rf"watched\.py:\d+ in {place}\b", report["at"])
    assert "--hang-timeout" in report["hint"]
    warned, *_, ended = run.events("hang")
    assert not warned["ended"]
    assert ended["ended"]
    assert run.result()["cause"]["kind"] == "hang"
    assert "watched.py" in Path(ended["stacks"]).read_text()


@pytest.mark.slow
@pytest.mark.lab
def test_a_hang_without_the_library_is_found_by_stacks_and_processor_time(train):
    run = train("data", nodes=2, workers=1, script=BLIND)
    assert run.wait(LIMIT_S) == 1
    error = run.result()["report"]["error"]
    assert re.match(r"rank 1 stood still for \d+ s while 1 rank waited in all_reduce", error)
    assert "rank 1 of 2 on n2" in run.result()["report"]["at"]


@pytest.mark.slow
def test_a_hang_counts_as_a_failure_and_all_workers_start_again(train):
    run = train("data", limit="6s", restarts=1)
    second = wait_until(lambda: run.events("workers_started")[1:], "a second attempt", LIMIT_S)
    assert second[0]["attempt"] == 1
    assert "rank 1 stood still" in run.events("attempt_failed")[0]["what"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["evaluate", "save", "busy", "first"])
@pytest.mark.lab
def test_what_may_take_long_is_no_hang(train, mode):
    # Longer than 10 of the steps that a busy machine makes of 10 ms: else nothing could be told of.
    run = train(mode, limit="3s:10m", LONG_S="30", STEPS="200")
    assert run.wait(LIMIT_S) == 0, run.stderr
    assert run.events("hang") == []


@pytest.mark.slow
@pytest.mark.lab
def test_who_sits_in_a_debugger_is_no_hang_for_longer_than_the_most(train):
    run = train("breakpoint", limit="3s:6s", LONG_S="20", STEPS="200")
    assert run.wait(LIMIT_S) == 0, run.stderr
    assert run.events("hang") == []
    assert "(Pdb)" in _log(run, 1)


@pytest.mark.slow
@pytest.mark.lab
def test_a_compiler_that_takes_long_is_no_hang(train, tmp_path):
    slow, mark = tmp_path / "slow-g++", tmp_path / "has-waited"
    # As on a slow file system: the rank itself does nothing meanwhile.
    slow.write_text(f'#!/bin/sh\nmkdir {mark} 2>/dev/null && sleep 40\nexec {_compiler()} "$@"\n')
    slow.chmod(0o700)
    run = train(
        "compile",
        limit="3s:10m",
        STEPS="200",
        CXX=str(slow),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert run.wait(COMPILE_LIMIT_S) == 0, run.stderr
    assert mark.is_dir()
    assert run.events("hang") == []


@pytest.mark.slow
@pytest.mark.lab
def test_real_compilation_is_no_hang(train, tmp_path):
    _compiler()
    cache = str(tmp_path / "cache")
    run = train(
        "compile-on", limit="3s:10m", LONG_S="12", STEPS="200", TORCHINDUCTOR_CACHE_DIR=cache
    )
    assert run.wait(COMPILE_LIMIT_S) == 0, run.stderr
    assert run.events("hang") == []


def _compiler():
    """Return the path of g++; torch.compile needs it on processors."""
    return shutil.which("g++") or missing.stop("torch.compile needs g++")


def _log(run, rank):
    folder = run.run_dir / "logs" / "main" / "train" / "attempt-0"
    return (folder / f"rank-{rank}.log").read_text()


@pytest.mark.slow
@pytest.mark.lab
def test_a_rank_that_became_another_program_is_shown_by_py_spy_or_said_to_need_it(train):
    run = train("again", nodes=1, workers=2, limit="off", script=BLIND)
    word = "read (" if shutil.which("py-spy") else "pip install py-spy"
    wait_until(lambda: word in ask(run, "stacks", "last").stdout, word, LIMIT_S)


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.parametrize(
    ("mode", "part"), [("straggler", "data"), ("slow backward", "after forward")]
)
def test_a_slow_rank_is_named_with_what_is_slow(train, mode, part):
    run = train(mode, limit="60s", STEPS="400")
    event = run.wait_event("straggler", timeout_s=LIMIT_S)
    assert (event["rank"], event["part"]) == (1, part)
    assert re.match(
        rf"rank 1 on n1 is \d+ % slower than the others for \d+ steps: {part}", event["text"]
    )


@pytest.mark.slow
def test_stacks_and_commands_reach_the_ranks_of_a_running_run(train):
    run = train("data", nodes=2, workers=1, limit="off")
    words = ("rank 0 waits in backward (watched.py", "rank 1 on n2 is in read() (watched.py")
    wait_until(lambda: _says(run, words), "one that waits and one that reads", LIMIT_S)
    words = ("exec", "last", "--rank", "1", "--", "sh", "-c", "echo $RANK $WORLD_SIZE; exit 3")
    done = ask(run, *words)
    assert (done.stdout, done.returncode) == ("1 2\n", 3)
    done = ask(run, "exec", "last", "--node", "n2", "--", "sh", "-c", "echo ${RANK:-none}")
    assert done.stdout == "none\n"
    done = ask(run, "exec", "last", "--rank", "9", "--", "true")
    assert "has no rank 9" in done.stderr
    assert "ranks 0 to 1" in done.stderr
    assert run.events("hang") == []


def _says(run, words):
    """Say whether the first line of `muster stacks` holds all of these words."""
    first = ask(run, "stacks", "last").stdout.partition("\n")[0]
    return all(word in first for word in words)


def test_debug_gives_nccl_a_file_for_each_rank_and_keeps_what_the_user_has_set(job, tmp_path):
    script = tmp_path / "show.py"
    names = "NCCL_DEBUG NCCL_DEBUG_FILE TORCH_DISTRIBUTED_DEBUG TORCH_CPP_LOG_LEVEL"
    script.write_text(f"import os\nprint([os.environ[n] for n in {names.split()!r}])\n")
    run = job("--nproc-per-node", "2", "--debug", script=(str(script),), env={"NCCL_DEBUG": "WARN"})
    assert run.start().wait() == 0, run.stderr
    logs = run.run_dir / "logs" / "main" / "train" / "attempt-0"
    for rank in range(2):
        shown = (logs / f"rank-{rank}.log").read_text()
        assert f"['WARN', '{os.fspath(logs)}/nccl-{rank}.log', 'DETAIL', 'INFO']" in shown
